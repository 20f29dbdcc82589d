"""The end of a step of a divided model that lost ranks between its two phases (``state/prepared.py``)."""

from __future__ import annotations

from heterotrain.network.group import Group
from heterotrain.state.prepared import Confirmation, LastSteps, decide_late
from heterotrain.state.training import TrainState


def finish_late(group: Group | None, training: TrainState) -> None:
    """Apply the step that this rank is prepared for, if another rank has applied it; otherwise undo it.

    Every rank of a new formation has to call this before its state is compared with the others'.

    Args:
        group: the new formation's connections; ``None`` for a process that is alone.
        training: the state.

    Raises:
        PeerLost: the group broke meanwhile; the step stays prepared.
    """
    prepared = training.prepared
    number, confirmation = training.confirmed or (-1, Confirmation(0.0, is_finite=True))
    own = [
        float(training.progress.steps if training.has_state else -1),
        float(-1 if prepared is None else prepared.number), float(number),
        confirmation.squared, float(confirmation.is_finite),
    ]  # fmt: skip
    rows = [own] if group is None else group.gather_now(own)
    found = decide_late([
        LastSteps(int(row[0]), int(row[1]), int(row[2]), Confirmation(row[3], is_finite=row[4] == 1.0)) for row in rows
    ])  # fmt: skip
    training.prepared = None
    if prepared is None:
        return
    newest = max(int(row[1]) for row in rows)
    if found is not None and prepared.number == newest:
        prepared.finish(found)
    else:
        prepared.drop()
