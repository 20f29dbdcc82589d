"""What the members of a formation agree on before they train: the newest plan and the newest state among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from heterotrain_core.contract.codec import Refused, decode_plan

from heterotrain.data.progress import Progress
from heterotrain.errors import UsageError
from heterotrain.membership.late import finish_late
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.network.control import HEADER, Slot, StepDecision, decide, to_row
from heterotrain.network.group import Group
from heterotrain.state import transfer
from heterotrain.state.training import Training
from heterotrain.state.transfer import StateSummary


class Checkpoints(Protocol):
    """The part of the checkpoint manager that a cold start needs."""

    def best(self) -> tuple[int, int]:
        """Return (generation, step) of the best checkpoint that this rank can see, (-1, -1) for none."""

    def load_into(self, training: Training) -> bool:
        """Restore the best good checkpoint; ``False`` when there is none."""


def share_newest_plan(group: Group, decision: StepDecision, mine: HeldPlan, *, job_uid: str) -> HeldPlan:
    """Return the newest plan that any rank holds; its holder sends the bytes when a rank lacks it.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: a peer sent something that is not a plan of this job.
    """
    if decision.all_hold:
        return mine
    text = mine.text.encode() if group.rank == decision.holder else None
    received = group.broadcast_bytes(text, size_bytes=decision.plan_bytes, source=decision.holder).decode()
    plan = decode_plan(received, job_uid=job_uid)
    if isinstance(plan, Refused):
        raise UsageError(f"a peer sent a plan that this rank refuses: {plan.reason}")
    return HeldPlan(plan=plan, text=received)


def plan_slot(held: HeldPlan, *, vote: bool, steps: int, leaving: bool, weight: float) -> Slot:
    """Return a slot with the version and checksum of the plan that this rank holds.

    Args:
        held: the plan.
        vote: whether this rank finished its part of the step.
        steps: committed steps before this one.
        leaving: whether this rank's pod has to leave.
        weight: samples or tokens behind this rank's gradient.
    """
    return Slot(
        vote=vote, steps=steps, generation=held.plan.generation, revision=held.plan.revision,
        plan_bytes=held.size_bytes, plan_checksum=held.checksum, leaving=leaving, weight=weight,
    )  # fmt: skip


def agree_on_plan(group: Group, mine: HeldPlan, *, job_uid: str) -> HeldPlan:
    """Return the newest plan that any member of a new formation holds.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    row = to_row(plan_slot(mine, vote=True, steps=0, leaving=False, weight=0.0))
    decision = decide(group.gather_now(row[:HEADER]))
    return share_newest_plan(group, decision, mine, job_uid=job_uid)


def agree_on_state(group: Group | None, training: Training, checkpoints: Checkpoints) -> None:
    """Give every rank the newest state that any rank holds: a survivor's, else a checkpoint's, else a new one.

    Args:
        group: the new formation's connections; ``None`` for a process that is alone.
        training: the state; it is restored in place on ranks that lack the newest.
        checkpoints: where a cold start begins.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: the state belongs to another model or script.
    """
    finish_late(group, training)
    progress = training.progress
    best = (-1, -1) if training.has_state else checkpoints.best()
    steps, hooked, evaluated = progress.order if training.has_state else (-1, -1, -1)
    rows = [[float(steps), float(hooked), float(evaluated), float(best[0]), float(best[1]), float(progress.stopped)]]
    if group is not None:
        rows = group.gather_now(rows[0])
    summaries = [
        StateSummary(
            steps=int(r[0]),
            hooked=int(r[1]),
            evaluated=int(r[2]),
            checkpoint_generation=int(r[3]),
            checkpoint_step=int(r[4]),
            stopped=r[5] == 1.0,
        )
        for r in rows
    ]
    roles = transfer.assign_roles(summaries)
    rank = group.rank if group is not None else 0
    if roles.cold_start and rank == roles.leader:
        if not checkpoints.load_into(training):
            training.progress = Progress()
        training.has_state = True
    if group is not None:
        received = transfer.exchange(group, roles, training.flat)
        if received is not None:
            training.restore_flat(received)
    if not roles.cold_start:  # of ranks with the same committed steps, some may have ended the training
        newest = summaries[roles.leader].steps
        stopped = any(summary.stopped for summary in summaries if summary.steps == newest)
        training.progress = replace(training.progress, stopped=stopped)
