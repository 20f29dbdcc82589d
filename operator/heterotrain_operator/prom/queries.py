"""PromQL queries for one job, and their answers parsed into counters and gauges. Pure.

The queries read raw sums instead of rates: ``rate()`` needs two samples of a series, and a share in use for a few
steps may have only one. Unreadable rows (an invalid label, an implausible value) are left out, never guessed.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from heterotrain_core.contract import metrics
from heterotrain_core.contract.outcome import LATEST_S
from heterotrain_core.perf.counters import CounterKey, Counters, PhaseSums

from heterotrain_operator.api.text import quoted
from heterotrain_operator.cluster_state.links import MeasuredLink
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, PreflightProblem
from heterotrain_operator.prom.accepted import (
    PLAUSIBLE,
    Dropped,
    Reason,
    Refusal,
    accepted_rows,
    scrape_time,
)
from heterotrain_operator.prom.errors import PromBadAnswer

MAX_SERIES = 50_000
"""Series of one answer, for each job: all of 160 ranks with 16 shapes, or of 500 ranks with 4."""
_ROWS = '"result":['
_TIME = "time_of"
_LONGEST_HEAD = 200
"""Characters within which the rows of an answer begin."""
MAX_SHAPES = 4 * metrics.MAX_LIVE_SHAPES
"""Shapes of one member: its own limit, with a margin for shapes that Prometheus still has."""


class Series(NamedTuple):
    """One row of an instant vector."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All current series of one job in Prometheus; ``dropped`` names the series that were not accepted."""

    counters: Mapping[CounterKey, Counters]
    gauges: Mapping[MemberId, MemberGauges]
    dropped: str = ""


def everything_of(job_uid: str) -> str:
    """Return the query for all series of a job that the operator reads."""
    return f'{{__name__=~"{"|".join(PLAUSIBLE)}",{metrics.LABEL_JOB_UID}="{job_uid}"}}'


def series_and_times_of(job_uid: str) -> str:
    """Return the query for all series of a job and the time of each member's newest scrape; see ``without_times``.

    ``or`` leaves out rows on the right with the labels of a row on the left, names of metrics aside, so the times need
    a label that no series has.
    """
    times = f'timestamp({metrics.READY}{{{metrics.LABEL_JOB_UID}="{job_uid}"}})'
    return f'{everything_of(job_uid)} or label_replace({times}, "{_TIME}", "scrape", "", "")'


def without_times(rows: Iterable[Series]) -> tuple[list[Series], list[Series]]:
    """Return the series of an answer to ``series_and_times_of``, and the times of scrapes: only those have no name."""
    series: list[Series] = []
    times: list[Series] = []
    for row in rows:
        (series if "__name__" in row.labels else times).append(row)
    return series, times


def scrapes_of(job_uids: Iterable[str]) -> str:
    """Return the query for a number of each job that changes with each scrape: one row for each, whoever exports it."""
    uids = "|".join(sorted(job_uids))
    scraped = f'timestamp({metrics.READY}{{{metrics.LABEL_JOB_UID}=~"{uids}"}})'
    return f"sum by ({metrics.LABEL_JOB_UID}) ({scraped})"


def parse_scrapes(rows: Iterable[Series]) -> dict[str, float]:
    """Return that number by the job's uid."""
    return {labels.get(metrics.LABEL_JOB_UID, ""): value for labels, value in rows}


def parse_vector(answer: Any) -> tuple[Series, ...]:
    """Return the rows of an instant vector; rows without a finite value are left out.

    Raises:
        PromBadAnswer: this is not an answer to an instant query.
    """
    if not isinstance(answer, Mapping) or answer.get("status") != "success":
        error = answer.get("error") if isinstance(answer, Mapping) else None
        problem = quoted(str(error)) if error else "its answer is not an answer to a query"
        raise PromBadAnswer(f"Prometheus reports an error: {problem}")
    try:
        kind, result = answer["data"]["resultType"], answer["data"]["result"]
        if kind != "vector":
            raise PromBadAnswer(f"Prometheus answers with a {quoted(str(kind))} instead of a vector")
        if len(result) > MAX_SERIES:
            raise PromBadAnswer(f"Prometheus has {len(result)} series of this job; the operator reads {MAX_SERIES}")
        rows = [Series(_labels(r["metric"]), float(r["value"][1])) for r in result]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PromBadAnswer(f"the answer of Prometheus can't be read: {quoted(repr(error))}") from error
    return tuple(row for row in rows if math.isfinite(row.value))


def _labels(given: Mapping[Any, Any]) -> dict[str, str]:
    """Return the labels of a row; equal texts are the same object, because each answer has most of them again."""
    return {sys.intern(str(name)): sys.intern(str(value)) for name, value in given.items()}


def parse_answer(body: bytes) -> tuple[Series, ...]:
    """Return the rows of an answer as bytes; see ``parse_vector``.

    Rows are decoded one by one: one call for a large answer would hold the interpreter's lock, and all other jobs.

    Raises:
        ValueError: this is not JSON.
        PromBadAnswer: this is not an answer to an instant query.
    """
    text = body.decode(errors="replace")
    start = text.find(_ROWS, 0, _LONGEST_HEAD)
    if start < 0:
        return parse_vector(_decoded(text))
    start += len(_ROWS)
    rows: list[Any] = []
    decode, place = json.JSONDecoder().raw_decode, start
    try:
        while text[place] != "]":
            row, place = decode(text, place)
            rows.append(row)
            place += text[place] == ","
    except (ValueError, IndexError, RecursionError):
        return parse_vector(_decoded(text))  # spaces between rows, or no JSON
    answer = _decoded(text[:start] + text[place:])
    if isinstance(answer, dict) and isinstance(answer.get("data"), dict):
        answer["data"]["result"] = rows
    return parse_vector(answer)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too many nested lists") from error


def parse_scrape_times(
    rows: Iterable[Series],
    *,
    workers: Mapping[str, str] | None = None,
    namespace: str = "",
    latest_s: float = LATEST_S,
    dropped: Dropped | None = None,
) -> dict[MemberId, float]:
    """Return the time of each member's newest scrape, in seconds since the epoch.

    Args:
        rows: the answer.
        workers: as in ``accepted_rows``.
        namespace: as in ``accepted_rows``.
        latest_s: later times are dropped.
        dropped: counts the series that are not accepted.
    """
    times: dict[MemberId, float] = {}
    for labels, value in rows:
        found = scrape_time(labels, value, workers=workers, latest_s=latest_s, namespace=namespace)
        if isinstance(found, Refusal):
            if dropped is not None:
                dropped.add(found)
            continue
        member, time_s = found
        times[member] = max(time_s, times.get(member, 0.0))
    return times


def parse_everything(
    rows: Iterable[Series],
    *,
    workers: Mapping[str, str] | None = None,
    namespace: str = "",
    dropped: Dropped | None = None,
) -> Snapshot:
    """Return counters by member and shape, and gauges by member; for the arguments, see ``accepted_rows``."""
    dropped = dropped or Dropped()
    by_member: dict[MemberId, dict[str, float]] = {}
    user: dict[MemberId, dict[str, float]] = {}
    peaks: dict[MemberId, dict[int, float]] = {}
    problems: dict[MemberId, list[PreflightProblem]] = {}
    links: dict[MemberId, dict[tuple[str, str], float]] = {}
    names: dict[MemberId, str] = {}
    shapes: dict[CounterKey, _Shape] = {}
    owners: dict[CounterKey, MemberId] = {}
    for row in accepted_rows(rows, workers=workers, dropped=dropped, namespace=namespace):
        member, name, value = row.member, row.name, row.value
        names[member] = row.worker
        if name == metrics.USER_METRIC:
            user.setdefault(member, {})[row.user_metric] = value
        elif name == metrics.PREFLIGHT_PROBLEM:
            found = PreflightProblem(value < metrics.PREFLIGHT_FAILURE, row.check, row.message)
            problems.setdefault(member, []).append(found)
        elif row.peer_pool:
            links.setdefault(member, {})[row.peer_pool, name] = value
        elif row.cause:
            by_member.setdefault(member, {})[name] = by_member.get(member, {}).get(name, 0.0) + value
        elif row.share is None or row.micro is None:
            by_member.setdefault(member, {})[name] = value
        elif name == metrics.PEAK_MEMORY:
            known = peaks.setdefault(member, {})
            known[row.micro] = max(value, known.get(row.micro, 0.0))
        else:
            key = CounterKey(member=counter_name(member), share_samples=row.share, micro_batch_samples=row.micro)
            owners[key] = member
            shapes.setdefault(key, _Shape({}, {}, {})).take(name, row.phase, value)
    _limit_shapes(shapes, owners, dropped)
    counters = {
        key: shape.counters(by_member.get(owners[key], {}))
        for key, shape in shapes.items()
        if metrics.STEPS in shape.plain
    }
    gauges = {
        member: replace(
            _gauges(name, by_member.get(member, {}), user.get(member, {}), peaks.get(member, {})),
            preflight_problems=tuple(sorted(problems.get(member, ()))[: metrics.MOST_PREFLIGHT_PROBLEMS]),
            links=_links(links.get(member, {})),
        )
        for member, name in names.items()
    }
    return Snapshot(counters=counters, gauges=gauges, dropped=dropped.sentence)


def _links(values: Mapping[tuple[str, str], float]) -> dict[str, MeasuredLink]:
    """Return a rank's links by the pool at their other end, those with a bandwidth; at most as many as it exports."""
    pools = sorted({pool for pool, name in values if name == metrics.LINK_BANDWIDTH})[: metrics.MOST_LINKS]
    return {
        pool: MeasuredLink(values[pool, metrics.LINK_BANDWIDTH], values.get((pool, metrics.LINK_LATENCY), 0.0))
        for pool in pools
    }


def counter_name(member: MemberId) -> str:
    """Return a member's name in counters and observations."""
    return sys.intern(f"{member.worker_uid}/{member.local_rank}")


class _Shape(NamedTuple):
    """Series of one member and shape."""

    plain: dict[str, float]
    seconds: dict[str, float]
    squares: dict[str, float]

    def take(self, name: str, phase: str, value: float) -> None:
        if name == metrics.PHASE_SECONDS:
            self.seconds[phase] = value
        elif name == metrics.PHASE_SECONDS_SQUARED:
            self.squares[phase] = value
        else:
            self.plain[name] = value

    def counters(self, of_member: Mapping[str, float]) -> Counters:
        return Counters(
            steps=self.plain[metrics.STEPS],
            phase_s=PhaseSums(self.seconds),
            phase_s2=PhaseSums(self.squares),
            first_bucket_fraction=self.plain.get(metrics.FIRST_BUCKET_FRACTION),
            first_bucket_fraction_squared=self.plain.get(metrics.FIRST_BUCKET_FRACTION_SQUARED),
            bucket_steps=of_member.get(metrics.BUCKET_STEPS),
            overlapped_s=of_member.get(metrics.OVERLAPPED_SECONDS),
            last_bucket_s=of_member.get(metrics.LAST_BUCKET_SECONDS),
        )


def _limit_shapes(shapes: dict[CounterKey, _Shape], owners: Mapping[CounterKey, MemberId], dropped: Dropped) -> None:
    """Drop the largest shapes of members that export too many: each is stored, and each is fitted."""
    number = Counter(owners[key] for key in shapes)
    for key in sorted(shapes, key=lambda key: (-key.share_samples, -key.micro_batch_samples)):
        if number[owners[key]] > MAX_SHAPES:
            number[owners[key]] -= 1
            del shapes[key]
            dropped.add(Refusal(Reason.LABEL, f"share={key.share_samples} of more than {MAX_SHAPES}"))


def _gauges(
    worker: str, values: Mapping[str, float], user: Mapping[str, float], peaks: Mapping[int, float]
) -> MemberGauges:
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
        checkpoint_time_s=values.get(metrics.CHECKPOINT_TIME),
        micro_batch_cap_samples=whole(metrics.MICRO_BATCH_CAP),
        out_of_memory=whole(metrics.OUT_OF_MEMORY) or 0,
        recomputes_activations=values.get(metrics.CHECKPOINTED_UNITS) == 1.0,
        device_memory_bytes=values.get(metrics.DEVICE_MEMORY),
        peak_memory_bytes=peaks,
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
        plan_schema=whole(metrics.PLAN_SCHEMA) or metrics.UNREPORTED_PLAN_SCHEMA,
        waiting_s=values.get(metrics.WAITING_SECONDS),
        pause_s=values.get(metrics.PAUSE_SECONDS, 0.0),
        pauses=whole(metrics.MEMBERSHIP_CHANGES) or 0,
        preflight_passed=whole(metrics.PREFLIGHT_PASSED),
        user_metrics=user,
    )
