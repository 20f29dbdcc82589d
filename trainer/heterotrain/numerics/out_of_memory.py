"""Recognizes errors that mean that a micro-batch does not fit into memory."""

from __future__ import annotations

import torch

from heterotrain.errors import OUT_OF_MEMORY_SIGNS


def out_of_memory(error: BaseException) -> torch.OutOfMemoryError | None:
    """Return the error as one that holds nothing, or ``None`` if memory was not the cause.

    The traceback of the error itself keeps the frames of the model alive, and with them all activations. Halving the
    micro-batch would then have to do with the memory that is left.
    """
    is_one = isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)
    )
    return torch.OutOfMemoryError(str(error)) if is_one else None
