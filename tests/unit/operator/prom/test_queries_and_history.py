"""PromQL answers parsed into counters, observations and rates; wrong and missing rows are left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Sustained
from heterotrain_operator.prom.errors import PromBadAnswer
from heterotrain_operator.prom.history import FORGET_S, KEPT_FORMER, RATE_WINDOW_S, TelemetryHistory
from heterotrain_operator.prom.queries import everything_of, scrapes_of, series_and_times_of
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.snapshot import JobSeries, counter_name
from heterotrain_operator.prom.vector import VectorSample, parse_answer, parse_vector
from heterotrain_planner.perf.counters import CounterKey

ME = MemberId("uid-a", 0)
POOLS = {"uid-a": "a"}


def row(series: str, value: float, /, *, uid: str = "uid-a", **labels: str) -> VectorSample:
    identity = {"__name__": series, "job_uid": "job-uid", "worker": "job-w0", "worker_uid": uid, "local_rank": "0"}
    return VectorSample({**identity, **labels}, value)


def shape_rows(steps: float, *, share: int = 40, compute_s: float = 0.5, uid: str = "uid-a") -> list[VectorSample]:
    """Return counters of this many equal steps."""
    shape = {"share": str(share), "micro_batch": str(share), "uid": uid}
    seconds = {metrics.PHASE_COMPUTE: compute_s, metrics.PHASE_STEP: compute_s * 1.1}
    rows = [row(metrics.STEPS, steps, **shape)]
    for phase, each_s in seconds.items():
        rows.append(row(metrics.PHASE_SECONDS, steps * each_s, phase=phase, **shape))
        rows.append(row(metrics.PHASE_SECONDS_SQUARED, steps * each_s**2, phase=phase, **shape))
    return rows


def snapshot(steps: float, *, committed: int | None = None, **shape: Any) -> JobSeries:
    gauges = [row(metrics.STEP, steps, uid=shape.get("uid", "uid-a"))]
    if committed is not None:
        gauges.append(row(metrics.SAMPLES_COMMITTED, committed))
    return parse_everything([*gauges, *(shape_rows(steps, **shape) if steps else [])])


def test_queries_select_one_job() -> None:
    assert everything_of("u").endswith(',job_uid="u"}')
    assert metrics.PHASE_SECONDS_SQUARED in everything_of("u")
    times = 'label_replace(timestamp(heterotrain_ready{job_uid="u"}), "time_of", "scrape", "", "")'
    assert series_and_times_of("u") == f"{everything_of('u')} or {times}"


def test_one_query_asks_about_many_jobs_and_each_of_them_gets_one_row() -> None:
    assert scrapes_of(["u2", "u1"]) == 'sum by (job_uid) (timestamp(heterotrain_ready{job_uid=~"u1|u2"}))'


VECTOR: dict[str, Any] = {"status": "success", "data": {"resultType": "vector", "result": [
    {"metric": {"name": 'with "quotes" and ]'}, "value": [1.5, "2.5"]},
    {"metric": {}, "value": [1.5, "NaN"]},
    {"metric": {"é": "\u2028"}, "value": [1.5, "-1"]},
]}}  # fmt: skip


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_an_answer_read_row_by_row_is_the_same_as_read_at_once(separators: tuple[str, str], rows: int) -> None:
    answer = {**VECTOR, "data": {**VECTOR["data"], "result": VECTOR["data"]["result"][:rows]}, "stats": {"result": []}}
    assert tuple(parse_answer(json.dumps(answer, separators=separators).encode())) == tuple(parse_vector(answer))


@pytest.mark.parametrize("cut", [5, 60, 90, 130, -1])
def test_a_cut_answer_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_answer(json.dumps(VECTOR, separators=(",", ":")).encode()[:cut])


def test_a_large_answer_is_never_decoded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = VECTOR["data"]["result"] * 1000
    body = json.dumps({**VECTOR, "data": {**VECTOR["data"], "result": rows}}, separators=(",", ":")).encode()
    longest, loads = [0], json.loads

    def noted(text: str) -> Any:
        longest[0] = max(longest[0], len(text))
        return loads(text)

    monkeypatch.setattr(json, "loads", noted)
    assert len(tuple(parse_answer(body))) == 2000
    assert 0 < longest[0] < 100 * 200


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "text",
        {},
        {"status": "error", "error": "parse error"},
        {"status": "success"},
        {"status": "success", "data": {"resultType": "matrix", "result": []}},
        {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}}]}},
        {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "many"]}]}},
    ],
)
def test_an_invalid_answer_is_refused(answer: object) -> None:
    with pytest.raises(PromBadAnswer):
        parse_vector(answer)


def test_values_that_are_not_numbers_are_left_out() -> None:
    result = [{"metric": {"a": "b"}, "value": [1, text]} for text in ("NaN", "+Inf", "1.5")]
    answer = {"status": "success", "data": {"resultType": "vector", "result": result}}
    assert tuple(parse_vector(answer)) == (VectorSample({"a": "b"}, 1.5),)


def test_a_pause_is_the_mean_over_all_causes() -> None:
    rows = [
        row(metrics.PAUSE_SECONDS, 0.6, cause=metrics.CAUSE_LOSS),
        row(metrics.PAUSE_SECONDS, 1.0, cause=metrics.CAUSE_LEAVE),
        row(metrics.MEMBERSHIP_CHANGES, 1, cause=metrics.CAUSE_LOSS),
        row(metrics.MEMBERSHIP_CHANGES, 3, cause=metrics.CAUSE_LEAVE),
        row(metrics.STEP, 4, uid="newcomer"),
    ]
    history = TelemetryHistory()
    assert history.telemetry.pause_s is None
    history.take(parse_everything(rows), {ME: 1.0}, pools=POOLS)
    assert history.telemetry.pause_s == pytest.approx(0.4)


def test_counters_are_read_by_member_and_shape() -> None:
    rows = [
        *shape_rows(10, share=40),
        *shape_rows(4, share=60),
        row(metrics.FIRST_BUCKET_FRACTION, 3.0, share="40", micro_batch="40"),
        row(metrics.BUCKET_STEPS, 14),
        row(metrics.OVERLAPPED_SECONDS, 1.4),
        row(metrics.LAST_BUCKET_SECONDS, 0.7),
    ]
    counters = parse_everything(rows).counters
    forty = counters[CounterKey(member="uid-a/0", share_samples=40, micro_batch_samples=40)]
    assert len(counters) == 2
    assert forty.steps == 10
    assert forty.phase_s[metrics.PHASE_COMPUTE] == pytest.approx(5.0)
    assert forty.first_bucket_fraction == 3.0
    assert forty.first_bucket_fraction_squared is None
    assert (forty.bucket_steps, forty.overlapped_s, forty.last_bucket_s) == (14, 1.4, 0.7)


def test_series_without_a_member_are_left_out() -> None:
    rows = [
        VectorSample({"__name__": metrics.STEP}, 1.0),
        VectorSample({"__name__": metrics.STEP, "worker_uid": "u", "local_rank": "first"}, 1.0),
        row(metrics.STEPS, 1.0, share="many", micro_batch="1"),
        row(metrics.PHASE_SECONDS, 1.0, share="4", micro_batch="4", phase="compute"),
    ]
    found = parse_everything(rows)
    assert found.counters == {}
    assert set(found.gauges) == {ME}


def test_missing_gauges_are_none_instead_of_zero() -> None:
    gauges = parse_everything([row(metrics.STEP, 7), row(metrics.USER_METRIC, 0.9, name="accuracy")]).gauges[ME]
    assert gauges == MemberGauges(worker="job-w0", step=7, user_metrics={"accuracy": 0.9})
    assert gauges.loss is None


def test_peak_memory_of_a_micro_batch_is_the_highest_over_all_shares() -> None:
    rows = [
        row(metrics.PEAK_MEMORY, peak, share=share, micro_batch=micro)
        for peak, share, micro in ((3e9, "40", "20"), (4e9, "60", "20"), (2e9, "10", "10"))
    ]
    gauges = parse_everything([*rows, row(metrics.DEVICE_MEMORY, 8e9)]).gauges[ME]
    assert (gauges.peak_memory_bytes, gauges.device_memory_bytes) == ({20: 4e9, 10: 2e9}, 8e9)


def test_scrape_times_are_by_member() -> None:
    assert parse_everything([row("", 12.5), VectorSample({}, 3.0)]).times == {ME: 12.5}


def test_steps_between_scrapes_become_observations() -> None:
    job = TelemetryHistory()
    job.take(snapshot(10), {ME: 100.0}, pools=POOLS)
    job.take(snapshot(14), {ME: 101.0}, pools=POOLS)
    first, second = job.telemetry.observations[ME]
    assert (first.steps, first.warm_up) == (10, True)
    assert (second.steps, second.warm_up, second.ended_s) == (4, False, 101.0)
    assert second.compute is not None
    assert second.compute.mean == pytest.approx(0.5)


def test_the_same_scrape_read_twice_is_not_new() -> None:
    job = TelemetryHistory()
    assert job.take(snapshot(10), {ME: 100.0}, pools=POOLS)
    assert not job.take(snapshot(10), {ME: 100.0}, pools=POOLS)
    assert job.telemetry.sequence == 1


def test_a_restart_of_prometheus_removes_nothing_and_counts_nothing_twice() -> None:
    job = TelemetryHistory()
    job.take(snapshot(10), {ME: 100.0}, pools=POOLS)
    job.take(JobSeries(counters={}, gauges={}), {}, pools=POOLS)
    assert len(job.telemetry.observations[ME]) == 1
    job.take(snapshot(12), {ME: 110.0}, pools=POOLS)
    assert [found.steps for found in job.telemetry.observations[ME]] == [10, 2]


def test_a_member_without_a_known_pool_is_forgotten_after_a_long_absence() -> None:
    other = MemberId("uid-b", 0)
    job = TelemetryHistory()
    job.take(snapshot(10), {ME: 100.0}, pools={})
    for later_s in (1.0, FORGET_S + 1):
        job.take(snapshot(10 + later_s, uid="uid-b"), {other: 100.0 + later_s}, pools=POOLS)
    assert set(job.telemetry.observations) == {other}


def test_the_newest_former_members_of_each_pool_are_kept_for_their_successors() -> None:
    """They are kept for any time and among any number; the counters of ended processes are dropped."""
    job = TelemetryHistory()
    many = KEPT_FORMER + 3
    for number in range(many):
        uid = f"old-{number}"
        job.take(snapshot(10, uid=uid), {MemberId(uid, 0): 100.0 + number}, pools={uid: "a"})
    for later_s in (2 * FORGET_S, 50 * FORGET_S):
        job.take(snapshot(later_s, uid="uid-b"), {MemberId("uid-b", 0): 100.0 + later_s}, pools={"uid-b": "b"})
    kept = {MemberId(f"old-{number}", 0) for number in range(many - KEPT_FORMER, many)}
    assert set(job.telemetry.observations) == {*kept, MemberId("uid-b", 0)}
    assert job.telemetry.pools == {**dict.fromkeys(kept, "a"), MemberId("uid-b", 0): "b"}
    assert {key.member for key in job._counters} == {"uid-b/0"}


def in_force(steps: float, revision: int, *, share: int = 40) -> JobSeries:
    versions = [row(metrics.PLAN_GENERATION, 1), row(metrics.PLAN_REVISION, revision)]
    return parse_everything([*versions, *shape_rows(steps, share=share)])


def test_steps_are_counted_from_the_scrape_after_the_plan_took_effect() -> None:
    """The first scrape with a plan also contains steps of the plan before, which may have had the same shares."""
    job = TelemetryHistory()
    for second, (steps, revision) in enumerate([(10, 1), (14, 1), (20, 2), (23, 2), (30, 2)]):
        job.take(in_force(steps, revision), {ME: 100.0 + second}, pools=POOLS)
    found = job.telemetry.in_force[ME]
    assert (found.version, found.steps) == ((1, 2), {40: 10})
    assert found.step_s[40] == pytest.approx(10 * 0.55)
    job.take(in_force(31, 3), {ME: 200.0}, pools=POOLS)
    assert job.telemetry.in_force[ME].steps == {}


def test_what_a_rank_did_with_another_part_of_the_model_is_forgotten() -> None:
    """A scrape that first shows a generation also has steps of the one before: they count for neither."""
    job = TelemetryHistory()

    def seen(at_s: float, steps: float, generation: int, *, recut: bool = True) -> list[int]:
        rows = [*shape_rows(steps), row(metrics.PLAN_GENERATION, generation), row(metrics.PLAN_REVISION, 1)]
        job.take(parse_everything(rows), {ME: at_s}, pools=POOLS, recut=recut)
        return [found.steps for found in job.telemetry.observations.get(ME, ())]

    assert seen(1.0, 10, 1) == [], "the process may have computed under an older plan"
    assert seen(2.0, 30, 1) == [20]
    assert seen(3.0, 40, 2) == []
    assert seen(4.0, 55, 2) == [15]
    assert seen(5.0, 65, 3, recut=False) == [15, 10], "a rank that holds the whole model does the same as before"


def test_the_scrape_interval_lies_between_the_two_newest_scrapes() -> None:
    job = TelemetryHistory()
    intervals = []
    for at_s in (100.0, 115.0, 115.0, 130.5):
        job.take(snapshot(at_s), {ME: at_s}, pools=POOLS)
        intervals.append(job.telemetry.scrape_interval_s)
    assert intervals == [None, 15.0, 15.0, 15.5]


def test_the_interval_of_one_member_outlasts_an_outage_and_other_members_scrapes() -> None:
    job, other = TelemetryHistory(), MemberId("uid-other", 0)
    intervals = []
    for mine_s, others_s in ((100.0, 130.0), (160.0, 130.0), (160.0, 190.0), (760.0, 190.0), (820.0, 850.0)):
        job.take(snapshot(mine_s), {ME: mine_s, other: others_s}, pools=POOLS)
        intervals.append(job.telemetry.member_interval_s)
    assert intervals == [None, 60.0, 60.0, 60.0, 60.0]


def test_a_prometheus_that_scrapes_once_a_minute_yields_rates() -> None:
    job = TelemetryHistory()
    for scrape in range(5):
        job.take(snapshot(60 * scrape, committed=6000 * scrape), {ME: 1000.0 + 60 * scrape}, pools=POOLS)
    assert job.telemetry.rates.samples_per_s == pytest.approx(100)


def test_rates_cover_the_last_half_minute() -> None:
    job = TelemetryHistory()
    for second in range(60):
        slow = second < 20
        steps = second if slow else 20 + 2 * (second - 20)
        job.take(snapshot(steps, committed=100 * steps, compute_s=0.4), {ME: 1000.0 + second}, pools=POOLS)
    rates = job.telemetry.rates
    assert rates.samples_per_s == pytest.approx(200, rel=0.05)
    assert rates.solo_samples_per_s[ME] == pytest.approx(100.0)
    assert rates.step_s == pytest.approx(0.44)


def test_a_generation_s_rate_is_counted_from_its_first_scrape() -> None:
    job = TelemetryHistory()

    def look(at_s: float, samples: int, generation: int) -> None:
        gauges = [
            row(metrics.STEP, samples),
            row(metrics.SAMPLES_COMMITTED, samples),
            row(metrics.PLAN_GENERATION, generation),
        ]
        job.take(parse_everything(gauges), {ME: at_s}, pools=POOLS)

    look(1000.0, 500, 1)
    look(1000.0 + RATE_WINDOW_S / 2, 900, 1)
    assert job.telemetry.rates.sustained is None, "too early"
    look(1100.0, 1500, 1)
    look(1200.0, 2500, 1)
    assert job.telemetry.rates.sustained == Sustained(1, 10.0, 200.0)
    look(1210.0, 3000, 2)
    assert job.telemetry.rates.sustained is None, "other members"
    look(1310.0, 8000, 2)
    assert job.telemetry.rates.sustained == Sustained(2, 50.0, 100.0)


def test_without_progress_for_long_there_is_no_rate() -> None:
    job = TelemetryHistory()
    job.take(snapshot(10, committed=1000), {ME: 100.0}, pools=POOLS)
    job.take(snapshot(20, committed=2000), {ME: 110.0}, pools=POOLS)
    assert job.telemetry.rates.samples_per_s == pytest.approx(100)
    job.take(snapshot(20, committed=2000), {ME: 110.0 + RATE_WINDOW_S + 1}, pools=POOLS)
    assert job.telemetry.rates.samples_per_s is None


def test_a_resume_from_a_checkpoint_is_not_a_negative_rate() -> None:
    job = TelemetryHistory()
    job.take(snapshot(10, committed=1000), {ME: 100.0}, pools=POOLS)
    job.take(snapshot(10, committed=400), {ME: 101.0}, pools=POOLS)
    job.take(snapshot(11, committed=500), {ME: 102.0}, pools=POOLS)
    assert job.telemetry.rates.samples_per_s == pytest.approx(100)


def test_a_problem_counts_as_changed_only_when_it_comes_and_goes() -> None:
    job = TelemetryHistory()
    assert job.set_problem(reason="Unavailable", problem="no answer")
    assert not job.set_problem(reason="Unavailable", problem="still no answer")
    assert job.set_problem(reason="Fresh", problem="")
    assert job.telemetry.problem == ""


def test_equal_labels_of_two_answers_are_kept_once() -> None:
    """Each read names all ranks again."""
    labels = {"__name__": metrics.STEP, "worker": "job-w9", "worker_uid": "4f1c-9", "local_rank": "0"}
    body = json.dumps(
        {"status": "success", "data": {"resultType": "vector", "result": [{"metric": labels, "value": [0, "1"]}]}}
    ).encode()
    read = [parse_everything(parse_answer(body)).gauges for _ in range(2)]
    assert len({id(member.worker_uid) for gauges in read for member in gauges}) == 1
    assert len({id(gauges.worker) for each in read for gauges in each.values()}) == 1
    assert counter_name(MemberId("4f1c-9", 0)) is counter_name(MemberId("4f1c-9", 0))
