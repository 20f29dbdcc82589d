"""Errors of the trainer.

::

    HeterotrainError
    ├── UsageError    the script or its environment asks for something impossible; the message includes the remedy
    │   ├── VersionMismatch    the job needs what this image's version does not have
    │   ├── OutOfMemory        a single sample does not fit into memory
    │   └── StateLost          lost ranks held parts of the training state, and there is no checkpoint
    ├── NonFinite     the loss, the gradient or the weights became infinite or NaN, and the job is to fail then
    ├── Diverged      the ranks' copies of the training state differ, and the job is to fail then
    ├── PeerLost      the formation is broken; the remaining ranks repeat the step (a script never sees it)
    ├── RepeatStep    the formation is intact, but a rank could not finish the step (a script never sees it)
    └── Excluded      the other ranks continued without this process, which has to leave
"""

from __future__ import annotations

from typing import ClassVar

from heterotrain_core.contract.outcome import Cause

from heterotrain.excepthook import show_script_only

OUT_OF_MEMORY_SIGNS = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of messages of plain ``RuntimeError``: of torch's allocator for CPUs, and of CUDA's libraries, which allocate
memory that torch's allocator does not manage."""


class HeterotrainError(Exception):
    """Base class of all errors that the trainer raises on purpose.

    Attributes:
        cause: what the operator calls it, where it has a name for it.
    """

    cause: ClassVar[Cause | None] = None


class UsageError(HeterotrainError):
    """The script or its environment asks for something impossible.

    If uncaught, its traceback shows the script's own frames only. The first instance installs that behaviour.
    """

    def __init__(self, *words: object) -> None:
        super().__init__(*words)
        show_script_only(UsageError)


class VersionMismatch(UsageError):  # noqa: N818  # names the event
    """The image and the operator differ in version, and the job needs what the image does not have."""

    cause = Cause.VERSION_MISMATCH


class OutOfMemory(UsageError):  # noqa: N818  # names the event
    """A single sample does not fit into this rank's memory, whatever is spared."""

    cause = Cause.OUT_OF_DEVICE_MEMORY


class StateLost(UsageError):  # noqa: N818  # names the event
    """Lost ranks held parts of the training state that no other rank has, and there is no checkpoint."""

    cause = Cause.STATE_LOST


class NonFinite(HeterotrainError):  # noqa: N818  # names the event
    """The loss, the gradient or the weights are not finite; all ranks raise this in the same step."""

    cause = Cause.NOT_FINITE

    def __init__(self, *words: object) -> None:
        super().__init__(*words)
        show_script_only(NonFinite)


class Diverged(HeterotrainError):  # noqa: N818  # names the event
    """The ranks' copies of the training state differ; all ranks raise this in the same step."""

    cause = Cause.COPIES_DIFFERED

    def __init__(self, *words: object) -> None:
        super().__init__(*words)
        show_script_only(Diverged)


class PeerLost(HeterotrainError):  # noqa: N818  # names the event, as ConnectionError's subclasses do
    """The current formation is broken: a peer left, stopped answering, or a newer plan outranks the formation."""


class RepeatStep(HeterotrainError):  # noqa: N818  # names the event
    """Some rank voted against the step; all ranks repeat it in the same formation."""


class EndedBefore(RepeatStep):
    """Nobody commits the step, because the script of some rank has ended the training before it."""


class Excluded(HeterotrainError):  # noqa: N818  # names the event
    """The other ranks formed without this process, and no plan names it any more."""


def drop_frames(error: BaseException) -> None:
    """Drop the stack frames of an error that is kept, and of its causes, with all that their variables hold.

    An error that a variable of one of its own frames can reach lives until Python's cycle collector runs, which in a
    steady training takes minutes; the connections of a broken formation would live as long.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]
