"""The factor on the learning rate, and the time of schedules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.numerics.learning_rate import Rate, RatePolicy, check, schedule_steps, step_scaled
from heterotrain_core.scaling_rules import Family, Scaling


def followed(scaling: Scaling, batches: list[int], **fields: Any) -> list[Rate]:
    """Return the state of the factor after each step with these batches, for a base batch of 16."""
    policy = RatePolicy(scaling=scaling, base_samples=16, warm_up_samples=fields.pop("warm_up", 0))
    rates, rate, done = [], Rate(), 0
    for batch in batches:
        after = policy.next(
            rate,
            batch_samples=batch,
            done_samples=done,
            **({"family": Family.SGD, "noise_samples": None} | fields),
        )
        rates.append(after)
        rate, done = after, done + batch
    return rates


def test_a_changed_batch_takes_effect_over_the_warm_up() -> None:
    """The factor is a straight line in samples from its last value, also if the batch changes during the warm-up."""
    rates = followed(Scaling.LINEAR, [16, 16, 48, 48, 48, 48, 32, 32, 32, 32, 32], warm_up=96)
    assert [rate.factor for rate in rates] == pytest.approx([1, 1, 1, 2, 3, 3, 3, 3 - 1 / 3, 3 - 2 / 3, 2, 2])


def test_without_a_rule_nothing_changes() -> None:
    """This holds for any batch; every step is one step of a schedule."""
    rates = followed(Scaling.NONE, [16, 64, 8])
    assert [rate.factor for rate in rates] == [1.0, 1.0, 1.0]
    assert [rate.worth_steps for rate in rates] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("scaling", "family", "factor", "worth"),
    [
        (Scaling.LINEAR, Family.SGD, 4.0, 4.0),
        (Scaling.SQRT, Family.ADAPTIVE, 2.0, 4.0),
        (Scaling.ADASCALE, Family.SGD, 5 / 2, 5 / 2),
        (Scaling.ADASCALE, Family.ADAPTIVE, (5 / 2) ** 0.5, 5 / 2),
    ],
)
def test_the_rule_decides_the_worth_of_a_step(scaling: Scaling, family: Family, factor: float, worth: float) -> None:
    """At phi = B = 64 = 4 B_0 the gain is (4 + 1) / (1 + 1)."""
    (rate,) = followed(scaling, [64], family=family, noise_samples=64.0)
    assert (rate.factor, rate.worth_steps) == pytest.approx((factor, worth))


def test_schedules_advance_by_whole_base_steps() -> None:
    """Two and a half base steps per step give two, then three; half batches advance a schedule every other step."""
    rates = [Rate(), *followed(Scaling.LINEAR, [40, 40, 8, 8, 16])]
    assert [schedule_steps(a, b) for a, b in itertools.pairwise(rates)] == [2, 3, 0, 1, 1]
    tenths = [Rate(), *followed(Scaling.LINEAR, [2] * 80)]
    assert sum(schedule_steps(a, b) for a, b in itertools.pairwise(tenths)) == 10


def test_the_step_is_scaled_and_the_rate_restored() -> None:
    """Schedulers continue from the user's own rates, each group with its own."""
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.2}])
    first.grad = second.grad = torch.ones(1)
    step_scaled(optimizer, 3.0)
    assert [float(first.detach()), float(second.detach())] == pytest.approx([-0.3, -0.6])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


def test_adascale_refuses_unsupported_optimizers() -> None:
    """The message has a remedy. Two kinds together are refused too; the other rules accept all kinds."""
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    unknown, adam, sgd = torch.optim.Adagrad(parameters), torch.optim.AdamW(parameters), torch.optim.SGD(parameters)
    with pytest.raises(UsageError, match="does not support Adagrad"):
        check(Scaling.ADASCALE, [unknown])
    with pytest.raises(UsageError, match="cannot combine AdamW and SGD"):
        check(Scaling.ADASCALE, [adam, sgd])
    check(Scaling.LINEAR, [unknown, adam])
    check(Scaling.ADASCALE, [adam, adam])
