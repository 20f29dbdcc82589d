"""A scenario: a workload on a cluster, and its events."""

from __future__ import annotations

from dataclasses import dataclass

from heterotrain_simulator.buckets import MIB, Network
from heterotrain_simulator.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal workers of one pool, one rank each.

    Attributes:
        pool: name, unique in the scenario.
        gpu: a name of the workload's table.
        count: workers at the start.
        price_per_hour: of one worker, in US dollars; 0 is free.
        variation: of these workers in place of ``Noise.variation``; ``None`` for that one.
    """

    pool: str
    gpu: str
    count: int
    price_per_hour: float = 0.0
    variation: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Variation of one rank's compute time from step to step, independent of the other ranks.

    Attributes:
        variation: standard deviation relative to the mean, log-normal.
        correlation: of the logarithm of a step's time with that of the step before, in [0, 1): a slow phase lasts about
            ``1 / (1 - correlation)`` steps (other work on the node, quotas, clocks).
        hiccup_probability: probability that a step takes ``hiccup_ratio`` times as long on one rank.
        hiccup_ratio: factor on the compute time.
        hiccup_index: of a Pareto tail of that factor, e.g. 2.5 for few steps that take very long; 0 for no tail.
        phase_probability: probability that a rank enters a slow phase at a step, as by a neighbour or its clock.
        phase_steps: mean steps of a phase.
        phase_ratio: factor on the compute time in a phase.
    """

    variation: float = 0.03
    correlation: float = 0.0
    hiccup_probability: float = 0.0
    hiccup_ratio: float = 3.0
    hiccup_index: float = 0.0
    phase_probability: float = 0.0
    phase_steps: float = 30.0
    phase_ratio: float = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Throttling or a noisy neighbour: compute takes ``ratio`` times as long for a while.

    Attributes:
        pool: pool of the slow workers.
        worker: one of them, counted from 0; ``None`` for all.
        from_s, until_s: begin and end.
        ratio: factor on the compute time; 2.0 is half as fast.
    """

    pool: str
    worker: int | None = None
    from_s: float
    until_s: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Workers that join or leave.

    Attributes:
        pool: their pool.
        at_s: time of the loss, or of the new nodes.
        joined: new workers; they can train ``Pauses.start_s`` later.
        lost: workers lost without notice, with the step in flight.
    """

    pool: str
    at_s: float
    joined: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Cost of a change of members.

    Attributes:
        loss_s: pause after a loss, for policies whose survivors continue.
        join_s: the same when members only join.
        restart_s: pause at any change for policies that checkpoint and restart.
        start_s: from a node's appearance until its worker can train.
    """

    loss_s: float = 1.0
    join_s: float = 1.0
    restart_s: float = 30.0
    start_s: float = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated job.

    Attributes:
        name: for messages.
        workload: the model and its data.
        groups: the cluster.
        network: between workers.
        gamma: fraction of backward at which the first gradient bucket is ready.
        bucket_bytes: size of a gradient bucket.
        noise, slowdowns, changes, pauses: see the classes.
        batch_samples: global batch of policies with a fixed batch, and of all if ``adaptive`` is off; with more workers
            than samples, one sample for each.
        adaptive: whether policies that can choose the global batch do.
        boundary_steps: steps between boundaries, 0 for each epoch, ``None`` for distances that follow the job, as the
            operator's default.
        scrape_s: interval between scrapes of the telemetry.
        min_gain_ratio: least gain for which shares change (``planning.shares``).
        end_epochs: limit on the passes over the data, 0 for none.
        end_s: limit on the simulated seconds, 0 for none.
    """

    name: str
    workload: Workload
    groups: tuple[Group, ...]
    network: Network
    gamma: float = 0.15
    bucket_bytes: float = 25 * MIB
    noise: Noise = Noise()
    slowdowns: tuple[Slowdown, ...] = ()
    changes: tuple[Change, ...] = ()
    pauses: Pauses = Pauses()
    batch_samples: int
    adaptive: bool = False
    boundary_steps: int | None = 0
    scrape_s: float = 5.0
    min_gain_ratio: float = 0.01
    end_epochs: int = 0
    end_s: float = 0.0


def problems(scenario: Scenario) -> tuple[str, ...]:
    """Return every contradiction in the scenario as one sentence; empty for a valid scenario."""
    found = []
    pools = [group.pool for group in scenario.groups]
    if len(set(pools)) != len(pools):
        found.append("two pools have the same name: rename one")
    if sum(group.count for group in scenario.groups) < 1 and not any(change.joined for change in scenario.changes):
        found.append("no pool has a worker: set a count or a trace")
    for group in scenario.groups:
        if group.gpu not in scenario.workload.step_ms:
            known = ", ".join(scenario.workload.step_ms)
            found.append(f"{scenario.workload.name} was not measured on {group.gpu}, only on {known}")
    found.extend(
        f"{what} names the pool {pool}, which is not one of {', '.join(pools)}"
        for what, pool in (
            *(("a slowdown", slowdown.pool) for slowdown in scenario.slowdowns),
            *(("a change", change.pool) for change in scenario.changes),
        )
        if pool not in pools
    )
    if scenario.adaptive and not scenario.workload.noise:
        found.append(f"no noise scale was published for {scenario.workload.name}, so its batch cannot be adaptive")
    if not 0 <= scenario.noise.correlation < 1:
        found.append(f"the noise's correlation must be at least 0 and below 1, not {scenario.noise.correlation:g}")
    if scenario.batch_samples < 1:
        found.append("the global batch must be at least 1 sample")
    elif scenario.batch_samples < (first := sum(group.count for group in scenario.groups)):
        found.append(
            f"the global batch of {scenario.batch_samples} is less than one sample for each of the {first} workers at "
            "the start: raise it"
        )
    return tuple(found)
