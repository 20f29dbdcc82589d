"""The vote on a step: exchange control vectors, wait for the buckets, and agree on the newest plan."""

from __future__ import annotations

from heterotrain.membership.agreement import share_newest_plan
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.network.control import Slot, StepDecision, decide, to_row
from heterotrain.network.mesh.mesh import pack_floats, unpack_floats
from heterotrain.numerics.local_batch_norm import RunningStatistics
from heterotrain.numerics.reducer import Reducer


def exchange_votes(
    active_group: ActiveGroup,
    reducer: Reducer,
    running: RunningStatistics,
    slot: Slot,
    held: HeldPlan,
    *,
    job_uid: str,
) -> tuple[StepDecision, HeldPlan]:
    """Return the decision of all ranks, and the newest plan that any of them holds.

    Args:
        active_group: the formation; a process without peers votes alone.
        reducer: its buckets are in flight; they have arrived when this returns.
        running: running statistics; their sum has arrived as well.
        slot: this rank's slot of the control vector.
        held: the plan whose version and checksum are in the slot.
        job_uid: only plans of this job are accepted from peers.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    row = to_row(slot)
    if active_group.group is None:
        return decide([row]), held
    gathering = active_group.group.gather(pack_floats(row))
    running.start(active_group.group)
    reducer.wait()
    running.wait(active_group.group)
    active_group.group.wait(gathering, "the vote on the step")
    active_group.group.finish_device()
    decision = decide([unpack_floats(other) for other in gathering.rows])
    return decision, share_newest_plan(active_group.group, decision, held, job_uid=job_uid)
