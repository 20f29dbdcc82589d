"""Hostile and careless telemetry: odd labels, other jobs' pods, duplicates, wild values and late replicas."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.api.types import MAX_NUM_PROC_PER_WORKER
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.decide.job import decide
from heterotrain_operator.prom import history, queries, series_map, vector
from heterotrain_operator.prom.accepted import PLAUSIBLE
from heterotrain_operator.prom.errors import PromBadAnswer
from heterotrain_operator.prom.history import FORGET_S, TelemetryHistory
from heterotrain_operator.prom.series_map import JobReader, SeriesMap, parse_everything
from heterotrain_operator.prom.snapshot import JobSeries
from heterotrain_operator.prom.vector import VectorSample, parse_vector
from support.fake_cluster import NOW_S, FakeCluster, a_running_job
from support.repeat import first_seed, times

ME = MemberId("uid-a", 0)
WORKERS = {"uid-a": "job-w0"}
POOLS = {"uid-a": "a"}
LONG = "9" * 5000
SHAPE = {"share": "40", "micro_batch": "20"}


def row(series: str, value: float, /, **labels: str) -> VectorSample:
    identity = {"__name__": series, "job_uid": "job-uid", "worker": "job-w0", "worker_uid": "uid-a", "local_rank": "0"}
    return VectorSample({**identity, **labels}, value)


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("local_rank", LONG),
        ("local_rank", str(MAX_NUM_PROC_PER_WORKER)),
        ("local_rank", "٣"),
        ("share", LONG),
        ("share", str(2**40)),
        ("micro_batch", "-1"),
        ("phase", "lunch"),
        ("cause", "x" * 1000),
        ("worker", "x" * 1000),
        ("worker_uid", ""),
    ],
)
def test_a_series_with_an_invalid_label_is_dropped_and_named(label: str, text: str) -> None:
    labels = {**SHAPE, label: text}
    found = parse_everything([row(metrics.STEPS, 3.0, **SHAPE), row(metrics.PHASE_SECONDS, 1.0, **labels)])
    assert [counters.phase_s for counters in found.counters.values()] == [{}]
    assert found.dropped.startswith(f"series were dropped: 1 with invalid labels; e.g. {label}={text[:20]}")
    assert len(found.dropped) <= 120
    times = parse_everything([row("", 1.0, local_rank=LONG)])
    assert (dict(times.times), bool(times.dropped)) == ({}, True)


def test_series_of_other_workers_are_dropped() -> None:
    rows = [
        row(metrics.STEP, 7.0),
        row(metrics.STEP, 1e12, worker_uid="uid-b"),
        row(metrics.STEP, 1e12, worker_uid="b"),
    ]
    found = parse_everything(rows, workers=WORKERS)
    assert {member: gauges.step for member, gauges in found.gauges.items()} == {ME: 7}
    assert found.dropped == "series were dropped: 2 of other workers; e.g. worker_uid=b"
    assert parse_everything([row("", 5.0), row("", 6.0, worker_uid="uid-b")], workers=WORKERS).times == {ME: 5.0}


@pytest.mark.parametrize(
    ("series", "value"),
    [
        (metrics.STEP, -1.0),
        (metrics.STEPS, 2.0**53),
        (metrics.SAMPLES_COMMITTED, 1.7e308),
        (metrics.CHECKPOINT_TIME, 1e18),
        (metrics.MICRO_BATCH_CAP, 0.1),
        (metrics.PHASE_SECONDS, 1e10),
        (metrics.PEAK_MEMORY, 1e18),
        (metrics.USER_METRIC, 1e300),
        ("heterotrain_unknown", 1.0),
    ],
)
def test_an_implausible_value_is_dropped_and_named(series: str, value: float) -> None:
    found = parse_everything([row(metrics.EPOCH, 2.0), row(series, value)])
    (gauges,) = found.gauges.values()
    assert (gauges.epoch, gauges.step, gauges.checkpoint_time_s, gauges.micro_batch_cap_samples) == (
        2,
        None,
        None,
        None,
    )
    assert series in found.dropped


def test_every_series_that_is_read_has_finite_bounds() -> None:
    assert all(-1e38 <= low < high <= 1e38 for low, high in PLAUSIBLE.values())
    assert set(PLAUSIBLE) == set(queries.everything_of("u").split('"')[1].split("|"))


def test_one_of_duplicate_series_is_kept_in_any_order() -> None:
    """The worker's own pod is preferred; a stranger may choose the other labels to sort first."""
    rows = [
        row(metrics.STEP, 1.0, instance="10.0.0.1", pod="stranger"),
        row(metrics.STEP, 2.0, instance="10.0.0.2", pod="job-w0"),
        row(metrics.STEP, 3.0, instance="10.0.0.3", pod="job-w0"),
    ]
    rows[0] = row(metrics.STEP, 1.0, instance="10.0.0.1")  # without the label of its target
    found = [parse_everything(order, workers=WORKERS) for order in (rows, rows[::-1], [rows[1], rows[0], rows[2]])]
    assert [each.gauges[ME].step for each in found] == [2, 2, 2]
    assert found[0].dropped == found[1].dropped == "series were dropped: 2 duplicates; e.g. heterotrain_step"


def test_the_newest_of_duplicate_scrape_times_counts() -> None:
    rows = [row("", 5.0, replica="a"), row("", 9.0, replica="b"), row("", 7.0, replica="c")]
    labels, values = [each.labels for each in rows], [each.value for each in rows]
    known = SeriesMap(labels, workers=WORKERS)
    assert known.snapshot(values).times == {ME: 9.0}
    assert known.snapshot(values, latest_s=8.0).times == {ME: 7.0}


def a_read(steps: float) -> JobSeries:
    """Return counters of this many steps of half a second each."""
    rows = [row(metrics.STEP, steps), row(metrics.STEPS, steps, **SHAPE)]
    rows += [row(metrics.PHASE_SECONDS, steps / 2, phase=phase, **SHAPE) for phase in metrics.PHASES]
    return parse_everything(rows)


def test_a_replica_that_is_a_scrape_behind_repeats_nothing() -> None:
    job = TelemetryHistory()
    job.take(a_read(10), {ME: 100.0}, pools=POOLS)
    job.take(a_read(14), {ME: 105.0}, pools=POOLS)
    assert not job.take(a_read(10), {ME: 100.0}, pools=POOLS)
    assert job.telemetry.gauges[ME].step == 14
    job.take(a_read(16), {ME: 110.0}, pools=POOLS)
    assert [(found.steps, found.warm_up) for found in job.telemetry.observations[ME]] == [
        (10, True),
        (4, False),
        (2, False),
    ]


def test_gauges_of_a_replica_that_is_behind_are_not_taken_between_steps() -> None:
    """No counter has moved, so only the time of the scrape tells which of the gauges are the older ones."""
    job, newest = TelemetryHistory(), a_read(14)
    older = replace(newest, gauges={ME: replace(newest.gauges[ME], step=13)})
    job.take(newest, {ME: 105.0}, pools=POOLS)
    assert not job.take(older, {ME: 100.0}, pools=POOLS)
    assert job.telemetry.gauges[ME].step == 14


def test_counters_of_a_replica_that_is_behind_are_not_taken_with_the_time_of_another() -> None:
    """The time of the scrape and the counters are two queries, which may reach two replicas."""
    job = TelemetryHistory()
    job.take(a_read(10), {ME: 100.0}, pools=POOLS)
    job.take(a_read(14), {ME: 105.0}, pools=POOLS)
    job.take(a_read(12), {ME: 110.0}, pools=POOLS)
    assert job.telemetry.gauges[ME].step == 14
    job.take(a_read(19), {ME: 115.0}, pools=POOLS)
    assert [(found.steps, found.warm_up) for found in job.telemetry.observations[ME]] == [
        (10, True),
        (4, False),
        (5, False),
    ]
    for scrape in range(3):
        job.take(a_read(3 + scrape), {ME: 116.0 + FORGET_S + scrape}, pools=POOLS)
    assert job.telemetry.gauges[ME].step == 5, "not for ever"


def test_series_that_another_pod_exports_under_a_worker_s_uid_are_dropped() -> None:
    """Whether or not the worker exports them itself: Prometheus labels each series with the pod that it scraped."""
    own = {"namespace": "ns", "pod": "job-w0"}
    rows = [
        row(metrics.STEP, 7.0, **own),
        row(metrics.LOSS, 9.0, namespace="ns", pod="stranger"),
        row(metrics.MICRO_BATCH_CAP, 1.0, namespace="theirs", pod="job-w0"),
    ]
    found = parse_everything(rows, workers=WORKERS, namespace="ns")
    gauges = found.gauges[ME]
    assert (gauges.step, gauges.loss, gauges.micro_batch_cap_samples) == (7, None, None)
    assert found.dropped == "series were dropped: 2 of other workers; e.g. namespace=theirs"
    times = [row("", 5.0, **own), row("", 9.0, namespace="ns", pod="stranger")]
    assert parse_everything(times, workers=WORKERS, namespace="ns").times == {ME: 5.0}
    unlabelled = parse_everything([row(metrics.LOSS, 9.0)], workers=WORKERS, namespace="ns")
    assert unlabelled.gauges[ME].loss == 9.0, "a Prometheus that does not label targets"


def test_after_a_correction_of_the_clock_scrapes_are_taken_again() -> None:
    job = TelemetryHistory()
    job.take(a_read(10), {ME: 5000.0 + FORGET_S}, pools=POOLS)
    assert job.take(a_read(14), {ME: 4999.0}, pools=POOLS)
    assert job.telemetry.gauges[ME].step == 14


@pytest.mark.parametrize("step_s", [1e-300, 1e7])
def test_times_that_no_step_takes_are_not_observed(step_s: float) -> None:
    job = TelemetryHistory()
    phases = [row(metrics.PHASE_SECONDS, 10 * step_s, phase=phase, **SHAPE) for phase in metrics.PHASES]
    job.take(parse_everything([row(metrics.STEPS, 10.0, **SHAPE), *phases]), {ME: 100.0}, pools=POOLS)
    assert job.telemetry.observations == {}


def test_endless_new_shapes_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "KEPT_SHAPES", 100)
    job = TelemetryHistory()
    for scrape in range(4):
        shapes = [{"share": str(scrape * 1000 + i), "micro_batch": "1"} for i in range(300)]
        rows = [row(metrics.STEP, 1.0), *(row(metrics.STEPS, 1.0, **shape) for shape in shapes)]
        found = parse_everything(rows)
        assert len(found.counters) == series_map.MAX_SHAPES
        assert "236 with invalid labels; e.g. share=" in found.dropped
        job.take(found, {ME: 100.0 + scrape}, pools=POOLS)
    assert len(job._counters) == 100
    assert max(key.share_samples for key in job._counters) == 3_000 + series_map.MAX_SHAPES - 1


def test_too_many_series_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector, "MAX_SERIES", 3)
    with pytest.raises(PromBadAnswer, match="has 4 series of this job; the operator reads 3"):
        parse_vector(answer([row(metrics.STEP, 1.0)] * 4))
    assert len(parse_vector(answer([row(metrics.STEP, 1.0)] * 3)).values) == 3


@pytest.mark.parametrize(
    "result",
    [
        {"status": "error", "error": "x" * 10_000},
        {"status": "success", "data": {"resultType": "y" * 10_000, "result": []}},
        {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [0, 10**400]}]}},
        {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [0, "z" * 9999]}]}},
    ],
)
def test_foreign_text_in_a_problem_is_bounded(result: object) -> None:
    with pytest.raises(PromBadAnswer) as caught:
        parse_vector(result)
    assert len(str(caught.value)) <= 200


def test_the_condition_names_what_was_dropped() -> None:
    cluster = a_running_job()
    rows = [row(metrics.STEP, 1.0), *(row(metrics.STEP, 1.0, local_rank="\n\x1b" + LONG) for _ in range(3))]
    job = TelemetryHistory()
    job.take(parse_everything(rows), {ME: NOW_S}, pools=POOLS)
    cluster.telemetry = job.telemetry
    cluster.settle()
    assert cluster.condition("TelemetryAvailable") == ("True", "Fresh")
    message = cluster.message("TelemetryAvailable")
    assert message.startswith("series were dropped: 3 with invalid labels; e.g. local_rank=??999")
    assert len(message) <= 200
    job.take(parse_everything(rows[:1]), {ME: NOW_S}, pools=POOLS)
    cluster.telemetry = job.telemetry
    cluster.settle()
    assert cluster.message("TelemetryAvailable") == ""


def test_the_sentence_about_dropped_series_is_short_with_every_reason() -> None:
    rows = [row(metrics.STEP, 1.0, worker_uid="x" * 253) for _ in range(20_000)]
    rows += [row(metrics.STEP, 1.0, share=LONG) for _ in range(20_000)]
    rows += [row(metrics.STEP, -1.0) for _ in range(20_000)] + [row(metrics.STEP, 1.0) for _ in range(20_000)]
    sentence = parse_everything(rows, workers=WORKERS).dropped
    assert all(part in sentence for part in ("other workers", "invalid labels", "implausible values", "duplicates"))
    assert len(sentence) <= 200


# --- random histories ---

TEXTS = ("", "0", "1", "32", "64", "7", "-1", "1e3", "abc", "nan", "\x00", "🦆", LONG, str(2**40), "x" * 1000)
VALUES = (0.0, 1.0, -1.0, 0.1, 5e-324, 1e-300, 1e9, 1e15, 2.0**53 - 1, 2.0**53, 1e18, -1e18, 1e38, 1.7e308, -1.7e308)
LABELS = ("local_rank", "share", "micro_batch", "phase", "cause", "name", "worker", "worker_uid", "__name__", "pod")


def answer(rows: list[VectorSample]) -> dict[str, Any]:
    result = [{"metric": dict(labels), "value": [0, repr(float(value))]} for labels, value in rows]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


def random_rows(rng: random.Random, cluster: FakeCluster, scrape: int) -> list[VectorSample]:
    """Return most series of the cluster's workers, some of them with wild values and labels, some twice."""
    rows = []
    for pod in cluster.pod_views:
        identity = {"job_uid": "job-uid", "worker": pod.name, "worker_uid": pod.uid, "local_rank": "0"}
        for name in PLAUSIBLE:
            if rng.random() < 0.3:
                continue
            labels = {"__name__": name, **identity}
            if name in (metrics.STEPS, metrics.PHASE_SECONDS, metrics.PHASE_SECONDS_SQUARED, metrics.PEAK_MEMORY):
                labels |= {"share": rng.choice(("32", "64")), "micro_batch": "32"}
            if "phase" in name:
                labels["phase"] = rng.choice(metrics.PHASES)
            if rng.random() < 0.1:
                labels[rng.choice(LABELS)] = rng.choice(TEXTS)
            value = rng.choice(VALUES) if rng.random() < 0.3 else 100.0 * (scrape + 1) * rng.uniform(0.9, 1.1)
            rows += [VectorSample(labels, value)] * rng.choice((1, 1, 1, 2))
    rng.shuffle(rows)
    return rows


def test_no_history_of_random_series_raises() -> None:
    """Every history is read and taken; a part of them is decided on as well, which takes longer."""
    rng = random.Random(first_seed(gate=1))  # noqa: S311  # reproducible
    cluster = a_running_job()
    workers = {pod.uid: pod.name for pod in cluster.pod_views}
    pools = {pod.uid: pod.pool for pod in cluster.pod_views}
    for number in range(times(gate=150, every=10_000)):
        job = TelemetryHistory()
        for scrape in range(3):
            rows = random_rows(rng, cluster, scrape)
            scraped = [
                VectorSample(r.labels | {"__name__": ""}, NOW_S + rng.choice((5 * scrape, 0, -1e12, 1e300)))
                for r in rows[:20]
            ]
            found = JobReader().read(
                parse_vector(answer([*rows, *scraped])), workers=workers, namespace="", latest_s=NOW_S + FORGET_S
            )
            job.take(found, found.times, pools=pools)
            assert len(job.telemetry.dropped) <= 200
            assert {member.worker_uid for member in job.telemetry.gauges} <= set(workers)
        if number % 20 == 0:
            cluster.telemetry = job.telemetry
            assert decide(cluster.observe()).status is not None


def test_no_random_answer_raises_anything_but_a_bad_answer() -> None:
    rng = random.Random(2)  # noqa: S311  # reproducible
    parts: tuple[Any, ...] = (
        None,
        True,
        0,
        1e308,
        10**400,
        "",
        LONG,
        [],
        {},
        [[]],
        {"metric": {}},
        {"value": [0, "1"]},
    )

    def mutated(part: Any, depth: int = 0) -> Any:
        if rng.random() < 0.05 * (1 + depth):
            return rng.choice(parts)
        if isinstance(part, dict):
            return {key: mutated(value, depth + 1) for key, value in part.items() if rng.random() < 0.98}
        return [mutated(value, depth + 1) for value in part] if isinstance(part, list) else part

    problems = []
    for _ in range(1000):
        try:
            parse_everything(parse_vector(mutated(answer([row(metrics.STEP, 1.0), row(metrics.LOSS, 2.0)]))))
        except PromBadAnswer as error:
            problems.append(str(error))
    assert 100 < len(problems) < 1000
    assert max(map(len, problems)) <= 200


def test_the_exchange_is_that_of_the_newest_generation() -> None:
    """Steps of two generations in one scrape belong to neither, and the time of an earlier generation is dropped."""
    job = TelemetryHistory()

    def take(at_s: float, generation: int, steps: int, exchange_s: float) -> float | None:
        rows = [
            row(metrics.STEP, steps),
            row(metrics.PLAN_GENERATION, generation),
            row(metrics.PLAN_REVISION, 1),
            row(metrics.STEPS, steps, **SHAPE),
            row(metrics.BUCKET_STEPS, steps),
            row(metrics.OVERLAPPED_SECONDS, 0.75 * exchange_s),
            row(metrics.LAST_BUCKET_SECONDS, 0.25 * exchange_s),
            *(row(metrics.PHASE_SECONDS, steps / 2, phase=phase, **SHAPE) for phase in metrics.PHASES),
        ]
        job.take(parse_everything(rows), {ME: at_s}, pools=POOLS)
        found = job.telemetry.exchange
        return round(found.seconds, 6) if found is not None and found.generation == generation else None

    assert take(100.0, 1, 10, 50.0) is None, "slow first steps"
    assert take(105.0, 1, 20, 51.0) == 0.1
    assert take(110.0, 1, 30, 52.0) == 0.1
    assert take(115.0, 2, 40, 55.0) is None, "steps of both generations"
    assert [o.generation for o in job.telemetry.observations[ME]] == [None, 1, 1, None]
    assert take(120.0, 2, 50, 59.0) == 0.4
    for scrape in range(200):
        take(125.0 + scrape, 2, 60 + scrape, 59.4 + 0.4 * scrape)
    assert len(job._exchanges) == history.KEPT_EXCHANGES
