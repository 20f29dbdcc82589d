"""The next plan of a job: its members, their shares, and the ConfigMap with both.

A part that meets an unexpected error leaves the plan in force, or goes on without measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.plan import Plan
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover, NoLayout

from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.faults import Faults
from heterotrain_operator.decide.inputs import DerivedState, JobInputs
from heterotrain_operator.decide.learn.job_model import JobModel
from heterotrain_operator.decide.objects.objects import build_plan_object, plan_size_problem
from heterotrain_operator.decide.plan.arrangement import arrange
from heterotrain_operator.decide.plan.membership import MembershipDecision
from heterotrain_operator.decide.plan.memory_limits import limited
from heterotrain_operator.decide.plan.plan import next_plan
from heterotrain_operator.decide.plan.shares import Shares, share_out
from heterotrain_operator.decide.plan.stages import PlannedMembers, plan_members
from heterotrain_operator.decide.workers.state import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShares:
    """The shares of the members (``None`` when not decided), and the plan to write with its ConfigMap, if any.

    ``problem`` says why a plan that was decided can't be written.
    """

    shares: Shares | None = None
    plan: Plan | None = None
    body: dict[str, Any] | None = None
    problem: str = ""


def members_of_next_plan(
    inputs: JobInputs, derived: DerivedState, job: ValidJob, membership: MembershipDecision, faults: Faults
) -> PlannedMembers:
    """Return the members; where layouts are planned and that fails, the generation in force stays."""
    if not job.spec.parallelism.is_planned:
        return PlannedMembers(membership=membership)

    questions: list[Problem] = []

    def cover_of(problem: Problem) -> Cover | NoLayout | None:
        found = inputs.cover_of(problem)
        if found is None:
            questions.append(problem)
        return found

    planned = faults.guard(
        "the layouts of members",
        lambda: plan_members(
            job.spec,
            membership,
            derived.in_force.plan,
            replace(inputs.telemetry, profiles=limited(inputs.telemetry.profiles, derived.memory.pools)),
            memory=derived.memory.text,
            cover_of=cover_of,
            now_s=inputs.now_s,
        ),
        lambda: PlannedMembers(membership=replace(membership, workers=None)),
        instead="the plan in force stays",
    )
    return replace(planned, questions=tuple(questions))


def shares_of_next_plan(
    inputs: JobInputs, derived: DerivedState, job: ValidJob, members: PlannedMembers, faults: Faults
) -> PlannedShares:
    """Return the plan; if measurements can't be used, one without them, because members may have to change."""

    def planned(telemetry: Telemetry, model: JobModel) -> PlannedShares:
        shares = _shares(replace(inputs, telemetry=telemetry, model=model), derived, job, members)
        plan = None if inputs.keep_plan else next_plan(job, job.spec, derived.in_force, members.membership, shares)
        body = _plan_object(inputs, derived, plan)
        if plan is not None and body is not None and (problem := plan_size_problem(plan, body["data"][keys.PLAN_KEY])):
            return PlannedShares(problem=problem)
        return PlannedShares(shares=shares, plan=plan, body=body)

    return faults.guard(
        "shares",
        lambda: planned(inputs.telemetry, inputs.model),
        lambda: faults.guard(
            "a plan", lambda: planned(Telemetry(), JobModel()), PlannedShares, instead="the plan in force stays"
        ),
        instead="training goes on without new measurements",
    )


def _shares(inputs: JobInputs, derived: DerivedState, job: ValidJob, members: PlannedMembers) -> Shares | None:
    """Return the shares of new members, or the learned shares of the same ones; ``None`` without any."""
    plan, workers, model = derived.in_force.plan, members.membership.workers, inputs.model
    if workers is not None:
        draft = members.draft or arrange(workers, job.spec.parallelism.mode)
        known = model.throughput.exchange
        shares = share_out(job.spec, draft, inputs.telemetry, model.speeds, plan=plan, exchange=known)
        return replace(shares, reason=f"{shares.reason}; {model.origin}") if model.origin else shares
    if plan is None or not plan.members:
        return None
    leaving = {worker.pod.uid for worker in derived.workers if worker.ended or worker.state is WorkerState.LEAVING}
    if any(rank.worker_uid in leaving for rank in plan.ranks):
        return None  # the job is finishing, or its members change next: these members need no other shares
    return model.shares_of(plan, generation=job.generation)


def _plan_object(inputs: JobInputs, derived: DerivedState, new_plan: Plan | None) -> dict[str, Any] | None:
    if new_plan is None:
        return None
    return build_plan_object(
        inputs.job,
        new_plan,
        resource_version=inputs.plan.resource_version if inputs.plan else None,
        departed=derived.accounts.departed,
    )
