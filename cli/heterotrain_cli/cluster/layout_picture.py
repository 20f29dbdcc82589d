"""A picture of a running job's layout: which worker holds which units, and what it does during a step.

Members and shares are those of the plan, times those that the workers measured of the units before the first plan. So
the passes are the planner's prediction; the measured step stands beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterotrain_core.contract import metrics
from heterotrain_core.contract.plan import LayoutKind, Plan
from heterotrain_core.units import UnitSeconds
from heterotrain_planner.layout.costs import seconds_at
from heterotrain_planner.layout.schedule import Passes, share_seconds, timeline

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.prometheus import QueriedSeries, series_of
from heterotrain_cli.cluster.values import number
from heterotrain_cli.errors import InputError
from heterotrain_cli.forecast.cluster import running_job

MOST_MEMBERS = 12
"""Members that are drawn, the slowest ones."""
MOST_MICRO_BATCHES = 32
"""Micro-batches of a share that are drawn one by one; a longer share is drawn up to there."""
_FORWARD, _BACKWARD = "#4c78a8", "#f58518"
_Curves = Mapping[tuple[str, int], tuple[UnitSeconds, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShown:
    """One stage: ``label`` names worker, pool and units; ``passes`` are the seconds of one micro-batch."""

    label: str
    passes: Passes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberShown:
    """One member, its stages in the order of computation."""

    stages: tuple[StageShown, ...]
    micro_batches: int

    @property
    def share_s(self) -> float:
        """Predicted seconds of its share."""
        return share_seconds([stage.passes for stage in self.stages], self.micro_batches)

    def bubble_ratio(self, stage: int) -> float:
        """Return the part of the share in which a stage waits."""
        return max(0.0, 1.0 - self.micro_batches * sum(self.stages[stage].passes) / self.share_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutShown:
    """A job's layout.

    Attributes:
        name: of the job.
        members: of the plan.
        predicted_s, measured_s: seconds of a step; ``None`` while unknown.
    """

    name: str
    members: tuple[MemberShown, ...]
    predicted_s: float | None
    measured_s: float | None


def layout_of(cluster: Cluster, prometheus: str, name: str) -> LayoutShown:
    """Return the layout of a running job.

    Raises:
        InputError: there is no such job, its members have no stages, or its workers exported no profile.
        UnavailableError: the cluster or Prometheus does not answer.
    """
    body = cluster.job(name)
    plan = running_job(cluster, name, body).plan
    if not any(member.layout.kind is LayoutKind.PIPELINE for member in plan.members):
        raise InputError(
            f"no member of job {name} has stages: --layout draws jobs with spec.parallelism Pipeline or Auto"
        )
    uid = str(body["metadata"]["uid"])
    mine = f'{{{metrics.LABEL_JOB_UID}="{uid}"}}'
    by = f"{metrics.LABEL_WORKER}, {metrics.LABEL_UNIT}, {metrics.LABEL_PHASE}, {metrics.LABEL_SAMPLES}"
    seconds = series_of(cluster, prometheus, f"max by ({by}) ({metrics.UNIT_SECONDS}{mine})", by.split(", "))
    by = f"{metrics.LABEL_UNIT}, {metrics.LABEL_UNIT_NAME}, {metrics.LABEL_WHAT}"
    sizes = series_of(cluster, prometheus, f"max by ({by}) ({metrics.UNIT_BYTES}{mine})", [metrics.LABEL_UNIT])
    status = body.get("status") or {}
    return LayoutShown(
        name=name,
        members=_members(
            name, plan, _curves(seconds), sizes, bytes_per_s=_links(body["spec"].get("parallelism") or {})
        ),
        predicted_s=plan.prediction.step_s if plan.prediction is not None else None,
        measured_s=status.get("stepSeconds"),
    )


def draw_layout(layout: LayoutShown, output: Path) -> str:
    """Write the picture; return in a few words what is on it.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  # takes a second to load

    members = sorted(layout.members, key=lambda member: -member.share_s)[:MOST_MEMBERS]
    heights = [len(member.stages) for member in members]
    figure = Figure(figsize=(11, 1.2 + 0.45 * sum(heights) + 0.5 * len(members)), layout="constrained")
    axes = figure.subplots(len(members), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, member in zip(axes, members, strict=True):
        shown = min(member.micro_batches, MOST_MICRO_BATCHES)
        for each in timeline([stage.passes for stage in member.stages], shown):
            colour = _FORWARD if each.forward else _BACKWARD
            axis.barh(each.stage, each.end_s - each.start_s, left=each.start_s, color=colour, edgecolor="white", lw=0.3)
        axis.set_yticks(range(len(member.stages)), [stage.label for stage in member.stages])
        axis.invert_yaxis()
        waits = ", ".join(f"{member.bubble_ratio(stage):.0%}" for stage in range(len(member.stages)))
        part = "" if shown == member.micro_batches else f", the first {shown} drawn"
        axis.set_title(
            f"{member.micro_batches} micro-batches in {number(member.share_s)} s{part}; stages wait for {waits}",
            fontsize="small", loc="left",
        )  # fmt: skip
    axes[-1].set_xlabel("seconds (forward blue, backward orange, waiting white)")
    times = [f"{what} {number(value)} s" for what, value in
             (("predicted", layout.predicted_s), ("measured", layout.measured_s)) if value is not None]  # fmt: skip
    figure.suptitle(f"{layout.name}: a step, {', '.join(times)}" if times else layout.name)
    try:
        figure.savefig(output)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}") from error
    left_out = len(layout.members) - len(members)
    more = f", without the {left_out} fastest" if left_out else ""
    return f"{len(members)} {'member' if len(members) == 1 else 'members'}, {sum(heights)} stages{more}"


def _links(parallelism: Mapping[str, Any]) -> Callable[[str, str], float]:
    """Return what gives the bytes per second between two pools, by ``spec.parallelism``."""
    default = float(parallelism.get("linkMbitPerSecond") or 10_000)
    own = {frozenset(link["between"]): float(link["mbitPerSecond"]) for link in parallelism.get("links") or ()}
    return lambda one, other: own.get(frozenset((one, other)), default) * 1e6 / 8


def _members(
    job: str,
    plan: Plan,
    curves: _Curves,
    sizes: Sequence[QueriedSeries],
    *,
    bytes_per_s: Callable[[str, str], float],
) -> tuple[MemberShown, ...]:
    """Return the members of a plan with the seconds of their stages."""
    names = {int(labels[metrics.LABEL_UNIT]): labels.get(metrics.LABEL_UNIT_NAME, "") for labels, _ in sizes}
    boundary = {
        int(labels[metrics.LABEL_UNIT]): points[0][1]
        for labels, points in sizes
        if labels.get(metrics.LABEL_WHAT) == metrics.WHAT_BOUNDARY
    }
    units = len(names)
    found = []
    for member, ranks in zip(plan.members, plan.ranks_by_member, strict=True):
        edges = (0, *member.layout.cuts, units)
        size = max(1, member.micro_batch_samples)
        stages = []
        holders = ranks[:: member.layout.shards]
        for position, rank in enumerate(holders):
            first, end = edges[rank.stage], edges[rank.stage + 1]
            try:
                each = [seconds_at(curves[rank.worker, unit], size) for unit in range(first, end)]
            except KeyError:
                raise InputError(
                    f"Prometheus has no profile of the model's units from worker {rank.worker} of job {job}: check "
                    "that it scrapes the workers, and that they run an image of this version"
                ) from None
            # A stage waits for its input, and for the gradient of its output.
            into = back = 0.0
            if rank.stage:
                before = plan.pool_of(holders[position - 1])
                into = boundary.get(first - 1, 0.0) * size / bytes_per_s(before, plan.pool_of(rank))
            if end < units:
                after = plan.pool_of(holders[position + 1])
                back = boundary.get(end - 1, 0.0) * size / bytes_per_s(plan.pool_of(rank), after)
            named = f" ({names[first]} to {names[end - 1]})" if names[first] and names[end - 1] else ""
            stages.append(
                StageShown(
                    label=f"{rank.worker} · {plan.pool_of(rank)}\nunits {first}-{end - 1}{named}",
                    passes=Passes(into + sum(f for f, _ in each), back + sum(b for _, b in each)),
                )
            )
        found.append(MemberShown(stages=tuple(stages), micro_batches=max(1, -(-member.share_samples // size))))
    return tuple(found)


def _curves(rows: Sequence[QueriedSeries]) -> _Curves:
    """Return the measurements of each unit by worker, by growing micro-batch."""
    found: dict[tuple[str, int], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for labels, points in rows:
        unit = (labels[metrics.LABEL_WORKER], int(labels[metrics.LABEL_UNIT]))
        found[unit][int(labels[metrics.LABEL_SAMPLES])][labels[metrics.LABEL_PHASE]] = points[0][1]
    both = {metrics.PHASE_FORWARD, metrics.PHASE_BACKWARD}
    return {
        unit: tuple(
            UnitSeconds(
                micro_batch_samples=size,
                forward_s=phases[metrics.PHASE_FORWARD],
                backward_s=phases[metrics.PHASE_BACKWARD],
            )
            for size, phases in sorted(sizes.items())
            if both <= set(phases)
        )
        for unit, sizes in found.items()
        if any(both <= set(phases) for phases in sizes.values())
    }
