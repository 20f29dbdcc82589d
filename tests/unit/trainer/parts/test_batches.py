"""Batches and loss functions of ``step.compute``."""

from __future__ import annotations

import pytest
from heterotrain.errors import UsageError
from heterotrain.parts.batches import check_loss_function, inputs_and_targets, loss_and_weight, run


def test_inputs_become_the_model_s_arguments() -> None:
    def model(*arguments: int, **named: int) -> tuple[tuple[int, ...], dict[str, int]]:
        return arguments, named

    assert run(model, 1) == ((1,), {})
    assert run(model, (1, 2)) == ((1, 2), {})
    assert run(model, {"x": 1}) == ((), {"x": 1})


@pytest.mark.parametrize(("batch", "what"), [(3, "a int"), ({"x": 1}, "a dict"), ((1, 2, 3), "a tuple of 3")])
def test_a_batch_that_is_not_a_pair_is_refused(batch: object, what: str) -> None:
    with pytest.raises(UsageError, match=rf"needs batches of two parts, \(inputs, targets\), and got {what}: return"):
        inputs_and_targets(batch)


def test_a_loss_is_a_mean_or_a_sum_with_its_weight() -> None:
    assert inputs_and_targets([1, 2]) == (1, 2)
    assert loss_and_weight(0.5) == (0.5, None)
    assert loss_and_weight((6.0, 3)) == (6.0, 3.0)


def needs_a_mask(output: object, targets: object, mask: object) -> None:
    """Take more than a stage knows."""


def test_a_loss_function_with_other_arguments_is_refused() -> None:
    with pytest.raises(UsageError, match=r"this one cannot be called so \(missing a required argument: 'mask'\): put"):
        check_loss_function(needs_a_mask)
    with pytest.raises(UsageError, match=r"takes a function, loss_fn\(output, targets\), not a str"):
        check_loss_function("mse")
    check_loss_function(lambda output, _targets, scale=2.0: output * scale)
    check_loss_function(lambda *parts: parts)
    check_loss_function(max)
