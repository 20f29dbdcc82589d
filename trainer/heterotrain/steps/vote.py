"""The vote on a step: exchange rows, wait for the buckets, and agree on the newest plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from heterotrain.checkpoints.same_data import ADVICE
from heterotrain.errors import UsageError
from heterotrain.exchange.host_copy import HostCopy
from heterotrain.membership.agreement import PLAN, share_newest_plan
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.network.control import StepDecision
from heterotrain.network.group import Group
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.steps.ballot import StepBallot, Voting
from heterotrain.steps.columns import CHANGED, SAMPLES, SIGNATURE, UNUSED


def exchange_votes(ballot: StepBallot, voting: Voting, *, ok: bool, job_uid: str) -> tuple[StepDecision, HeldPlan]:
    """Return the decision of all ranks, and the newest plan that any of them holds; an accelerator may still add up.

    Args:
        ballot: the columns of all features.
        voting: the step, whose buckets are in flight. When this returns, they have arrived, or the current stream waits
            for them. The sum of what layers have changed in forward has arrived as well.
        ok: whether this rank has computed its part.
        job_uid: only plans of this job are accepted from peers.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: this rank trains other parameters than another one, or ranks have read other numbers of samples.
    """
    step, group, tally = voting.step, voting.active_group.group, ballot.tally
    reducer, state = step.reducer, step.numerics.forward_state
    row = ballot.row(voting, ok=ok, loss_sum=read_loss(step.loss_sum, group))
    if group is None or group.world_size == 1:
        reducer.wait()
        if state.is_active:
            if state.has_news:
                state.agree(None)
            state.start(None)
        decision = tally.decide([row])
        if unused := decision.agreed[UNUSED]:
            reducer.drop_unused(unused)
        return decision, voting.held
    gathering = group.gather(row, Purpose.VOTE)
    if reducer.exchange.is_held:
        group.wait(gathering, "the vote on the step")
        _check_same_parameters([row[0] for row in tally.values(SIGNATURE, gathering.rows)], group.rank)
        reducer.exchange.release()
    if state.is_active:  # the sum's length follows from the votes
        group.wait(gathering, "the vote on the step")
        if any(row[0] for row in tally.values(CHANGED, gathering.rows)):
            state.agree(group)
        state.start(group)
    reducer.wait()
    if state.is_active:
        state.wait(group)
    group.wait(gathering, "the vote on the step")
    decision = tally.decide(gathering.rows)
    if decision.agreed[SAMPLES] and decision.committed:
        refuse_other_samples(decision.agreed[SAMPLES], step.number)
    if unused := decision.agreed[UNUSED]:
        reducer.drop_unused(unused)
    return decision, share_newest_plan(group, decision.agreed[PLAN], voting.held, job_uid=job_uid)


def read_loss(loss_sum: torch.Tensor | HostCopy | float, group: Group | None) -> float:
    """Return the sum of a step's losses; on an accelerator, the host waits for the forward pass, by name."""
    if group is None or not isinstance(loss_sum, HostCopy):
        return float(loss_sum)
    with group.named_wait("the loss, behind the forward pass on the accelerator"):
        return float(loss_sum)


def _check_same_parameters(signatures: Sequence[float], rank: int) -> None:
    """Refuse to add up gradients of different parameters; rows of different lengths were refused on arrival."""
    others = [other for other, signature in enumerate(signatures) if signature != signatures[rank]]
    if others:
        raise UsageError(
            f"rank {rank} trains other parameters than rank {others[0]}, or has them in another memory format: freeze, "
            "thaw and swap them in the same step on every rank, by step.epoch, step.number or values from job.sum, and "
            "use channels_last on all ranks or on none. A rank that joins later starts with the parameters that are "
            "trained then (job.on_restore)"
        )


def refuse_other_samples(samples: Sequence[float], step: int) -> NoReturn:
    """Refuse a step to which ranks have read different numbers of samples, as of streams of different lengths.

    Args:
        samples: by rank, as in ``SAMPLES``.
        step: its number.

    Raises:
        UsageError: always.
    """
    rank = next(rank for rank, own in enumerate(samples) if own != samples[0])
    read = [f"{int(own)}" + " and the epoch's end" * (own % 1 > 0) for own in (samples[0], samples[rank])]
    raise UsageError(
        f"ranks have read different numbers of samples: for step {step} rank 0 has {read[0]}, and rank {rank} has "
        f"{read[1]}. {ADVICE}"
    )
