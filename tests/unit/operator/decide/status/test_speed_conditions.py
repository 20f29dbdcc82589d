"""The measured step time counts only steps under the plan in force and at its own shares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from heterotrain_core.contract.plan import Binding, Prediction
from heterotrain_operator.cluster_state.telemetry import MemberId, StepsInForce, Telemetry
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.speed_conditions import LEAST_STEPS, prediction_of
from support.plans import plan_of


def measured_step_s(*, version: tuple[int, int] = (1, 2), share: int = 30, steps: int = LEAST_STEPS) -> float | None:
    """Return the measured step time of plan 1.2 with one member and a share of 30, after steps of half a second."""
    prediction = Prediction(step_s=0.4, efficiency=1.0, efficiency_ceiling=1.0, bindings=(Binding.COMPUTE,))
    plan = plan_of([30], revision=2, prediction=prediction)
    done = StepsInForce(version=version).after(share, steps, 0.5)
    context = SimpleNamespace(
        job=SimpleNamespace(status=SimpleNamespace(prediction=None)),
        plan=plan,
        runs=True,
        began=True,
        applied=plan.version,
        telemetry=Telemetry(in_force={MemberId("u0", 0): done}),
    )
    found = prediction_of(cast("JobContext", context))
    assert found is not None
    assert found.predicted_step_seconds == 0.4
    return found.measured_step_seconds


def test_steps_of_the_plan_in_force_count() -> None:
    assert measured_step_s() == pytest.approx(0.5)


def test_steps_under_another_plan_at_other_shares_or_too_few_do_not() -> None:
    assert measured_step_s(version=(1, 1)) is None
    assert measured_step_s(share=31) is None
    assert measured_step_s(steps=LEAST_STEPS - 1) is None
