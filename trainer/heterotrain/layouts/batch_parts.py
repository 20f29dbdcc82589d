"""What ``step.compute`` makes of a batch and of the value of a loss function, the same in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from heterotrain.errors import UsageError

LossFunction = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, float]]
"""``loss_fn(output, targets)``: the mean loss over the samples, or a sum and its weight."""

PAIR = 2


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """Return the two parts of a batch.

    Raises:
        UsageError: it is not a pair.
    """
    if isinstance(batch, tuple | list) and len(batch) == PAIR:
        return batch[0], batch[1]
    what = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
    raise UsageError(
        f"step.compute needs batches of two parts, (inputs, targets), and got {what}: return such a pair from the "
        "data set, or from job.steps(collate=…)"
    )


def run(model: Callable[..., Any], inputs: Any) -> Any:
    """Return the model's output: a tuple or list gives its arguments, a mapping its named ones, else one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def loss_and_weight(value: Any) -> tuple[Any, float | None]:
    """Return the loss and its weight; ``None`` for the mean over the samples."""
    if isinstance(value, tuple) and len(value) == PAIR:
        return value[0], float(value[1])
    return value, None
