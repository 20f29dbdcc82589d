"""From the members of a plan to those that the layout planner has found: what moves, and whether it pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heterotrain_core.contract.plan import LayoutKind, Plan
from heterotrain_planner.layout.known import known_step_seconds
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover, HeldUnits, NoLayout, held_by_place
from heterotrain_planner.layout.transition import Holder, MoveVerdict, Transition, pays, transition

from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.arrangement import device_name
from heterotrain_operator.decide.workers.state import Worker

DWELL_S = 600.0
"""Expected time for which a new layout stays: a change has to make up for its pause within it."""
RESTART_S = 2.0
"""Pause of a change, without transfers, while none was measured."""


def change_of(
    problem: Problem, found: Cover, workers: Sequence[Worker], plan: Plan | None, telemetry: Telemetry
) -> Transition | NoLayout:
    """Return which device takes which place; state that does not fit the problem's model counts as none."""
    held = _held(plan, units=len(problem.units)) if plan is not None else {}
    restart_s = telemetry.pause_s or RESTART_S

    def with_parts(parts: Mapping[str, tuple[HeldUnits, ...]]) -> Transition | NoLayout:
        holders = [
            Holder(device=name, kind=worker.pod.pool, parts=parts.get(name, ()))
            for worker in workers
            for name in (device_name(worker.pod.uid, rank) for rank in range(worker.pod.ranks))
        ]
        return transition(problem, holders, found.layouts, restart_s=restart_s)

    answer = with_parts(held)
    return answer if isinstance(answer, Transition) or not held else with_parts({})


def _held(plan: Plan, *, units: int) -> dict[str, tuple[HeldUnits, ...]]:
    """Return what each rank of a plan holds, by device; equal shards of one worker are not told apart."""
    found: dict[str, tuple[HeldUnits, ...]] = {}
    for member, ranks in zip(plan.members, plan.ranks_by_member, strict=True):
        layout = member.layout
        if layout.kind is LayoutKind.SHARDED and not layout.state_weights:
            continue
        held = held_by_place(layout.cuts, layout.state_weights, units)
        for rank in ranks:
            part = held[rank.shard if layout.state_weights else rank.stage]
            found[device_name(rank.worker_uid, rank.local_rank)] = (part,)
    return found


def step_in_force_s(problem: Problem, plan: Plan) -> tuple[float, float] | None:
    """Return the step of the plan's members as the planner predicts it now, with the best shares, and its exchange.

    Predicted steps are compared with each other: what a prediction leaves out is left out of both. ``None`` for members
    of another model.
    """
    kinds = [[plan.pool_of(rank) for rank in ranks] for ranks in plan.ranks_by_member]
    return known_step_seconds(problem, plan.members, kinds)


def links_are_of(plan: Plan, telemetry: Telemetry) -> bool:
    """Return whether this plan's members have trained for as long as a layout is expected to stay, and measured links.

    So a change for the sake of links is tried out before the next one.
    """
    sustained = telemetry.rates.sustained
    there = sustained is not None and sustained.generation == plan.generation and sustained.lasts_s >= DWELL_S
    return there and bool(telemetry.links)


def worth_a_change(
    problem: Problem, found: Cover, workers: Sequence[Worker], plan: Plan, telemetry: Telemetry
) -> tuple[Transition, MoveVerdict] | None:
    """Return the change from the plan's members to others, or another order, of the same workers if that pays."""
    before_s, exchange_s = step_in_force_s(problem, plan) or (0.0, 0.0)
    # Each pass asks, and mostly the members in force are the best ones: then nothing has to be assigned to devices.
    if not pays(current_step_s=before_s, new_step_s=found.step_s, pause_s=0.0, dwell_s=DWELL_S).pays:
        return None
    change = change_of(problem, found, workers, plan, telemetry)
    if isinstance(change, NoLayout):
        return None
    # Where nothing moves, only the order can gain: micro-batches that memory has made smaller stay so.
    after_s = found.step_s if change.moved_bytes else before_s - exchange_s + found.exchange_s
    verdict = pays(current_step_s=before_s, new_step_s=after_s, pause_s=change.pause_s, dwell_s=DWELL_S)
    return (change, verdict) if verdict.pays else None
