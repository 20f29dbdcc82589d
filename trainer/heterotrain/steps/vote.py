"""A rank's vote on a step: the control vector goes out, the buckets come in, and all ranks hold the same plan."""

from __future__ import annotations

from heterotrain.membership.agreement import agreed_plan
from heterotrain.membership.interface import Formed
from heterotrain.membership.plan_source import Held
from heterotrain.network.control import Slot, StepDecision, decide, to_row
from heterotrain.network.mesh.mesh import packed, unpacked
from heterotrain.numerics.reducer import Reducer


def exchange_votes(
    formed: Formed, reducer: Reducer, slot: Slot, held: Held, *, job_uid: str
) -> tuple[StepDecision, Held]:
    """Return what all ranks decided, and the newest plan that any of them holds.

    Args:
        formed: the formation; a process that is alone votes with itself.
        reducer: its buckets are on their way; they have arrived when this returns.
        slot: what this rank says.
        held: the plan that the slot speaks of.
        job_uid: whose plans are taken from peers.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    row = to_row(slot)
    if formed.group is None:
        return decide([row]), held
    gathering = formed.group.gather(packed(row))
    reducer.wait()
    formed.group.wait(gathering, "the vote on the step")
    formed.group.finish_device()
    decision = decide([unpacked(other) for other in gathering.rows])
    return decision, agreed_plan(formed.group, decision, held, job_uid=job_uid)
