"""Which errors mean that a micro-batch does not fit into memory."""

from __future__ import annotations

import torch

SIGNS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of messages of plain ``RuntimeError``: of torch's allocator for CPUs, and of CUDA's libraries, which allocate
memory that torch's allocator does not manage."""


def out_of_memory(error: BaseException) -> torch.OutOfMemoryError | None:
    """Return the error as one that holds nothing, or ``None`` if memory was not the cause.

    The traceback of the error itself keeps the frames of the model alive, and with them all activations. Halving the
    micro-batch would then have to do with the memory that is left.
    """
    is_one = isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    )
    return torch.OutOfMemoryError(str(error)) if is_one else None
