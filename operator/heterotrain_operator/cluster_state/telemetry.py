"""Telemetry of one job, as values; missing data is absent, never zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from heterotrain_core.contract.plan import SCHEMA_VERSION
from heterotrain_planner.perf.counters import Observation

from heterotrain_operator.cluster_state.links import MeasuredLink
from heterotrain_operator.cluster_state.profiles import PoolProfile


class MemberId(NamedTuple):
    """Identifies a rank by its pod's uid, because a new pod may take an old name, and by its local rank."""

    worker_uid: str
    local_rank: int


class PreflightProblem(NamedTuple):
    """What a check before training has found; failures sort before limits."""

    is_limit: bool
    """Training works, but slowly or with a limit."""
    check: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGauges:
    """The newest gauges of one rank; ``None`` or absent where it has exported nothing yet.

    Attributes:
        pause_s: seconds that membership changes have cost the rank so far.
        pauses: number of those changes.
        non_finite_steps: steps of this process whose loss or gradient was infinite or NaN.
        micro_batch_cap_samples: set by the script, or learned when memory ran out.
        out_of_memory: steps of this process in which memory ran out.
        recomputes_activations: whether units compute their activations again, because memory ran out.
        units: of the model, where the rank has profiled them.
        usable_memory_bytes: of its device, for training state and activations.
        state_ratio: bytes of training state for each byte of parameters.
        update_s_per_byte: seconds of the optimizers for each byte of parameters, once a step.
        can_shard: whether it can hold parts of units.
        profile_complete: whether it exports its profile of all units.
        divergences: comparisons in which the ranks' copies of the state differed.
        non_finite_step: the newest of those steps.
        last_finite_loss: the newest finite loss before it.
        plan_schema: newest schema of plans that its image reads.
        waiting_s: seconds for which the rank has waited for others; 0 while it runs code of its own.
        links: to ranks of other workers in its member, by their pool.
        preflight_passed: checks before training that found nothing; ``None`` until all have ended.
        preflight_problems: what the other checks found, the gravest first.
    """

    worker: str
    generation: int | None = None
    revision: int | None = None
    epoch: int | None = None
    step: int | None = None
    samples_committed: int | None = None
    epoch_samples: int | None = None
    cursor_samples: int | None = None
    epoch_step: int | None = None
    global_batch_samples: int | None = None
    noise_scale_samples: float | None = None
    loss: float | None = None
    checkpoint_step: int | None = None
    resumed_step: int | None = None
    checkpoint_time_s: float | None = None
    micro_batch_cap_samples: int | None = None
    out_of_memory: int = 0
    recomputes_activations: bool = False
    device_memory_bytes: float | None = None
    peak_memory_bytes: Mapping[int, float] = field(default_factory=dict)
    """By the largest micro-batch of a step, in samples."""
    units: int | None = None
    usable_memory_bytes: float | None = None
    state_ratio: float | None = None
    update_s_per_byte: float | None = None
    can_shard: bool = False
    profile_complete: bool = False
    checkpoint_failures: int = 0
    non_finite_steps: int = 0
    divergences: int = 0
    non_finite_step: int | None = None
    last_finite_loss: float | None = None
    waiting_s: float | None = None
    plan_schema: int = SCHEMA_VERSION
    pause_s: float = 0.0
    pauses: int = 0
    user_metrics: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, MeasuredLink] = field(default_factory=dict)
    preflight_passed: int | None = None
    preflight_problems: tuple[PreflightProblem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsInForce:
    """Steps of one rank under its plan in force, counted from the first scrape with that plan.

    Attributes:
        version: generation and revision of that plan.
        steps: committed steps by share in samples.
        step_s: their summed seconds from commit to commit, by share.
    """

    version: tuple[int, int]
    steps: Mapping[int, int] = field(default_factory=dict)
    step_s: Mapping[int, float] = field(default_factory=dict)

    def after(self, share_samples: int, steps: int, mean_step_s: float) -> StepsInForce:
        """Return the sums after some more steps."""
        return StepsInForce(
            version=self.version,
            steps={**self.steps, share_samples: self.steps.get(share_samples, 0) + steps},
            step_s={**self.step_s, share_samples: self.step_s.get(share_samples, 0.0) + steps * mean_step_s},
        )


class Sustained(NamedTuple):
    """A generation's rate since its members train together, including evaluation, checkpoints and pauses.

    It has trained for ``lasts_s`` since the first scrape that showed it.
    """

    generation: int
    samples_per_s: float
    lasts_s: float


class LossClimb(NamedTuple):
    """A training loss that climbed from a level at a step to another one, and has not come halfway back."""

    from_step: int
    from_loss: float
    step: int
    loss: float


class ExchangeInForce(NamedTuple):
    """The exchange of gradients under the newest generation: median seconds of all buckets, and timed steps."""

    generation: int
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Measured rates of the job and its members over the last half minute.

    Attributes:
        samples_per_s: committed samples per second, pauses included.
        sustained: samples per second of the newest generation; ``None`` before it lasted for half a minute.
        step_s: mean seconds from step to step.
        solo_samples_per_s: by member, samples per second of its own computation.
    """

    samples_per_s: float | None = None
    sustained: Sustained | None = None
    step_s: float | None = None
    solo_samples_per_s: Mapping[MemberId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Everything that the workers of one job have reported.

    Attributes:
        problem: why the newest read failed, in one sentence; empty after a success.
        reason: the same as one CamelCase word.
        dropped: the series of the newest read that were not accepted, in one sentence; empty for none.
        newest_sample_s: time of the newest scrape of any member; 0 without one.
        scrape_interval_s: seconds between the two newest scrapes; ``None`` before the second one.
        member_interval_s: seconds between two scrapes of one member, which is what Prometheus is configured for: the
            shortest of the newest gaps, because a longer one may be an outage; ``None`` before the second scrape.
        gauges: by member.
        rates: measured rates.
        observations: by member, its steps between scrapes, oldest first; includes members that have left.
        pools: by member, its pool, where known.
        in_force: by member, its steps under its plan in force.
        exchange: as measured under the newest generation; ``None`` before that.
        loss_climb: how far the training loss has climbed; ``None`` while it does not.
        commit_s: time of the first scrape with the newest committed step; 0 before the first scrape.
        profiles: by pool, what one of its ranks has measured of the model's units.
        links: by pair of pools in alphabetical order, as the members that used them have measured them last.
        profile_problems: by pool without a usable profile, what is wrong with the one that a rank exports.
        sequence: grows with each read of new data.
    """

    problem: str = ""
    reason: str = "Fresh"
    dropped: str = ""
    newest_sample_s: float = 0.0
    scrape_interval_s: float | None = None
    member_interval_s: float | None = None
    gauges: Mapping[MemberId, MemberGauges] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    observations: Mapping[MemberId, tuple[Observation, ...]] = field(default_factory=dict)
    pools: Mapping[MemberId, str] = field(default_factory=dict)
    in_force: Mapping[MemberId, StepsInForce] = field(default_factory=dict)
    exchange: ExchangeInForce | None = None
    loss_climb: LossClimb | None = None
    commit_s: float = 0.0
    profiles: Mapping[str, PoolProfile] = field(default_factory=dict)
    links: Mapping[tuple[str, str], MeasuredLink] = field(default_factory=dict)
    profile_problems: Mapping[str, str] = field(default_factory=dict)
    sequence: int = 0

    @property
    def newest(self) -> MemberGauges | None:
        """The gauges of the member with the most steps; ``None`` before the first scrape."""
        return max(self.gauges.values(), key=lambda gauges: gauges.step or -1, default=None)

    @property
    def pause_s(self) -> float | None:
        """Mean seconds of a pause for a membership change; ``None`` before the first change."""
        paused = [gauges for gauges in self.gauges.values() if gauges.pauses and gauges.pause_s > 0]
        return sum(g.pause_s for g in paused) / sum(g.pauses for g in paused) if paused else None
