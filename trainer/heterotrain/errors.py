"""Errors of the trainer.

::

    HeterotrainError
    ├── UsageError    the script or its environment asks for something that cannot be done; one sentence says what to do
    ├── PeerLost      the formation is broken; the step is repeated by those who are left (never seen by a script)
    ├── RepeatStep    the formation is whole but some rank could not finish the step (never seen by a script)
    └── Excluded      the others went on without this process; it has to leave
"""

from __future__ import annotations

from heterotrain.excepthook import show_script_only


class HeterotrainError(Exception):
    """Anything that the trainer raises on purpose."""


class UsageError(HeterotrainError):
    """The script or its environment asks for something that cannot be done.

    Uncaught, it is told with the script's own lines alone; the first one made sees to that.
    """

    def __init__(self, *words: object) -> None:
        super().__init__(*words)
        show_script_only(UsageError)


class PeerLost(HeterotrainError):  # noqa: N818 - names the event, as ConnectionError's subclasses do
    """The current formation is broken: a peer went away, fell silent, or a newer plan outranks it."""


class RepeatStep(HeterotrainError):  # noqa: N818 - names the event
    """Some rank voted against the step; all ranks repeat it in the same formation."""


class Excluded(HeterotrainError):  # noqa: N818 - names the event
    """The others formed without this process and no plan names it any more."""
