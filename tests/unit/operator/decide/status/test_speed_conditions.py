"""The measured step time counts only steps under the plan in force and at its own shares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from heterotrain_core.contract.plan import Binding, Prediction
from heterotrain_operator.api.status import PredictionStatus
from heterotrain_operator.cluster_state.telemetry import MemberId, StepsInForce, Telemetry
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.status.speed_conditions import LEAST_STEPS, prediction_of
from support.plans import plan_of


def found_after(
    *,
    version: tuple[int, int] = (1, 2),
    share: int = 30,
    steps: int = LEAST_STEPS,
    newest: int = 2,
    before: PredictionStatus | None = None,
) -> PredictionStatus | None:
    """Return what is known of plan 1.2 with one member and a share of 30, after steps of half a second."""
    prediction = Prediction(step_s=0.4, efficiency=1.0, efficiency_ceiling=1.0, bindings=(Binding.COMPUTE,))
    plan = plan_of([30], revision=newest, prediction=prediction)
    done = StepsInForce(version=version).after(share, steps, 0.5)
    context = SimpleNamespace(
        job=SimpleNamespace(status=SimpleNamespace(prediction=before)),
        plan=plan,
        runs=True,
        began=True,
        applied=(1, 2),
        telemetry=Telemetry(in_force={MemberId("u0", 0): done}),
    )
    return prediction_of(cast("JobContext", context))


def measured_step_s(*, version: tuple[int, int] = (1, 2), share: int = 30, steps: int = LEAST_STEPS) -> float | None:
    """Return the measured step time of plan 1.2."""
    found = found_after(version=version, share=share, steps=steps)
    assert found is not None
    assert found.predicted_step_seconds == 0.4
    return found.measured_step_seconds


def test_steps_of_the_plan_in_force_count() -> None:
    assert measured_step_s() == pytest.approx(0.5)


def test_steps_under_another_plan_at_other_shares_or_too_few_do_not() -> None:
    assert measured_step_s(version=(1, 1)) is None
    assert measured_step_s(share=31) is None
    assert measured_step_s(steps=LEAST_STEPS - 1) is None


def test_the_plan_in_force_is_measured_while_a_newer_one_waits() -> None:
    """The newer plan has other shares and another prediction; the status alone knows those of the one in force."""
    before = PredictionStatus(plan="1.2", predicted_step_seconds=0.25)
    found = found_after(newest=3, before=before)
    assert found is not None
    assert (found.plan, found.predicted_step_seconds) == ("1.2", 0.25)
    assert found.measured_step_seconds == 0.5
    assert found_after(newest=3, before=before, steps=LEAST_STEPS - 1) is before
    assert found_after(newest=3, before=before, version=(1, 1)) is before
    other = PredictionStatus(plan="1.1", predicted_step_seconds=0.25)
    assert found_after(newest=3, before=other) is other
    assert found_after(newest=3) is None
