"""Scenarios as users write them (``research/README.md``), and the scenarios that ship with this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from heterotrain_cli import documents
from heterotrain_cli.documents import (
    Document,
    DocumentPart,
    Flag,
    Fraction,
    Integer,
    Name,
    Number,
    Price,
    Seconds,
    schema_config,
)
from heterotrain_cli.errors import InputError
from heterotrain_simulator import scenario as simulator
from heterotrain_simulator.baselines import AdaptiveEven, AdaptiveProportional, Even, Proportional
from heterotrain_simulator.buckets import MIB, Network
from heterotrain_simulator.cannikin import Cannikin
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.policy import Policy
from heterotrain_simulator.spot_traces import TRACES, as_changes
from heterotrain_simulator.workloads import PRICES_PER_HOUR, WORKLOADS
from pydantic import Field

PolicyName = Literal["even", "adaptive-even", "proportional", "adaptive-proportional", "cannikin", "heterotrain"]
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "even": Even,
    "adaptive-even": AdaptiveEven,
    "proportional": Proportional,
    "adaptive-proportional": AdaptiveProportional,
    "cannikin": Cannikin,
    "heterotrain": HeterotrainPolicy,
}
_FOREVER_S = 1e12
_GIGABIT_BYTES = 1e9 / 8
_Seed = Annotated[Integer, Field(ge=0, le=10**9)]
_Workers = Annotated[Integer, Field(ge=0, le=256)]
_Steps = Annotated[Integer, Field(ge=0, le=1_000_000)]
_Pause = Annotated[Number, Field(ge=0, le=1e5)]
_Ratio = Annotated[Number, Field(gt=0, le=1000)]


class Pool(DocumentPart):
    """Equal workers of the cluster."""

    name: Name
    """Name of the pool, unique in the scenario."""
    gpu: Name
    """GPU, one of those that the workload was measured on."""
    count: _Workers | None = None
    """Workers at the start, one GPU each; without it, 1, or 0 with a trace."""
    price_per_hour: Price | None = None
    """Price of one worker in US dollars; without it the GPU's list price, else 0."""
    trace: Literal["p3", "g4dn"] | None = None
    """A recorded spot trace; its nodes are workers of this pool, in addition to count."""
    variation: Annotated[Number, Field(ge=0, le=2)] | None = None
    """Standard deviation of a step of this pool's workers relative to the mean, in place of noise.variation."""

    def as_group(self) -> simulator.Group:
        """Return the pool as the simulator takes it."""
        initial = 0 if self.trace else 1
        price = PRICES_PER_HOUR.get(self.gpu, 0.0) if self.price_per_hour is None else self.price_per_hour
        count = initial if self.count is None else self.count
        return simulator.Group(
            pool=self.name, gpu=self.gpu, count=count, price_per_hour=price, variation=self.variation
        )


class RingNetwork(DocumentPart):
    """A ring over equal links."""

    gigabits_per_second: Annotated[Number, Field(gt=0, le=100_000)] = 10
    """Line rate."""
    efficiency: Annotated[Number, Field(gt=0, le=1)] = 0.8
    """Part of the line rate that gradients get."""
    latency_s: Annotated[Number, Field(ge=0, le=10)] = 2e-5
    """Latency of one message between neighbours."""

    def as_network(self) -> Network:
        """Return the network as the simulator takes it."""
        rate = self.gigabits_per_second * _GIGABIT_BYTES * self.efficiency
        return Network(bytes_per_s=rate, latency_s=self.latency_s)


class Noise(DocumentPart):
    """Variation of each worker's compute time from step to step."""

    variation: Annotated[Number, Field(ge=0, le=2)] = 0.03
    """Standard deviation relative to the mean."""
    correlation: Annotated[Number, Field(ge=0, le=0.999)] = 0
    """Of a worker's step with the step before: a slow phase lasts about 1 / (1 - correlation) steps."""
    hiccup_probability: Fraction = 0
    """Probability that a worker's step takes hiccupRatio times as long."""
    hiccup_ratio: Annotated[Number, Field(ge=1, le=1000)] = 3
    """See hiccupProbability."""
    hiccup_index: Annotated[Number, Field(ge=0, le=100)] = 0
    """Index of a Pareto tail of hiccupRatio, such as 2.5; 0 for none."""
    phase_probability: Fraction = 0
    """Probability that a worker enters a slow phase at a step."""
    phase_steps: Annotated[Number, Field(ge=1, le=1e6)] = 30
    """Mean steps of a slow phase."""
    phase_ratio: Annotated[Number, Field(ge=1, le=1000)] = 1.25
    """Factor on the compute time in a slow phase."""


class Slowdown(DocumentPart):
    """Throttling or a noisy neighbour."""

    pool: Name
    """Pool whose workers are slow."""
    worker: Annotated[Integer, Field(ge=0)] | None = None
    """One of its workers, counted from 0; without it, all."""
    from_s: Seconds
    """Begin."""
    until_s: Seconds | None = None
    """End; without it, never."""
    ratio: _Ratio
    """Factor on the compute time; 2 is half as fast."""


class Change(DocumentPart):
    """Workers that join or leave."""

    pool: Name
    """Pool of the workers."""
    at_s: Seconds
    """Time of the change."""
    joined: _Workers = 0
    """New nodes; their workers can train pauses.startSeconds later."""
    lost: _Workers = 0
    """Workers lost without notice."""


class Pauses(DocumentPart):
    """Cost of a change of members."""

    loss_s: _Pause = 1
    """Pause after a loss, for policies whose survivors continue."""
    join_s: _Pause = 1
    """The same when members only join."""
    restart_s: _Pause | None = None
    """Pause at any change for policies that checkpoint and restart; without it, the published one of the workload."""
    start_s: _Pause = 45
    """From a node's appearance until its worker can train."""


class End(DocumentPart):
    """End of the run, in addition to the workload's target."""

    epochs: Annotated[Integer, Field(ge=0, le=100_000)] = 0
    """Passes over the data; 0 for no such end."""
    seconds: Seconds = 0
    """Simulated time; 0 for no such end."""


class ScenarioFile(Document):
    """A job on a cluster, and what happens to it (``python -m heterotrain_simulate``)."""

    model_config = schema_config("scenario")

    workload: Literal["cifar10", "imagenet", "deepspeech2", "bert", "opt-350m"]
    """What is trained; published step times of its GPUs are built in."""
    batch: Annotated[Integer, Field(ge=1, le=1_000_000)]
    """Global batch of policies with a fixed batch, and the first one of the others."""
    adaptive: Flag = False
    """Whether policies that can choose the global batch do."""
    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    """The cluster."""
    network: RingNetwork = RingNetwork()
    """A ring over equal links."""
    gamma: Fraction = 0.15
    """Fraction of backward that has passed when the first gradient bucket is ready."""
    bucket_mib: Annotated[Number, Field(gt=0, le=100_000)] = Field(default=25, alias="bucketMiB")
    """Size of a gradient bucket."""
    noise: Noise = Noise()
    """Variation of each worker's compute time."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Throttling or noisy neighbours."""
    changes: tuple[Change, ...] = ()
    """Workers that join or leave."""
    pauses: Pauses = Pauses()
    """Cost of a change of members."""
    boundary_steps: _Steps | None = None
    """Steps between boundaries, 0 for each epoch; without it, they follow the job as by the operator's default."""
    min_gain: Fraction = 0.01
    """Least predicted gain for which shares change; it must also exceed what noise alone could promise."""
    scrape_s: Annotated[Number, Field(gt=0, le=1e5)] = 5
    """Interval between two scrapes of the telemetry."""
    end: End = End()
    """End of the run, in addition to the workload's target."""
    policies: Annotated[tuple[PolicyName, ...], Field(min_length=1)] = get_args(PolicyName)
    """Policies to compare; the others are measured against the first. Without it, all."""
    seeds: Annotated[tuple[_Seed, ...], Field(min_length=1, max_length=100)] = (1,)
    """One run for each; without it, seed 1."""

    def as_scenario(self, name: str) -> simulator.Scenario:
        """Return the scenario as the simulator takes it."""
        workload = WORKLOADS[self.workload]
        pauses = dict(self.pauses)
        if self.pauses.restart_s is None:
            pauses["restart_s"] = workload.restart_s
        recorded = [as_changes(TRACES[pool.trace], pool.name) for pool in self.pools if pool.trace]
        return simulator.Scenario(
            name=name,
            workload=workload,
            groups=tuple(pool.as_group() for pool in self.pools),
            network=self.network.as_network(),
            gamma=self.gamma,
            bucket_bytes=self.bucket_mib * MIB,
            noise=simulator.Noise(**dict(self.noise)),
            slowdowns=tuple(_slowdown(slowdown) for slowdown in self.slowdowns),
            changes=(*(simulator.Change(**dict(change)) for change in self.changes), *chain.from_iterable(recorded)),
            pauses=simulator.Pauses(**pauses),
            batch_samples=self.batch,
            adaptive=self.adaptive,
            boundary_steps=self.boundary_steps,
            scrape_s=self.scrape_s,
            min_gain_ratio=self.min_gain,
            end_epochs=self.end.epochs,
            end_s=self.end.seconds,
        )


def _slowdown(raw: Slowdown) -> simulator.Slowdown:
    until_s = _FOREVER_S if raw.until_s is None else raw.until_s
    return simulator.Slowdown(**{**dict(raw), "until_s": until_s})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A scenario with the policies and seeds of its runs."""

    scenario: simulator.Scenario
    policies: tuple[str, ...]
    seeds: tuple[int, ...]


def shipped() -> dict[str, str]:
    """Return the scenarios that ship with this package: name to one sentence."""
    folder = resources.files("heterotrain_simulate") / "scenarios"
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    return {
        name.removesuffix(".yaml"): str(documents.parse_document(text, where=name).get("description", ""))
        for name, text in sorted(texts.items())
        if name.endswith(".yaml")
    }


def read_scenario(name_or_path: str) -> Comparison:
    """Return the shipped scenario of that name, else the one in that file.

    Raises:
        InputError: there is none, or a field is wrong, or the scenario contradicts itself.
    """
    if name_or_path in shipped():
        where = name_or_path
        text = (resources.files("heterotrain_simulate") / "scenarios" / f"{where}.yaml").read_text(encoding="utf-8")
    else:
        where = documents.place(name_or_path)
        if name_or_path != documents.STANDARD_INPUT and not Path(name_or_path).exists():
            raise InputError(f"{where}: is neither a file nor a shipped scenario: these are {', '.join(shipped())}")
        text = documents.read_text(name_or_path)
    return scenario_of(documents.parse_document(text, where=where), name=name_or_path, where=where)


def scenario_of(document: Any, *, name: str, where: str) -> Comparison:
    """Return the comparison that a document describes; ``where`` names it in messages.

    Raises:
        InputError: a field is wrong, or the scenario contradicts itself.
    """
    file = documents.check_document(document, ScenarioFile, where=where)
    scenario = file.as_scenario(name)
    if found := simulator.problems(scenario):
        raise InputError(f"{where}: {found[0]}")
    return Comparison(
        scenario=scenario, policies=tuple(dict.fromkeys(file.policies)), seeds=tuple(dict.fromkeys(file.seeds))
    )
