"""One job's counters and gauges, as one read finds them. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from heterotrain_core.contract import metrics
from heterotrain_core.contract.plan import SCHEMA_VERSION
from heterotrain_planner.perf.counters import CounterKey, Counters

from heterotrain_operator.cluster_state.links import MeasuredLink
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, PreflightProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeries:
    """All current series of one job in Prometheus.

    Attributes:
        counters: by member and shape.
        gauges: by member.
        times: when each member was last scraped, in seconds since the epoch.
        dropped: names the series that were not accepted, in one sentence; empty for none.
    """

    counters: Mapping[CounterKey, Counters]
    gauges: Mapping[MemberId, MemberGauges]
    times: Mapping[MemberId, float] = field(default_factory=dict)
    dropped: str = ""


@dataclass(frozen=True, slots=True)
class Special:
    """Values of one rank that need more of their labels than name, share, micro-batch and phase.

    Attributes:
        user: the script's own metrics by name.
        peaks: peak memory in bytes by the largest micro-batch.
        problems: what checks before training have found.
        links: values of links by the pool at the other end and the series' name.
    """

    user: dict[str, float] = field(default_factory=dict)
    peaks: dict[int, float] = field(default_factory=dict)
    problems: list[PreflightProblem] = field(default_factory=list)
    links: dict[tuple[str, str], float] = field(default_factory=dict)


def counter_name(member: MemberId) -> str:
    """Return a member's name in counters and observations."""
    return sys.intern(f"{member.worker_uid}/{member.local_rank}")


def gauges_of(worker: str, values: Mapping[str, float], special: Special) -> MemberGauges:
    """Return the gauges of one rank.

    Args:
        worker: name of its worker.
        values: of its series without further labels, by name; summed over the causes of pauses.
        special: its other values.
    """

    def whole(name: str) -> int | None:
        return None if name not in values else int(values[name])

    return MemberGauges(
        worker=worker,
        generation=whole(metrics.PLAN_GENERATION),
        revision=whole(metrics.PLAN_REVISION),
        epoch=whole(metrics.EPOCH),
        step=whole(metrics.STEP),
        samples_committed=whole(metrics.SAMPLES_COMMITTED),
        epoch_samples=whole(metrics.EPOCH_SAMPLES),
        cursor_samples=whole(metrics.CURSOR),
        epoch_step=whole(metrics.EPOCH_STEP),
        global_batch_samples=whole(metrics.GLOBAL_BATCH),
        noise_scale_samples=values.get(metrics.NOISE_SCALE),
        loss=values.get(metrics.LOSS),
        checkpoint_step=whole(metrics.CHECKPOINT_STEP),
        resumed_step=whole(metrics.RESUMED_STEP),
        checkpoint_time_s=values.get(metrics.CHECKPOINT_TIME),
        micro_batch_cap_samples=whole(metrics.MICRO_BATCH_CAP),
        out_of_memory=whole(metrics.OUT_OF_MEMORY) or 0,
        recomputes_activations=values.get(metrics.CHECKPOINTED_UNITS) == 1.0,
        device_memory_bytes=values.get(metrics.DEVICE_MEMORY),
        peak_memory_bytes=special.peaks,
        units=whole(metrics.UNITS),
        usable_memory_bytes=values.get(metrics.USABLE_MEMORY),
        state_ratio=values.get(metrics.STATE_RATIO),
        update_s_per_byte=values.get(metrics.UPDATE_SECONDS_PER_BYTE),
        can_shard=values.get(metrics.CAN_SHARD) == 1.0,
        profile_complete=values.get(metrics.UNIT_PROFILE_COMPLETE) == 1.0,
        checkpoint_failures=whole(metrics.CHECKPOINT_FAILURES) or 0,
        non_finite_steps=whole(metrics.NON_FINITE_STEPS) or 0,
        divergences=whole(metrics.DIVERGENCES) or 0,
        non_finite_step=whole(metrics.NON_FINITE_STEP),
        last_finite_loss=values.get(metrics.LAST_FINITE_LOSS),
        plan_schema=whole(metrics.PLAN_SCHEMA) or SCHEMA_VERSION,
        waiting_s=values.get(metrics.WAITING_SECONDS),
        pause_s=values.get(metrics.PAUSE_SECONDS, 0.0),
        pauses=whole(metrics.MEMBERSHIP_CHANGES) or 0,
        preflight_passed=whole(metrics.PREFLIGHT_PASSED),
        user_metrics=special.user,
        preflight_problems=tuple(sorted(special.problems)[: metrics.MOST_PREFLIGHT_PROBLEMS]),
        links=_links(special.links),
    )


def _links(values: Mapping[tuple[str, str], float]) -> dict[str, MeasuredLink]:
    """Return a rank's links by the pool at their other end, those with a bandwidth; at most as many as it exports."""
    pools = sorted({pool for pool, name in values if name == metrics.LINK_BANDWIDTH})[: metrics.MOST_LINKS]
    return {
        pool: MeasuredLink(values[pool, metrics.LINK_BANDWIDTH], values.get((pool, metrics.LINK_LATENCY), 0.0))
        for pool in pools
    }
