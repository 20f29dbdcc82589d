"""Members of several workers: which of the ready workers form them, and which units of the model each one holds.

The layout planner chooses from what the workers have measured of the model. It may take seconds, so its answers are
looked up by ``cover_of``, which returns ``None`` before there is one. Until then the plan in force stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from heterotrain_core.contract.choices import Parallelism
from heterotrain_core.contract.plan import Plan
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover, NoLayout
from heterotrain_planner.layout.transition import MoveVerdict, pays

from heterotrain_operator.api.text import duration_text
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.arrangement import arrange, by_places
from heterotrain_operator.decide.plan.changes import DWELL_S, change_of, links_are_of, worth_a_change
from heterotrain_operator.decide.plan.layout_problem import fits_every_device, problem_of
from heterotrain_operator.decide.plan.membership import MembershipDecision
from heterotrain_operator.decide.waits import left_s
from heterotrain_operator.decide.workers.state import Worker

CoverOf = Callable[[Problem], Cover | NoLayout | None]
"""Returns the best members of a problem's devices, why there are none, or ``None`` where that is not known yet."""

PROFILE_WAIT_S = 180.0
"""Time for the first profile of a pool, from when its first worker is ready; then the other pools start without it."""
_GIB = 1024.0**3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutState:
    """What is known about the members' layouts, as a condition reports it.

    Attributes:
        holds: whether they are planned; ``None`` while it is not known.
        reason: one CamelCase word.
        message: for people.
        stuck: whether waiting alone will not help.
        again_s: seconds after which it may change by time alone.
    """

    holds: bool | None
    reason: str
    message: str = ""
    stuck: bool = False
    again_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMembers:
    """Members of the next plan.

    Attributes:
        membership: workers of the next generation; ``None`` in it keeps the generation in force.
        draft: how they form members, where that is planned; otherwise ``None``.
        state: what is known about planned layouts; ``None`` where layouts are not planned.
        questions: for the layout planner, which had no answer to them.
    """

    membership: MembershipDecision
    draft: Plan | None = None
    state: LayoutState | None = None
    questions: tuple[Problem, ...] = ()


def plan_members(
    spec: HeteroTrainJobSpec,
    membership: MembershipDecision,
    plan: Plan | None,
    telemetry: Telemetry,
    *,
    cover_of: CoverOf,
    now_s: float,
    memory: str = "",
) -> PlannedMembers:
    """Return the members that the ready workers form, or what they wait for.

    Args:
        spec: the job's spec.
        membership: workers that could take part.
        plan: the plan in force.
        telemetry: profiles by pool, and the measured step.
        cover_of: the layout planner.
        now_s: now.
        memory: the sentence about pools that are planned with less memory than they report; empty for none.
    """
    trains = plan is not None and bool(plan.members)
    kept = LayoutState(holds=False, reason="WaitingForWorkers")
    if trains:
        kept = LayoutState(holds=True, reason="Planned", message=_spare_text(plan.spares if plan is not None else ()))
    found: PlannedMembers | LayoutState = kept
    if membership.workers is not None:
        workers = _taking_part(membership, plan if trains else None, telemetry, kept, now_s=now_s)
        found = (
            workers
            if isinstance(workers, LayoutState)
            else _planned(
                spec, membership, workers, plan=plan if trains else None, telemetry=telemetry, cover_of=cover_of
            )
        )
    elif plan is not None and trains and membership.unchanged:
        found = _after_new_links(spec, membership, plan, telemetry, cover_of) or kept
    if isinstance(found, PlannedMembers):
        return found
    if found.reason == "DoesNotFit" and memory:
        found = replace(found, message=f"{found.message} {memory}")
    waits = [each for each in (membership.again_s, found.again_s) if each is not None]
    decision = replace(membership, workers=None, again_s=min(waits, default=None))
    return PlannedMembers(membership=decision, state=found)


def _taking_part(
    membership: MembershipDecision, plan: Plan | None, telemetry: Telemetry, kept: LayoutState, *, now_s: float
) -> tuple[Worker, ...] | LayoutState:
    """Return the workers that may form members, or why there is nothing to plan now.

    Only pools with a profile take part. The first plan waits for all of them, but not for ever.
    """
    candidates = membership.workers or ()
    missing = {w.pod.pool: w for w in reversed(candidates) if w.pod.pool not in telemetry.profiles}
    workers = tuple(worker for worker in candidates if worker.pod.pool not in missing)
    if plan is None:
        since_s = min((w.pod.ready_since_s for w in candidates if w.pod.pool in missing), default=now_s)
        wait_s = left_s(since_s, PROFILE_WAIT_S, now_s=now_s) if missing else 0.0
        return _without_profiles(missing, telemetry, wait_s=wait_s) if wait_s or not workers else workers
    considered = {rank.worker for rank in plan.ranks} | set(plan.spares)
    if not membership.is_forced and {worker.pod.name for worker in workers} <= considered:
        return _without_profiles(missing, telemetry, wait_s=0.0, trains=True) if missing else kept
    return workers


def _planned(
    spec: HeteroTrainJobSpec,
    membership: MembershipDecision,
    workers: tuple[Worker, ...],
    *,
    plan: Plan | None,
    telemetry: Telemetry,
    cover_of: CoverOf,
) -> PlannedMembers | LayoutState:
    """Return the best members of these workers, or why the generation in force stays; ``plan`` has members, if any."""
    # 1. Ask the planner for the best members of these devices.
    problem = problem_of(spec, telemetry.profiles, _devices(workers), telemetry.links)
    if isinstance(problem, str):
        return LayoutState(holds=False, reason="ProfilesDiffer", message=problem, stuck=plan is None)
    if spec.parallelism.mode is Parallelism.AUTO and fits_every_device(problem):
        draft = arrange(workers, Parallelism.DATA)
        return _chosen(membership, draft, workers, "every device holds the whole model")
    found = cover_of(problem)
    if found is None:
        return LayoutState(holds=None, reason="Planning", message="the layouts of the members are being planned")
    if isinstance(found, NoLayout):
        return _does_not_fit(problem, found)
    # 2. Devices keep what they hold where they can, and a change that nothing forces has to pay.
    change = change_of(problem, found, workers, plan, telemetry)
    if isinstance(change, NoLayout):
        return LayoutState(holds=False, reason="DoesNotFit", message=change.reason, stuck=True)
    if plan is not None and not membership.is_forced:
        before_s = _planned_step_s(spec, workers, plan, telemetry, cover_of)
        if before_s is None:
            return LayoutState(holds=None, reason="Planning", message="the gain of more workers is being planned")
        verdict = pays(current_step_s=before_s, new_step_s=found.step_s, pause_s=change.pause_s, dwell_s=DWELL_S)
        if not verdict.pays:
            return _as_spares(membership, workers, plan, verdict)
    return _chosen(membership, by_places(workers, found, change.places), workers, found.reason)


def _after_new_links(
    spec: HeteroTrainJobSpec, membership: MembershipDecision, plan: Plan, telemetry: Telemetry, cover_of: CoverOf
) -> PlannedMembers | None:
    """Return other members of the same workers where measured links make them pay; ``None`` for no change."""
    workers = tuple(worker for worker in membership.unchanged if worker.pod.pool in telemetry.profiles)
    there = {worker.pod.uid for worker in workers}
    if not links_are_of(plan, telemetry) or not {rank.worker_uid for rank in plan.ranks} <= there:
        return None
    problem = problem_of(spec, telemetry.profiles, _devices(workers), telemetry.links)
    if isinstance(problem, str) or (spec.parallelism.mode is Parallelism.AUTO and fits_every_device(problem)):
        return None
    found = cover_of(problem)
    change = worth_a_change(problem, found, workers, plan, telemetry) if isinstance(found, Cover) else None
    if change is None or not isinstance(found, Cover):
        return None
    moves, verdict = change
    why = f"links as measured since the last cut: {verdict.reason}"
    decided = replace(membership, reason="; ".join(filter(None, (membership.reason, why))))
    return _chosen(decided, by_places(workers, found, moves.places), workers, found.reason)


def _as_spares(
    membership: MembershipDecision, workers: Sequence[Worker], plan: Plan, verdict: MoveVerdict
) -> PlannedMembers:
    """Return the decision to keep the members, with all other workers as spares."""
    members = {rank.worker for rank in plan.ranks}
    spares = tuple(sorted(worker.pod.name for worker in workers if worker.pod.name not in members))
    decision = replace(membership, workers=None, spares=spares, again_s=None)
    state = LayoutState(holds=True, reason="Planned", message=f"{_spare_text(spares)}: {verdict.reason}")
    return PlannedMembers(membership=decision, state=state)


def _chosen(membership: MembershipDecision, draft: Plan, workers: Sequence[Worker], why: str) -> PlannedMembers:
    named = {rank.worker for rank in draft.ranks}
    decision = replace(
        membership,
        workers=tuple(worker for worker in workers if worker.pod.name in named),
        spares=tuple(sorted(worker.pod.name for worker in workers if worker.pod.name not in named)),
        reason="; ".join(filter(None, (membership.reason, why))),
    )
    state = LayoutState(holds=True, reason="Planned", message=why)
    return PlannedMembers(membership=decision, draft=draft, state=state)


def _spare_text(names: Sequence[str]) -> str:
    """Return who waits as a spare; empty for nobody."""
    if not names:
        return ""
    return f"{names[0]} waits as a spare" if len(names) == 1 else f"{', '.join(names)} wait as spares"


def _devices(workers: Sequence[Worker]) -> Mapping[str, int]:
    number: Counter[str] = Counter()
    for worker in workers:
        number[worker.pod.pool] += worker.pod.ranks
    return number


def _planned_step_s(
    spec: HeteroTrainJobSpec, workers: Sequence[Worker], plan: Plan, telemetry: Telemetry, cover_of: CoverOf
) -> float | None:
    """Return the planned step of the workers that are members now; ``None`` while it is being computed.

    Planned steps are compared with each other: what a prediction leaves out is left out of both.
    """
    members = {rank.worker_uid for rank in plan.ranks}
    present = [worker for worker in workers if worker.pod.uid in members]
    problem = problem_of(spec, telemetry.profiles, _devices(present), telemetry.links)
    if isinstance(problem, str):
        return float("inf")
    found = cover_of(problem)
    if found is None:
        return None
    return found.step_s if isinstance(found, Cover) else float("inf")


def _without_profiles(
    missing: Mapping[str, Worker], telemetry: Telemetry, *, wait_s: float, trains: bool = False
) -> LayoutState:
    """Return the state while pools have no profile of the model's units."""
    names = ", ".join(sorted(missing))
    if wait_s:
        message = f"the workers of pool {names} measure the model's units"
        return LayoutState(holds=False, reason="WaitingForProfiles", message=message, again_s=wait_s)
    causes = [f"{name}: {clause}" for name, clause in sorted(telemetry.profile_problems.items()) if name in missing]
    if telemetry.problem:
        causes.append(telemetry.problem)
    why = "; ".join(causes) or (
        "their script has to pass job.wrap a function that builds the model, and to reach job.steps: see "
        f"`kubectl logs {missing[min(missing)].pod.name}`"
    )
    after = "" if trains else f" {duration_text(PROFILE_WAIT_S)} after they were ready"
    message = f"the workers of pool {names} have exported no profile of the model's units{after}: {why}"
    return LayoutState(holds=trains, reason="ProfilesMissing", message=message, stuck=not trains)


def _does_not_fit(problem: Problem, found: NoLayout) -> LayoutState:
    """Return the state where no members hold the model; a larger unit than any device is easy to see by its bytes."""
    sizes = [unit.parameter_bytes * problem.state_ratio / _GIB for unit in problem.units]
    least, most = f"{min(sizes):.3g}", f"{max(sizes):.3g}"
    each = f"A unit's training state takes {least if least == most else f'{least} to {most}'} GiB."
    message = f"{found.reason.rstrip('.')}. {each}"
    return LayoutState(holds=False, reason="DoesNotFit", message=message, stuck=True)
