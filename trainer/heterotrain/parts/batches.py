"""What ``step.compute`` makes of a batch and of the value of a loss function, the same in every layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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


def check_loss_function(loss_fn: Any) -> None:
    """Refuse what cannot be called with an output and targets.

    Raises:
        UsageError: it is no function, or needs other arguments.
    """
    if not callable(loss_fn):
        raise UsageError(f"step.compute takes a function, loss_fn(output, targets), not a {type(loss_fn).__name__}")
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        raise UsageError(
            f"step.compute calls loss_fn(output, targets), and this one cannot be called so ({error}): put what else "
            "the loss needs of a batch, such as a mask, into the targets"
        ) from None
    except ValueError:  # a function without a signature, such as one of torch's own
        return


class OwnValuesOnly(TorchFunctionMode):
    """Refuses operations on the model that ``job.wrap`` has returned where plans cut it: it has no values there.

    Not every one of torch's operations does so: a product of a matrix with one on the meta device has arbitrary values.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the arguments and call the function.

        Raises:
            UsageError: an argument has no values.
        """
        del types
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.nn.Parameter) and leaf.is_meta:
                raise UsageError(
                    "loss_fn uses parameters of the model, which may be on another worker: let it use its output and "
                    "targets only. Let the model return what the loss needs of them, and decay weights in the optimizer"
                )
        return function(*args, **(kwargs or {}))


def loss_and_weight(value: Any) -> tuple[Any, float | None]:
    """Return the loss and its weight; ``None`` for the mean over the samples."""
    if isinstance(value, tuple) and len(value) == PAIR:
        return value[0], float(value[1])
    return value, None
