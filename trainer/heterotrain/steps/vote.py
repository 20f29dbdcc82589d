"""The vote on a step: exchange control vectors, wait for the buckets, and agree on the newest plan."""

from __future__ import annotations

import torch

from heterotrain.checkpoints.same_data import ADVICE
from heterotrain.errors import UsageError
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.exchange.interface import Gradients
from heterotrain.forward_state.state import ForwardState
from heterotrain.membership.agreement import share_newest_plan
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.network.control import CHANGED, SAMPLES, SIGNATURE, STEPS, VOTE, Slot, StepDecision, decide, to_row
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.network.mesh.mesh import pack_floats, unpack_floats


def exchange_votes(
    active_group: ActiveGroup,
    reducer: Gradients,
    state: ForwardState,
    slot: Slot,
    held: HeldPlan,
    *,
    job_uid: str,
) -> tuple[StepDecision, HeldPlan]:
    """Return the decision of all ranks, and the newest plan that any of them holds; an accelerator may still add up.

    Args:
        active_group: the formation; a process without peers votes alone.
        reducer: its buckets are in flight; when this returns, they have arrived, or the current stream waits for them.
        state: what layers have changed in forward; its sum has arrived as well.
        slot: this rank's slot of the control vector.
        held: the plan whose version and checksum are in the slot.
        job_uid: only plans of this job are accepted from peers.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: this rank trains other parameters than another one, or ranks have read other numbers of samples.
    """
    row = to_row(slot)
    if active_group.group is None or active_group.group.world_size == 1:
        reducer.wait()
        if state.is_active:
            if slot.changed:
                state.agree(None)
            state.start(None)
        decision = decide([row], parameters=slot.parameters)
        reducer.drop_unused(decision.unused)
        return decision, held
    gathering = active_group.group.gather(pack_floats(row), Purpose.VOTE)
    if reducer.exchange.is_held:
        active_group.group.wait(gathering, "the vote on the step")
        _check_same_parameters([unpack_floats(other) for other in gathering.rows], active_group.rank)
        reducer.exchange.release()
    if state.is_active:  # the sum's length follows from the votes
        active_group.group.wait(gathering, "the vote on the step")
        if any(unpack_floats(other)[CHANGED] for other in gathering.rows):
            state.agree(active_group.group)
        state.start(active_group.group)
    reducer.wait()
    if state.is_active:
        state.wait(active_group.group)
    active_group.group.wait(gathering, "the vote on the step")
    rows = [unpack_floats(other) for other in gathering.rows]
    _check_same_samples(rows, slot.steps)
    decision = decide(rows, parameters=slot.parameters)
    reducer.drop_unused(decision.unused)
    return decision, share_newest_plan(active_group.group, decision, held, job_uid=job_uid)


def read_loss(loss_sum: torch.Tensor | HostCopy | float, group: Group | None) -> float:
    """Return the sum of a step's losses; on an accelerator, the host waits for the forward pass, by name."""
    if group is None or not isinstance(loss_sum, HostCopy):
        return float(loss_sum)
    with group.named_wait("the loss, behind the forward pass on the accelerator"):
        return float(loss_sum)


def _check_same_parameters(rows_WF: list[list[float]], rank: int) -> None:  # noqa: N803  # shape in the name
    """Refuse to add up gradients of different parameters; slots of different lengths were refused on arrival."""
    others = [other for other, row in enumerate(rows_WF) if row[SIGNATURE] != rows_WF[rank][SIGNATURE]]
    if others:
        raise UsageError(
            f"rank {rank} trains other parameters than rank {others[0]}, or has them in another memory format: freeze, "
            "thaw and swap them in the same step on every rank, by step.epoch, step.number or values from job.sum, and "
            "use channels_last on all ranks or on none. A rank that joins later starts with the parameters that are "
            "trained then (job.on_restore)"
        )


def _check_same_samples(rows_WF: list[list[float]], step: int) -> None:  # noqa: N803  # shape in the name
    """Refuse a step to which ranks have read different numbers of samples, as of streams of different lengths."""
    first = rows_WF[0]
    for rank, row in enumerate(rows_WF):
        if row[SAMPLES] != first[SAMPLES] and row[STEPS] == first[STEPS] and row[VOTE] and first[VOTE]:
            read = [f"{int(each[SAMPLES])}" + " and the epoch's end" * (each[SAMPLES] % 1 > 0) for each in (first, row)]
            raise UsageError(
                f"ranks have read different numbers of samples: for step {step} rank 0 has {read[0]}, and rank {rank} "
                f"has {read[1]}. {ADVICE}"
            )
