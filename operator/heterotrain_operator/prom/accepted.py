"""The series that the operator accepts: of the job's own workers, with valid labels and plausible values. Pure.

Pods export their own labels and values, and other pods may export series with this job's uid. One odd series costs
itself only: it is dropped, counted and named to the user.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from heterotrain_core.contract import metrics
from heterotrain_core.contract.outcome import LATEST_S
from heterotrain_planner.perf.counters import LONGEST_STEP_S, MOST_SAMPLES

from heterotrain_operator.api.text import quoted
from heterotrain_operator.api.types import MAX_NUM_PROC_PER_WORKER
from heterotrain_operator.cluster_state.telemetry import MemberId

_COUNT = (0.0, 2.0**53 - 1)
_SECONDS = (0.0, 1e9)
MOST_BYTES = 2.0**50
"""Bytes of anything: a pebibyte."""
_BYTES = (0.0, MOST_BYTES)
_ANY = (-1e38, 1e38)

LEAST_BYTES_PER_S, MOST_BYTES_PER_S, MOST_LATENCY_S = 1e3, 1e13, 60.0
"""Of a link: from a slow modem to hundred times the fastest network."""
MOST_STATE_RATIO = 100.0
"""Of no optimizer."""
MOST_UPDATE_S_PER_BYTE = 1e-6
"""Of no optimizer: Adam takes about 2e-9 on 0.3 of a processor."""
PLAUSIBLE: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        metrics.STEPS: _COUNT,
        metrics.PHASE_SECONDS: _SECONDS,
        metrics.PHASE_SECONDS_SQUARED: (0.0, _SECONDS[1] * LONGEST_STEP_S),
        metrics.FIRST_BUCKET_FRACTION: _COUNT,
        metrics.FIRST_BUCKET_FRACTION_SQUARED: _COUNT,
        metrics.BUCKET_STEPS: _COUNT,
        metrics.OVERLAPPED_SECONDS: _SECONDS,
        metrics.LAST_BUCKET_SECONDS: _SECONDS,
        metrics.PLAN_GENERATION: _COUNT,
        metrics.PLAN_REVISION: _COUNT,
        metrics.EPOCH: _COUNT,
        metrics.STEP: _COUNT,
        metrics.SAMPLES_COMMITTED: _COUNT,
        metrics.EPOCH_SAMPLES: _COUNT,
        metrics.CURSOR: _COUNT,
        metrics.EPOCH_STEP: _COUNT,
        metrics.GLOBAL_BATCH: (0.0, MOST_SAMPLES),
        metrics.NOISE_SCALE: _ANY,
        metrics.LOSS: _ANY,
        metrics.CHECKPOINT_STEP: _COUNT,
        metrics.RESUMED_STEP: _COUNT,
        metrics.CHECKPOINT_TIME: (0.0, LATEST_S),
        metrics.CHECKPOINT_FAILURES: _COUNT,
        metrics.NON_FINITE_STEPS: _COUNT,
        metrics.DIVERGENCES: _COUNT,
        metrics.NON_FINITE_STEP: _COUNT,
        metrics.LAST_FINITE_LOSS: _ANY,
        metrics.WAITING_SECONDS: _SECONDS,
        metrics.PLAN_SCHEMA: _COUNT,
        metrics.MICRO_BATCH_CAP: (1.0, MOST_SAMPLES),
        metrics.OUT_OF_MEMORY: _COUNT,
        metrics.CHECKPOINTED_UNITS: (0.0, 1.0),
        metrics.DEVICE_MEMORY: _BYTES,
        metrics.PEAK_MEMORY: _BYTES,
        metrics.UNITS: (1.0, metrics.MAX_PROFILED_UNITS),
        metrics.USABLE_MEMORY: _BYTES,
        metrics.STATE_RATIO: (1.0, MOST_STATE_RATIO),
        metrics.UPDATE_SECONDS_PER_BYTE: (0.0, MOST_UPDATE_S_PER_BYTE),
        metrics.CAN_SHARD: (0.0, 1.0),
        metrics.UNIT_PROFILE_COMPLETE: (0.0, 1.0),
        metrics.LINK_BANDWIDTH: (LEAST_BYTES_PER_S, MOST_BYTES_PER_S),
        metrics.LINK_LATENCY: (0.0, MOST_LATENCY_S),
        metrics.PAUSE_SECONDS: _SECONDS,
        metrics.MEMBERSHIP_CHANGES: _COUNT,
        metrics.PREFLIGHT_PASSED: _COUNT,
        metrics.PREFLIGHT_PROBLEM: (metrics.PREFLIGHT_WARNING, metrics.PREFLIGHT_FAILURE),
        metrics.USER_METRIC: _ANY,
    }
)
"""The series that are read: lowest and highest plausible value of each."""

_CAUSES = (metrics.CAUSE_JOIN, metrics.CAUSE_LEAVE, metrics.CAUSE_LOSS)
LABEL_POD = "pod"
LABEL_NAMESPACE = "namespace"
_MAX_LABEL_LENGTH = 253
_MAX_DIGITS = 10
_MAX_SENTENCE = 200


class Reason(StrEnum):
    """Why a series is dropped, as a part of a sentence."""

    FOREIGN = "of other workers"
    LABEL = "with invalid labels"
    VALUE = "with implausible values"
    DUPLICATE = "duplicates"


class BadSeries(NamedTuple):
    """A series that is not accepted; ``example`` is the offending label or value."""

    reason: Reason
    example: str


class Dropped:
    """Counts the series of one read that were dropped."""

    def __init__(self) -> None:
        self._counts: Counter[Reason] = Counter()
        self._example = ""

    def add(self, refusal: BadSeries) -> None:
        """Count a series; the example that sorts first is kept, whatever the order of the series."""
        self._counts[refusal.reason] += 1
        example = quoted(refusal.example)
        self._example = min(self._example, example) if self._example else example

    @property
    def sentence(self) -> str:
        """What was dropped, in at most 200 characters; empty when nothing was."""
        if not self._counts:
            return ""
        kinds = ", ".join(f"{self._counts[reason]} {reason}" for reason in Reason if self._counts[reason])
        return f"series were dropped: {kinds}; e.g. {self._example}"[:_MAX_SENTENCE]


class SeriesRow(NamedTuple):
    """What an accepted series is; labels that it does not have are ``None`` or empty."""

    member: MemberId
    name: str
    share: int | None
    micro: int | None
    phase: str
    cause: str
    user_metric: str
    check: str
    message: str
    peer_pool: str
    worker: str


def accepted_rows(
    rows: Iterable[tuple[int, Mapping[str, str]]],
    *,
    workers: Mapping[str, str] | None,
    dropped: Dropped,
    namespace: str = "",
) -> dict[int, SeriesRow]:
    """Return the accepted series by number, one of each identity.

    Of duplicates, a series whose target is the worker's own pod is preferred, then the one whose labels sort first.
    So the order of an answer does not matter.

    Args:
        rows: the number and the labels of each series.
        workers: names of the job's own pods by uid; ``None`` accepts any worker.
        dropped: counts the other series.
        namespace: of the job's pods; empty accepts any namespace.
    """
    kept: dict[tuple[object, ...], tuple[int, SeriesRow, Mapping[str, str]]] = {}
    for place, labels in rows:
        row = _parse(labels, workers, namespace)
        if isinstance(row, BadSeries):
            dropped.add(row)
            continue
        identity = row[:-1]
        known = kept.setdefault(identity, (place, row, labels))
        if known[0] != place:
            dropped.add(BadSeries(Reason.DUPLICATE, row.name))
            if _preference(labels, row, workers) < _preference(known[2], known[1], workers):
                kept[identity] = (place, row, labels)
    return {place: row for place, row, _ in kept.values()}


def member_of(
    labels: Mapping[str, str], workers: Mapping[str, str] | None, namespace: str = ""
) -> MemberId | BadSeries:
    """Return the member of a series; for the arguments, see ``accepted_rows``."""
    uid, rank = labels.get(metrics.LABEL_WORKER_UID, ""), labels.get(metrics.LABEL_LOCAL_RANK, "")
    if not 0 < len(uid) <= _MAX_LABEL_LENGTH:
        return BadSeries(Reason.LABEL, f"{metrics.LABEL_WORKER_UID}={uid}")
    if workers is not None and uid not in workers:
        return BadSeries(Reason.FOREIGN, f"{metrics.LABEL_WORKER_UID}={uid}")
    # Any pod may export another pod's uid. Prometheus itself sets these two labels where it discovers pods.
    for label, own in ((LABEL_POD, workers[uid] if workers is not None else ""), (LABEL_NAMESPACE, namespace)):
        if own and labels.get(label, own) != own:
            return BadSeries(Reason.FOREIGN, f"{label}={labels[label]}")
    local_rank = number(rank, MAX_NUM_PROC_PER_WORKER - 1)
    if local_rank is None:
        return BadSeries(Reason.LABEL, f"{metrics.LABEL_LOCAL_RANK}={rank}")
    return MemberId(sys.intern(uid), local_rank)  # each series, and each answer, has it again


def _parse(labels: Mapping[str, str], workers: Mapping[str, str] | None, namespace: str) -> SeriesRow | BadSeries:
    member, name = member_of(labels, workers, namespace), labels.get("__name__", "")
    if isinstance(member, BadSeries):
        return member
    numbers: dict[str, int | None] = {}
    for label in metrics.SHAPE_LABELS:
        numbers[label] = number(labels[label], MOST_SAMPLES) if label in labels else None
        if label in labels and numbers[label] is None:
            return BadSeries(Reason.LABEL, f"{label}={labels[label]}")
    phase, cause = labels.get(metrics.LABEL_PHASE, ""), labels.get(metrics.LABEL_CAUSE, "")
    worker, user = labels.get(metrics.LABEL_WORKER, ""), labels.get(metrics.LABEL_NAME, "")
    is_problem, is_users = name == metrics.PREFLIGHT_PROBLEM, name == metrics.USER_METRIC
    is_link = name in (metrics.LINK_BANDWIDTH, metrics.LINK_LATENCY)
    peer = labels.get(metrics.LABEL_PEER_POOL, "") if is_link else ""
    check = labels.get(metrics.LABEL_CHECK, "") if is_problem else ""
    message = labels.get(metrics.LABEL_MESSAGE, "") if is_problem else ""
    for label, valid in (
        ("__name__", name in PLAUSIBLE),
        (metrics.LABEL_PHASE, not phase or phase in metrics.PHASES),
        (metrics.LABEL_CAUSE, not cause or cause in _CAUSES),
        (metrics.LABEL_WORKER, len(worker) <= _MAX_LABEL_LENGTH),
        (metrics.LABEL_NAME, len(user) <= _MAX_LABEL_LENGTH),
        (metrics.LABEL_CHECK, len(check) <= metrics.MOST_CHECK and check.isprintable() and bool(check) == is_problem),
        (metrics.LABEL_PEER_POOL, len(peer) <= _MAX_LABEL_LENGTH and bool(peer) == is_link),
        (metrics.LABEL_MESSAGE, len(message) <= metrics.MOST_MESSAGE and message.isprintable()),
    ):
        if not valid:
            return BadSeries(Reason.LABEL, f"{label}={labels.get(label, '')}")
    share, micro = numbers[metrics.LABEL_SHARE], numbers[metrics.LABEL_MICRO_BATCH]
    user = user if is_users else ""
    return SeriesRow(member, name, share, micro, phase, cause, user, check, message, peer, worker)


def number(text: str, most: int) -> int | None:
    """Return the number in a label; ``None`` for another text or a number above ``most``."""
    if len(text) > _MAX_DIGITS or not (text.isascii() and text.isdecimal()):
        return None
    return int(text) if int(text) <= most else None


def _preference(labels: Mapping[str, str], row: SeriesRow, workers: Mapping[str, str] | None) -> tuple[bool, object]:
    """Return the sort key of duplicates."""
    name = (workers or {}).get(row.member.worker_uid, row.worker)
    return labels.get(LABEL_POD) != name, sorted(labels.items())
