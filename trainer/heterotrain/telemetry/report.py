"""Telemetry: numbers kept by the training thread, rendered on each scrape.

A step costs a handful of additions; costlier work happens during a scrape. Values that other objects hold anyway, such
as the training's progress, are looked up then instead of being copied in every step. A gauge without a value is not
exported.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.plan import SCHEMA_VERSION
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from heterotrain.identity import Identity
from heterotrain.network.authentication import REFUSALS

_log = logging.getLogger(__name__)

Link = tuple[str, float | None, float | None]
"""Pool at the other end, bytes per second, and seconds of a small message, as far as they are known."""


@dataclass(slots=True)
class ShapeCounters:
    """Cumulative counters of the steps with the same share and micro-batch size."""

    steps: int = 0
    samples: int = 0
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(names.PHASES, 0.0))
    phase_squared_s2: dict[str, float] = field(default_factory=lambda: dict.fromkeys(names.PHASES, 0.0))
    first_bucket: float = 0.0
    first_bucket_squared: float = 0.0
    peak_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one committed step's phases, and gamma if the step had a backward pass."""

    load_s: float
    forward_s: float
    backward_s: float
    sync_s: float
    update_s: float
    step_s: float
    first_bucket_ratio: float | None = None

    def by_phase(self) -> dict[str, float]:
        """Return the seconds under the contract's names."""
        return {
            names.PHASE_LOAD: self.load_s,
            names.PHASE_FORWARD: self.forward_s,
            names.PHASE_BACKWARD: self.backward_s,
            names.PHASE_SYNC: self.sync_s,
            names.PHASE_UPDATE: self.update_s,
            names.PHASE_COMPUTE: self.load_s + self.forward_s + self.backward_s + self.update_s,
            names.PHASE_STEP: self.step_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeTable:
    """A gauge with labels of its own beside the identity's.

    Attributes:
        labels: their names.
        rows: the values of the labels, and the gauge's value.
    """

    labels: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], float], ...]


class RankMetrics:
    """All numbers of one rank; also a collector for prometheus_client."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._lock = threading.Lock()
        self._labels = [identity.job_uid, identity.worker, identity.worker_uid, str(identity.local_rank)]
        self._shapes: OrderedDict[tuple[int, int], ShapeCounters] = OrderedDict()
        self._gauges: dict[str, float] = {names.READY: 0.0, names.PLAN_SCHEMA: float(SCHEMA_VERSION)}
        from_zero = (names.REPEATED_STEPS, names.NON_FINITE_STEPS, names.DIVERGENCES)
        self._counters = dict.fromkeys((*from_zero, names.OUT_OF_MEMORY, names.CHECKPOINT_FAILURES), 0.0)
        self._by_cause: dict[str, dict[str, float]] = defaultdict(dict)
        self._user: dict[str, float] = {}
        self._tables: Mapping[str, GaugeTable] = {}
        self._preflight = GaugeTable(labels=(names.LABEL_CHECK, names.LABEL_MESSAGE), rows=())
        self._before: list[Callable[[], None]] = []
        self._live_gauges: list[Callable[[], Mapping[str, float]]] = []
        self._live_counters: list[Callable[[], Mapping[str, float]]] = []
        self._links: list[Callable[[], Sequence[Link]]] = []
        self.spare = ""
        """Why this rank waits as a spare; empty while it does not. The readiness endpoint tells it."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def look_up(
        self,
        *,
        before: Callable[[], None] | None = None,
        gauges: Callable[[], Mapping[str, float]] | None = None,
        counters: Callable[[], Mapping[str, float]] | None = None,
        links: Callable[[], Sequence[Link]] | None = None,
    ) -> None:
        """Add values that are looked up on each scrape, by another thread.

        Args:
            before: called before a scrape reads the counters, so that pending steps can be counted.
            gauges: returns gauges of the contract.
            counters: returns counters of the contract.
            links: returns the links to other workers.
        """
        self._before += [before] if before else []
        self._live_gauges += [gauges] if gauges else []
        self._live_counters += [counters] if counters else []
        self._links += [links] if links else []

    # -- written by the training thread ------------------------------------------------------------------------------

    def step(self, *, shape: tuple[int, int], samples: int, times: StepTimes, peak_bytes: int | None) -> None:
        """Count one committed step under its shape; beyond ``MAX_LIVE_SHAPES``, drop the least recently used shape.

        Args:
            shape: share and largest micro-batch of this rank's member; the latter is 0 without samples.
            samples: those of this rank.
            times: seconds of its phases.
            peak_bytes: peak memory of its tensors on the accelerator; ``None`` without one.
        """
        with self._lock:
            counters = self._shapes.pop(shape, None) or ShapeCounters()
            self._shapes[shape] = counters  # the most recently used shape is last
            if len(self._shapes) > names.MAX_LIVE_SHAPES:
                self._shapes.popitem(last=False)
            counters.steps += 1
            counters.samples += samples
            for phase, seconds in times.by_phase().items():
                counters.phase_s[phase] += seconds
                counters.phase_squared_s2[phase] += seconds * seconds
            if times.first_bucket_ratio is not None:
                counters.first_bucket += times.first_bucket_ratio
                counters.first_bucket_squared += times.first_bucket_ratio**2
            if peak_bytes is not None:
                counters.peak_memory_bytes = max(peak_bytes, counters.peak_memory_bytes or 0)

    def buckets(self, seconds: tuple[float, ...]) -> None:
        """Count one step's bucket transfers: for each bucket (at least one) the minimum seconds over ranks."""
        with self._lock:
            self._add(names.BUCKET_STEPS, 1.0)
            self._add(names.OVERLAPPED_SECONDS, sum(seconds[:-1]))
            self._add(names.LAST_BUCKET_SECONDS, seconds[-1])

    def count(self, name: str, amount: float = 1.0, *, cause: str | None = None) -> None:
        """Add ``amount``, in the counter's unit, to a counter of the contract; ``cause`` is its label, if any."""
        with self._lock:
            if cause is None:
                self._add(name, amount)
            else:
                self._by_cause[name][cause] = self._by_cause[name].get(cause, 0.0) + amount

    def gauges(self, values: Mapping[str, float]) -> None:
        """Set gauges of the contract, by name, each in its unit."""
        with self._lock:
            self._gauges.update(values)

    def tables(self, tables: Mapping[str, GaugeTable], values: Mapping[str, float]) -> None:
        """Set gauges with labels, by name, together with plain gauges; they replace all tables that were set before."""
        with self._lock:
            self._tables = dict(tables)
            self._gauges.update(values)

    def preflight(self, passed: int, problems: Sequence[tuple[str, str, float]]) -> None:
        """Set what the checks before training have found.

        Args:
            passed: number of checks that found nothing.
            problems: of each other check its name, its sentence, and ``PREFLIGHT_WARNING`` or ``PREFLIGHT_FAILURE``.
        """
        rows = tuple(
            ((name[: names.MOST_CHECK], _printable(message)), value)
            for name, message, value in problems[: names.MOST_PREFLIGHT_PROBLEMS]
        )
        with self._lock:
            self._preflight = replace(self._preflight, rows=rows)
            self._gauges[names.PREFLIGHT_PASSED] = float(passed)

    def current(self) -> dict[str, float]:
        """Return the newest value of every gauge that has one."""
        live = {name: value for look in self._live_gauges for name, value in look().items()}
        with self._lock:
            return {**self._gauges, **live}

    def checkpoint(self) -> tuple[int, float] | None:
        """Return step and time, in seconds since 1970, of the newest complete checkpoint."""
        with self._lock:
            step, time_s = self._gauges.get(names.CHECKPOINT_STEP), self._gauges.get(names.CHECKPOINT_TIME)
        return None if step is None or time_s is None else (int(step), time_s)

    def reported(self) -> dict[str, float]:
        """Return the newest values reported by the script."""
        with self._lock:
            return dict(self._user)

    def waits_as_spare(self, why: str) -> None:
        """Set why this rank waits as a spare; empty when it takes part."""
        self.spare = why

    def user(self, values: Mapping[str, float]) -> None:
        """Set values reported by the script, under its own names."""
        with self._lock:
            self._user.update(values)

    @property
    def ready(self) -> bool:
        """Whether the script has reached ``job.steps``."""
        return self._gauges[names.READY] == 1.0

    def _add(self, name: str, amount: float) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount

    # -- read by the scrape ------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield everything as Prometheus families."""
        for prepare in self._before:
            prepare()
        counters: dict[str, float] = {names.REFUSED_CONNECTIONS: REFUSALS.count}
        for look in self._live_counters:
            counters |= look()
        gauges = self.current()
        with self._lock:
            yield from list(self._families(gauges, {**self._counters, **counters}))

    def _families(self, gauges: Mapping[str, float], counters: Mapping[str, float]) -> Iterator[Metric]:
        identity = list(names.IDENTITY_LABELS)
        for name, value in gauges.items():
            yield _gauge(name, identity, [(self._labels, value)])
        for name, value in counters.items():
            yield _counter(name, identity, [(self._labels, value)])
        for name, causes in self._by_cause.items():
            rows = [([*self._labels, cause], value) for cause, value in causes.items()]
            yield _counter(name, [*identity, names.LABEL_CAUSE], rows)
        if self._user:
            rows = [([*self._labels, name], value) for name, value in self._user.items()]
            yield _gauge(names.USER_METRIC, [*identity, names.LABEL_NAME], rows)
        links = [link for look in self._links for link in look()]
        tables = (*self._tables.items(), (names.PREFLIGHT_PROBLEM, self._preflight), *_link_tables(links))
        for name, table in tables:
            if not table.rows:
                continue
            yield _gauge(
                name, [*identity, *table.labels], [([*self._labels, *row], value) for row, value in table.rows]
            )
        yield from self._shape_families([*identity, *names.SHAPE_LABELS])

    def _shape_families(self, labels: list[str]) -> Iterator[Metric]:
        shapes = [([*self._labels, str(s), str(m)], counters) for (s, m), counters in self._shapes.items()]
        yield _counter(names.STEPS, labels, [(row, c.steps) for row, c in shapes])
        yield _counter(names.SAMPLES, labels, [(row, c.samples) for row, c in shapes])
        phased = [*labels, names.LABEL_PHASE]
        seconds = [([*row, phase], value) for row, c in shapes for phase, value in c.phase_s.items()]
        squared = [([*row, phase], value) for row, c in shapes for phase, value in c.phase_squared_s2.items()]
        yield _counter(names.PHASE_SECONDS, phased, seconds)
        yield _counter(names.PHASE_SECONDS_SQUARED, phased, squared)
        yield _counter(names.FIRST_BUCKET_FRACTION, labels, [(row, c.first_bucket) for row, c in shapes])
        yield _counter(
            names.FIRST_BUCKET_FRACTION_SQUARED, labels, [(row, c.first_bucket_squared) for row, c in shapes]
        )
        peaks = [(row, float(c.peak_memory_bytes)) for row, c in shapes if c.peak_memory_bytes is not None]
        if peaks:
            yield _gauge(names.PEAK_MEMORY, labels, peaks)


def _link_tables(links: Sequence[Link]) -> list[tuple[str, GaugeTable]]:
    """Return the gauges of links, each with the values that are known."""
    shown = links[: names.MOST_LINKS]
    bandwidth = tuple(((pool,), value) for pool, value, _ in shown if value is not None)
    latency = tuple(((pool,), value) for pool, _, value in shown if value is not None)
    labels = (names.LABEL_PEER_POOL,)
    return [(names.LINK_BANDWIDTH, GaugeTable(labels=labels, rows=bandwidth)),
            (names.LINK_LATENCY, GaugeTable(labels=labels, rows=latency))]  # fmt: skip


def _printable(message: str) -> str:
    one_line = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    return one_line if len(one_line) <= names.MOST_MESSAGE else f"{one_line[: names.MOST_MESSAGE - 1]}…"


def _counter(name: str, labels: list[str], rows: list[tuple[list[str], float]]) -> Metric:
    family = CounterMetricFamily(name.removesuffix("_total"), name, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _gauge(name: str, labels: list[str], rows: list[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, name, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
