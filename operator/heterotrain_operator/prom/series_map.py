"""Maps each series of an answer to what it measures. Pure.

A job exports the same series for minutes. So their labels are checked once, and each read after that only puts the new
values into their places.
"""

from __future__ import annotations

import copy
import math
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from heterotrain_core.contract import metrics
from heterotrain_core.contract.outcome import LATEST_S
from heterotrain_planner.perf.counters import CounterKey, Counters, PhaseSums

from heterotrain_operator.cluster_state.telemetry import MemberId, PreflightProblem
from heterotrain_operator.prom.accepted import (
    PLAUSIBLE,
    BadSeries,
    Dropped,
    Reason,
    SeriesRow,
    accepted_rows,
    member_of,
)
from heterotrain_operator.prom.snapshot import JobSeries, Special, counter_name, gauges_of
from heterotrain_operator.prom.vector import Vector, VectorSample

MAX_SHAPES = 4 * metrics.MAX_LIVE_SHAPES
"""Shapes of one member: its own limit, with a margin for shapes that Prometheus still has."""
MOST_ALIKE = 64
"""Series of one name and one member that differ in other labels, such as the script's own metrics: those that sort
first. The status shows fewer."""
_PHASED = (metrics.PHASE_SECONDS, metrics.PHASE_SECONDS_SQUARED)
_OF_MEMBER = tuple((name, "") for name in PLAUSIBLE)
"""Name and phase of each value that a member may have."""
_OF_SHAPE = (
    (metrics.STEPS, ""),
    (metrics.FIRST_BUCKET_FRACTION, ""),
    (metrics.FIRST_BUCKET_FRACTION_SQUARED, ""),
    *((name, phase) for name in _PHASED for phase in metrics.PHASES),
)
"""The same of a shape."""
_FIELD_OF_MEMBER = {field: number for number, field in enumerate(_OF_MEMBER)}
_FIELD_OF_SHAPE = {field: number for number, field in enumerate(_OF_SHAPE)}
_STEPS, _FRACTION, _FRACTION_SQUARED, _SECONDS = range(4)
_SQUARES = _SECONDS + len(metrics.PHASES)
_BOUNDS_OF_MEMBER = tuple((name, *PLAUSIBLE[name]) for name, _ in _OF_MEMBER)
_BOUNDS_OF_SHAPE = tuple((name, *PLAUSIBLE[name]) for name, _ in _OF_SHAPE)
_SPECIAL = (metrics.USER_METRIC, metrics.PREFLIGHT_PROBLEM, metrics.LINK_BANDWIDTH, metrics.LINK_LATENCY)
_NOWHERE = -1


class _Shape(NamedTuple):
    """A shape of one member's steps."""

    member: MemberId
    samples: int
    micro: int

    @property
    def key(self) -> CounterKey:
        name = counter_name(self.member)
        return CounterKey(member=name, share_samples=self.samples, micro_batch_samples=self.micro)


class SeriesMap:
    """Where the value of each series of an answer goes.

    Args:
        rows: the labels of each series. Those without a name are the times of scrapes.
        workers: names of the job's own pods by uid; ``None`` accepts any worker.
        namespace: of the job's pods; empty accepts any namespace.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, str]], *, workers: Mapping[str, str] | None, namespace: str = ""
    ) -> None:
        self._dropped = Dropped()
        named = ((number, labels) for number, labels in enumerate(rows) if labels.get("__name__"))
        accepted = accepted_rows(named, workers=workers, dropped=self._dropped, namespace=namespace)
        special = {number: row for number, row in accepted.items() if _is_special(row)}
        self._special = _first_alike(special, self._dropped)
        fields = {n: _field_of(row, self._dropped) for n, row in accepted.items() if n not in special}
        shapes = (
            _shape_of(accepted[n]) for n, field in fields.items() if field is not None and _has_shape(accepted[n])
        )
        kept = _without_largest(shapes, self._dropped)
        names = {row.member: sys.intern(row.worker) for row in accepted.values()}
        self._members, self._names = tuple(names), tuple(names.values())
        self._shapes = tuple(shape.key for shape in kept)
        self._first_of_shapes = len(names) * len(_OF_MEMBER)
        firsts: dict[MemberId | _Shape, int] = {member: i * len(_OF_MEMBER) for i, member in enumerate(names)}
        self._member_of_shape = array("i", [firsts[shape.member] // len(_OF_MEMBER) for shape in kept])
        firsts |= {shape: self._first_of_shapes + i * len(_OF_SHAPE) for i, shape in enumerate(kept)}
        self._places = array("i", [_NOWHERE]) * len(rows)
        """Of each series: each member has ``_OF_MEMBER`` places, and after them each shape has ``_OF_SHAPE``."""
        for number, field in fields.items():
            row = accepted[number]
            first = firsts.get(_shape_of(row) if _has_shape(row) else row.member)
            if field is not None and first is not None:
                self._places[number] = first + field
        scraped = ((number, labels) for number, labels in enumerate(rows) if not labels.get("__name__"))
        self._times = tuple(self._accepted_times(scraped, workers, namespace))

    def _accepted_times(
        self, rows: Iterable[tuple[int, Mapping[str, str]]], workers: Mapping[str, str] | None, namespace: str
    ) -> Iterator[tuple[int, MemberId]]:
        for number, labels in rows:
            member = member_of(labels, workers, namespace)
            if isinstance(member, BadSeries):
                self._dropped.add(member)
            else:
                yield number, member

    def snapshot(self, values: Sequence[float], *, latest_s: float = LATEST_S) -> JobSeries:
        """Return what an answer with these series says; a value that is not finite is left out.

        Args:
            values: of each series.
            latest_s: later times of scrapes are dropped, in seconds since the epoch.
        """
        dropped = copy.deepcopy(self._dropped)
        first_of_shapes = self._first_of_shapes
        table: list[float | None] = [None] * (first_of_shapes + len(self._shapes) * len(_OF_SHAPE))
        for place, value in zip(self._places, values, strict=True):
            if place == _NOWHERE:
                continue
            if place < first_of_shapes:
                name, low, high = _BOUNDS_OF_MEMBER[place % len(_OF_MEMBER)]
            else:
                name, low, high = _BOUNDS_OF_SHAPE[(place - first_of_shapes) % len(_OF_SHAPE)]
            if low <= value <= high:
                before = table[place]  # pauses have a series for each cause
                table[place] = value if before is None else before + value
            else:
                _note(name, value, dropped)
        special = self._special_values(values, dropped)
        plain = [_values_of_member(cells) for cells in _cut(table, 0, first_of_shapes, len(_OF_MEMBER))]
        of_shapes = _cut(table, first_of_shapes, len(table), len(_OF_SHAPE))
        shapes = zip(self._shapes, of_shapes, self._member_of_shape, strict=True)
        return JobSeries(
            counters={
                key: _counters(steps, cells, plain[member])
                for key, cells, member in shapes
                if (steps := cells[_STEPS]) is not None
            },
            gauges={
                member: gauges_of(name, found, special.get(member, Special()))
                for member, name, found in zip(self._members, self._names, plain, strict=True)
            },
            times=self._scraped(values, latest_s, dropped),
            dropped=dropped.sentence,
        )

    def _special_values(self, values: Sequence[float], dropped: Dropped) -> dict[MemberId, Special]:
        found: dict[MemberId, Special] = {}
        for number, row in self._special:
            value, of = values[number], found.setdefault(row.member, Special())
            low, high = PLAUSIBLE[row.name]
            if not low <= value <= high:
                _note(row.name, value, dropped)
            elif row.name == metrics.USER_METRIC:
                of.user[row.user_metric] = value
            elif row.name == metrics.PREFLIGHT_PROBLEM:
                of.problems.append(PreflightProblem(value < metrics.PREFLIGHT_FAILURE, row.check, row.message))
            elif row.name == metrics.PEAK_MEMORY and row.micro is not None:
                of.peaks[row.micro] = max(value, of.peaks.get(row.micro, 0.0))
            else:
                of.links[row.peer_pool, row.name] = value
        return found

    def _scraped(self, values: Sequence[float], latest_s: float, dropped: Dropped) -> dict[MemberId, float]:
        times: dict[MemberId, float] = {}
        for number, member in self._times:
            if 0 <= (time_s := values[number]) <= latest_s:
                times[member] = max(time_s, times.get(member, 0.0))
            else:
                _note("timestamp", time_s, dropped)
        return times


class JobReader:
    """Reads the answers about one job, and keeps the map of its series while they stay the same."""

    def __init__(self) -> None:
        self._known: tuple[object, ...] = ()
        self._map = SeriesMap((), workers=None)

    def read(self, answer: Vector, *, workers: Mapping[str, str], namespace: str, latest_s: float) -> JobSeries:
        """Return what an answer to ``series_and_times_of`` says.

        Args:
            answer: the answer.
            workers: as in ``SeriesMap``.
            namespace: as in ``SeriesMap``.
            latest_s: as in ``SeriesMap.snapshot``.

        Raises:
            PromBadAnswer: the answer cannot be decoded.
        """
        series = (answer.digest(), tuple(sorted(workers.items())), namespace)
        if series != self._known:
            self._map = SeriesMap(answer.labels(), workers=workers, namespace=namespace)
            self._known = series
        return self._map.snapshot(answer.values, latest_s=latest_s)


def parse_everything(
    rows: Iterable[VectorSample], *, workers: Mapping[str, str] | None = None, namespace: str = ""
) -> JobSeries:
    """Return what these series say; for the arguments, see ``SeriesMap``."""
    found = tuple(rows)
    known = SeriesMap([row.labels for row in found], workers=workers, namespace=namespace)
    return known.snapshot([row.value for row in found])


def _is_special(row: SeriesRow) -> bool:
    return row.name in _SPECIAL or (row.name == metrics.PEAK_MEMORY and row.micro is not None)


def _first_alike(special: Mapping[int, SeriesRow], dropped: Dropped) -> tuple[tuple[int, SeriesRow], ...]:
    """Return these series without those beyond ``MOST_ALIKE``: each is kept from read to read."""
    kept, number = [], Counter[tuple[MemberId, str]]()
    for place, row in sorted(special.items(), key=lambda item: (item[1].micro or 0, item[1][6:])):
        number[row.member, row.name] += 1
        if number[row.member, row.name] <= MOST_ALIKE:
            kept.append((place, row))
        else:
            dropped.add(BadSeries(Reason.LABEL, f"{row.name}, more than {MOST_ALIKE} of one rank"))
    return tuple(kept)


def _has_shape(row: SeriesRow) -> bool:
    return row.share is not None and row.micro is not None


def _field_of(row: SeriesRow, dropped: Dropped) -> int | None:
    """Return which value of a member or a shape a series is; ``None`` for one with labels that it should not have."""
    field = (_FIELD_OF_SHAPE if _has_shape(row) else _FIELD_OF_MEMBER).get((row.name, row.phase))
    if field is None:
        dropped.add(BadSeries(Reason.LABEL, f"{row.name} with share={row.share} and phase={row.phase}"))
    return field


def _shape_of(row: SeriesRow) -> _Shape:
    """Return the shape that a series with the labels of one belongs to."""
    return _Shape(row.member, row.share or 0, row.micro or 0)


def _without_largest(shapes: Iterable[_Shape], dropped: Dropped) -> Sequence[_Shape]:
    """Return the shapes without the largest of members that export too many: each is stored, and each is fitted."""
    kept = dict.fromkeys(shapes)
    number = Counter(shape.member for shape in kept)
    for shape in sorted(kept, key=lambda shape: (-shape.samples, -shape.micro)):
        if number[shape.member] > MAX_SHAPES:
            number[shape.member] -= 1
            del kept[shape]
            dropped.add(BadSeries(Reason.LABEL, f"share={shape.samples} of more than {MAX_SHAPES}"))
    return tuple(kept)


def _note(name: str, value: float, dropped: Dropped) -> None:
    """Count an implausible value; one that is not finite is a missing one."""
    if math.isfinite(value):
        dropped.add(BadSeries(Reason.VALUE, f"{name}={value:.15g}"))


def _cut(table: Sequence[float | None], first: int, end: int, width: int) -> Iterator[Sequence[float | None]]:
    return (table[start : start + width] for start in range(first, end, width))


def _values_of_member(cells: Sequence[float | None]) -> dict[str, float]:
    return {name: value for name, value in zip(PLAUSIBLE, cells, strict=True) if value is not None}


def _counters(steps: float, cells: Sequence[float | None], of_member: Mapping[str, float]) -> Counters:
    return Counters(
        steps=steps,
        phase_s=_phase_sums(cells[_SECONDS:_SQUARES]),
        phase_s2=_phase_sums(cells[_SQUARES:]),
        first_bucket_fraction=cells[_FRACTION],
        first_bucket_fraction_squared=cells[_FRACTION_SQUARED],
        bucket_steps=of_member.get(metrics.BUCKET_STEPS),
        overlapped_s=of_member.get(metrics.OVERLAPPED_SECONDS),
        last_bucket_s=of_member.get(metrics.LAST_BUCKET_SECONDS),
    )


def _phase_sums(cells: Sequence[float | None]) -> PhaseSums:
    return PhaseSums({phase: value for phase, value in zip(metrics.PHASES, cells, strict=True) if value is not None})
