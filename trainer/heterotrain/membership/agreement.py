"""Agrees on the newest plan and the newest state among the members of a formation, before they train."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from heterotrain_core.contract.codec import Refused, decode_plan

from heterotrain.data.progress import Progress
from heterotrain.errors import StateLost, UsageError
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.network.control import Column, Rows
from heterotrain.network.group import Group
from heterotrain.network.texts import gather_texts
from heterotrain.state import transfer
from heterotrain.state.layout import checksum, sizes_of
from heterotrain.state.prepared import Confirmation, LastSteps, decide_late
from heterotrain.state.ranges import Holding, TensorRange
from heterotrain.state.training import TrainState
from heterotrain.state.transfer import Roles, StateSummary

_log = logging.getLogger(__name__)


class Checkpoints(Protocol):
    """The part of the checkpoint manager that a cold start needs."""

    def best(self) -> tuple[int, int]:
        """Return (generation, step) of the best checkpoint that this rank can see, (-1, -1) for none."""

    def load_into(self, training: TrainState) -> bool:
        """Restore the best good checkpoint; ``False`` when there is none."""


@dataclass(frozen=True, slots=True)
class NewestPlan:
    """The newest plan that any rank holds.

    Attributes:
        version: its generation and revision.
        holder: lowest rank in the group that holds it.
        size_bytes: its length.
        all_hold: every rank holds it, so it need not be sent.
    """

    version: tuple[int, int]
    holder: int
    size_bytes: int
    all_hold: bool


def _newest(rows: Rows) -> NewestPlan:
    versions = [(int(generation), int(revision)) for generation, revision, *_ in rows]
    newest = max(versions)
    holder = versions.index(newest)
    all_hold = len(set(versions)) == 1 and len({row[3] for row in rows}) == 1
    return NewestPlan(newest, holder, int(rows[holder][2]), all_hold)


PLAN = Column("plan", _newest)
"""The newest plan: its generation, revision, length in bytes and CRC-32."""


def share_newest_plan(group: Group, newest: NewestPlan, mine: HeldPlan, *, job_uid: str) -> HeldPlan:
    """Return the newest plan that any rank holds; its holder sends the bytes when a rank lacks it.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: a peer sent something that is not a plan of this job.
    """
    if newest.all_hold:
        return mine
    text = mine.text.encode() if group.rank == newest.holder else None
    received = group.broadcast_bytes(text, size_bytes=newest.size_bytes, source=newest.holder).decode()
    plan = decode_plan(received, job_uid=job_uid)
    if isinstance(plan, Refused):
        raise UsageError(f"a peer sent a plan that this rank refuses: {plan.reason}")
    return HeldPlan(plan=plan, text=received)


def agree_on_plan(group: Group, mine: HeldPlan, *, job_uid: str) -> HeldPlan:
    """Return the newest plan that any member of a new formation holds.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    return share_newest_plan(group, PLAN.reduction(group.gather_now(mine.identity)), mine, job_uid=job_uid)


def agree_on_state(
    group: Group | None, training: TrainState, checkpoints: Checkpoints, *, place: Callable[[], None] = lambda: None
) -> None:
    """Give every rank the newest state that living ranks hold: else a checkpoint's, else a new one.

    A part of the initial weights that was lost before the first step is drawn again. Ranks that hold parts of a state
    count together. A rank that has the newest state but needs other parts of it receives these parts only.

    Args:
        group: the new formation's connections; ``None`` for a process that is alone.
        training: the state; it is restored in place on ranks that lack the newest.
        checkpoints: where a cold start begins.
        place: gives this rank the part of the model that it has in the new formation.

    Raises:
        PeerLost: the group broke meanwhile.
        UsageError: the state belongs to another model or script; or ranks with parts of a model have different ones.
        StateLost: a part of the state is lost after the first step, and there is no checkpoint.
    """
    _finish_late(group, training)  # with the parts of the formation before
    _repeat_hooks(group, training)  # likewise
    training.before_hooks = None  # which holds the tensors of that part
    place()
    rank = group.rank if group is not None else 0
    summaries = _summaries(group, training, checkpoints)
    divided = any(summary.has is not None or summary.needs is not None for summary in summaries)
    sizes = sizes_of(training.layout.shapes) if divided else {}
    roles = transfer.assign_roles(summaries, sizes)
    if roles.lost:
        steps = max(summary.steps for summary in summaries)
        training.has_state, training.earlier = False, None
        summaries = _summaries(group, training, checkpoints)
        roles = transfer.assign_roles(summaries, sizes)
        _check_beginning(steps, has_checkpoint=summaries[roles.leader].checkpoint_step >= 0)
    if roles.cold_start:
        if rank in roles.donors:
            _begin(training, checkpoints)
        _check_same_begin(group, roles, training)
    if group is not None:
        received = transfer.exchange(group, roles, training.flat, hold=training.hold)
        if received is not None:
            training.earlier = None  # frees what is not needed, before the rest is copied to the device
            training.restore_flat(received)
            if not roles.cold_start:
                training.joined = training.progress.steps
    if training.earlier is not None:  # this rank has all that it needs
        own = transfer.part_of(training.flat(), training.needs)
        training.earlier = None
        training.restore_flat(own)
    training.holdings = tuple(summary.needs for summary in summaries)
    if all(holding is None for holding in training.holdings):
        training.holdings = ()
    if not roles.cold_start:
        # A rank that applied the last step late has not heard from its script that it was the last one.
        newest = summaries[roles.leader].steps
        stopped = any(summary.stopped for summary in summaries if summary.steps == newest)
        training.progress = replace(training.progress, stopped=stopped)


def _check_beginning(steps: int, *, has_checkpoint: bool) -> None:
    """Say from where ranks continue that do not hold the whole state of so many steps any more.

    Raises:
        StateLost: there is nothing to continue from.
    """
    if has_checkpoint:
        _log.warning("living ranks do not hold the whole training state any more: all continue from a checkpoint")
    elif steps == 0:  # nothing is lost: initial weights follow from the seed
        _log.warning("living ranks do not hold all initial weights any more: all begin again")
    else:
        raise StateLost(
            f"the ranks that are left do not hold the whole training state of step {steps} together, and there is "
            "no checkpoint yet, so training has to begin again: set spec.checkpoint, or a shorter "
            "spec.checkpoint.interval, or train with more members"
        )


def _finish_late(group: Group | None, training: TrainState) -> None:
    """Apply the step of a divided model that this rank is prepared for, if another rank has; otherwise undo it.

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


def _repeat_hooks(group: Group | None, training: TrainState) -> None:
    """Go back to before the newest hooks, where some rank of a divided model has not called them to their end.

    Ranks that hold parts have to continue from the same place, or nobody has the whole state. The last exchange of a
    hook may have failed on one of them only. Where all hold everything, the state after the hooks is the newest one.

    Raises:
        PeerLost: the group broke meanwhile.
    """
    if group is None:
        return
    before = training.before_hooks
    steps, *own = training.progress.order if training.has_state else (-1, -1, -1)
    is_possible = before is not None and before[0].steps == steps and before[1].is_possible()
    row = [steps, *own, *(before[0].order[1:] if before is not None and is_possible else own)]
    rows = group.gather_now([float(value) for value in (training.own_layout is not None, *row)])
    found = hooks_to_repeat([tuple(map(int, row)) for row in rows])
    if steps == max(int(row[1]) for row in rows) and found not in (None, tuple(own)):
        training.repeat_hooks()
        _log.info("the hooks after step %d are called again, because a rank had not called them to their end", steps)


def hooks_to_repeat(rows: Sequence[tuple[int, ...]]) -> tuple[int, int] | None:
    """Return the hooks after which all ranks with the newest state continue; ``None`` if each keeps its own.

    Args:
        rows: by rank: whether it holds a part of the model only, its committed steps, its hooks (``Progress.order``),
            and those to which it can go back, or its own.
    """
    newest = [row for row in rows if row[1] == max(row[1] for row in rows)]
    first = min((hooked, evaluated) for _, _, hooked, evaluated, *_ in newest)
    if not any(row[0] for row in newest) or any(first not in (row[2:4], row[4:6]) for row in newest):
        return None
    return first


def _summaries(group: Group | None, training: TrainState, checkpoints: Checkpoints) -> list[StateSummary]:
    """Return what each rank holds and needs, by rank."""
    best = (-1, -1) if training.has_state else checkpoints.best()
    steps, hooked, evaluated = training.progress.order if training.has_state else (-1, -1, -1)
    has, needs = training.has, training.needs
    parts, model = b"", 0
    if has is not None or needs is not None:
        parts, model = json.dumps([_encoded(has), _encoded(needs)]).encode(), checksum(training.layout.shapes)
    row = [float(value) for value in (steps, hooked, evaluated, *best, training.progress.stopped, model)]
    rows, texts = [[*row, float(len(parts))]], [parts]
    if group is not None:
        rows = group.gather_now(rows[0])
        _check_same_model({rank: int(r[-2]) for rank, r in enumerate(rows) if r[-1]})
        texts = [b""] * len(rows)
        if any(r[-1] for r in rows):  # some rank does not hold everything
            texts = gather_texts(group, parts, "what each rank holds")
    summaries = []
    for r, text in zip(rows, texts, strict=True):
        has, needs = map(_decoded, json.loads(text)) if r[-1] else (None, None)
        summaries.append(
            StateSummary(
                steps=int(r[0]),
                hooked=int(r[1]),
                evaluated=int(r[2]),
                checkpoint_generation=int(r[3]),
                checkpoint_step=int(r[4]),
                stopped=r[5] == 1.0,
                has=has,
                needs=needs,
            )
        )
    return summaries


def _check_same_model(checksums: Mapping[int, int]) -> None:
    """Check that ranks with parts of a model have the same one, before parts are looked for by name.

    Raises:
        UsageError: they do not.
    """
    first = next(iter(checksums), 0)
    for rank, model in checksums.items():
        if model != checksums[first]:
            raise UsageError(
                f"rank {rank} has another model than rank {first}: build the same model on every rank, with the same "
                "names and shapes of parameters"
            )


def _begin(training: TrainState, checkpoints: Checkpoints) -> None:
    if not checkpoints.load_into(training):
        training.begin()
        training.progress = Progress()
    training.has_state = True


def _check_same_begin(group: Group | None, roles: Roles, training: TrainState) -> None:
    """Check that ranks that begin together do so from the same checkpoint.

    Raises:
        UsageError: they do not.
        PeerLost: the group broke meanwhile.
    """
    if group is None or len(roles.donors) == 1:
        return
    rows = group.gather_now([float(value) for value in training.progress.order])
    if len({tuple(rows[rank]) for rank in roles.donors}) > 1:
        found = ", ".join(f"rank {rank}: step {int(rows[rank][0])}" for rank in roles.donors)
        raise UsageError(
            f"ranks that hold parts of one model found different checkpoints ({found}): they need a checkpoint folder "
            "that all workers share"
        )


def _encoded(holding: Holding | None) -> dict[str, tuple[int, int]] | None:
    return None if holding is None else {name: (own.start, own.stop) for name, own in holding.items()}


def _decoded(found: dict[str, tuple[int, int]] | None) -> Holding | None:
    return None if found is None else {name: TensorRange(name, start, stop) for name, (start, stop) in found.items()}
