"""What Prometheus told about one job, as values; missing data is absent, never zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from heterotrain_core.perf.counters import Observation


class MemberId(NamedTuple):
    """Names a rank: a pod's uid, so that a pod that came back under an old name is another one, and its local rank."""

    worker_uid: str
    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGauges:
    """The newest gauges of one rank; ``None`` or absent where it has exported nothing yet.

    ``pause_s`` are the seconds that changes of membership have cost it so far, ``pauses`` how many there were.
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
    checkpoint_time_s: float | None = None
    micro_batch_cap_samples: int | None = None
    device_memory_bytes: float | None = None
    peak_memory_bytes: Mapping[int, float] = field(default_factory=dict)
    """By the largest micro-batch of a step, in samples."""
    checkpoint_failures: int = 0
    pause_s: float = 0.0
    pauses: int = 0
    user_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsInForce:
    """What one rank did since the plan that it has in force took effect, from the first scrape that showed it.

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
    """What a job reached since a generation's members train together, evaluation, checkpoints and pauses included."""

    generation: int
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the job and its members reached over the last half minute or so.

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
    """Everything known about one job from its workers' own words.

    Attributes:
        problem: why the newest read brought nothing, in one sentence; empty when it did.
        reason: the same as one CamelCase word.
        newest_sample_s: time of the newest scrape of any member; 0 when there is none.
        scrape_interval_s: seconds between the two newest scrapes; ``None`` before there are two.
        gauges: by member.
        rates: measured rates.
        observations: by member, what it did between scrapes, oldest first; members that have left included.
        pools: by member, its pool, as far as it was ever known.
        in_force: by member, what it did under the plan that it has in force.
        sequence: grows when new data came.
    """

    problem: str = ""
    reason: str = "Fresh"
    newest_sample_s: float = 0.0
    scrape_interval_s: float | None = None
    gauges: Mapping[MemberId, MemberGauges] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    observations: Mapping[MemberId, tuple[Observation, ...]] = field(default_factory=dict)
    pools: Mapping[MemberId, str] = field(default_factory=dict)
    in_force: Mapping[MemberId, StepsInForce] = field(default_factory=dict)
    sequence: int = 0

    @property
    def newest(self) -> MemberGauges | None:
        """The gauges of the member that is furthest, ``None`` before any was scraped."""
        return max(self.gauges.values(), key=lambda gauges: gauges.step or -1, default=None)

    @property
    def pause_s(self) -> float | None:
        """Mean seconds that a change of membership has cost, over all that were seen; ``None`` before one was."""
        paused = [gauges for gauges in self.gauges.values() if gauges.pauses and gauges.pause_s > 0]
        return sum(g.pause_s for g in paused) / sum(g.pauses for g in paused) if paused else None
