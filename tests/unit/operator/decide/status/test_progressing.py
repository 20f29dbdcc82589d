"""A training that commits no step says so, and names the rank that all others wait for."""

from __future__ import annotations

import pytest
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.telemetry import MemberGauges, MemberId, Rates, Telemetry
from heterotrain_operator.prom.history import TelemetryHistory
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import VectorSample
from support.fake_cluster import FakeCluster, a_running_job


def report(
    cluster: FakeCluster, *, idle_s: float, waiting_s: tuple[float | None, ...], step_s: float | None = 2.0,
    interval_s: float = 1.0, silent: int = 0,
) -> FakeCluster:  # fmt: skip
    """Set telemetry: seconds since the newest commit, and each worker's wait; the last ``silent`` workers have none."""
    views = cluster.pod_views
    gauges = {
        MemberId(view.uid, 0): MemberGauges(worker=view.name, step=7, waiting_s=wait)
        for view, wait in zip(views[: len(views) - silent], waiting_s, strict=True)
    }
    cluster.telemetry = Telemetry(
        gauges=gauges, newest_sample_s=cluster.now_s, commit_s=cluster.now_s - idle_s, rates=Rates(step_s=step_s),
        member_interval_s=interval_s,
    )  # fmt: skip
    return cluster


@pytest.mark.parametrize(
    ("idle_s", "waiting_s", "pace_s", "expected", "words"),
    [
        (19.0, (0.0, 19.0, 19.0), (2.0, 1.0), ("True", "Committing"), ""),
        (
            21.0,
            (0.0, 21.0, 21.0),
            (2.0, 1.0),
            ("False", "WaitingForRank"),
            "for over 20 s (a step took 2 s on average)",
        ),
        (21.0, (0.0, 21.0, 21.0), (2.0, 15.0), ("True", "Committing"), ""),
        (9.0, (0.0, 9.0, 9.0), (0.01, 1.0), ("True", "Committing"), ""),
        (300.0, (0.0, 9.0, 9.0), (None, 1.0), ("True", "Committing"), ""),
        (700.0, (0.0, 9.0, 9.0), (None, 1.0), ("False", "WaitingForRank"), "over 10 min: rank 0 of job-w0 runs code"),
        (30.0, (0.0, 0.0, 0.0), (1.0, 1.0), ("False", "NoCommit"), "such as an evaluation or a checkpoint"),
        (30.0, (30.0, 30.0, 30.0), (1.0, 1.0), ("False", "AllWait"), "look for a network"),
        (30.0, (None, None, None), (1.0, 1.0), ("False", "NoCommit"), "no step was committed"),
    ],
)
def test_progress_is_a_condition(
    idle_s: float,
    waiting_s: tuple[float, ...],
    pace_s: tuple[float | None, float],
    expected: tuple[str, str],
    words: str,
) -> None:
    """``pace_s`` is the mean step and the scrape interval."""
    step_s, interval_s = pace_s
    cluster = report(a_running_job(), idle_s=idle_s, waiting_s=waiting_s, step_s=step_s, interval_s=interval_s)
    cluster.settle()
    assert cluster.condition("Progressing") == expected
    assert words in cluster.message("Progressing")
    assert cluster.events.count("NotProgressing") == (expected[1] == "WaitingForRank")


def test_the_rank_that_all_others_wait_for_is_named() -> None:
    cluster = report(a_running_job(), idle_s=40, waiting_s=(40.0, 0.0, 40.0)).pass_time(1)
    cluster.settle()
    assert "rank 0 of job-w1 runs code of its own; 2 other ranks wait" in cluster.message("Progressing")
    assert "kubectl logs job-w0" in cluster.message("Progressing")
    before = cluster.message("Progressing")
    report(cluster, idle_s=400, waiting_s=(400.0, 0.0, 400.0)).settle()
    assert cluster.message("Progressing") == before, "a longer wait alone does not rewrite the status"
    report(cluster, idle_s=1, waiting_s=(0.5, 0.5, 0.5)).settle()
    assert cluster.condition("Progressing") == ("True", "Committing")


def test_a_rank_that_does_not_report_is_named() -> None:
    cluster = report(a_running_job(), idle_s=40, waiting_s=(40.0, 40.0), silent=1)
    cluster.settle()
    assert "rank 0 of job-w2 does not report; 2 other ranks wait" in cluster.message("Progressing")


def test_progress_is_not_known_without_telemetry_or_training() -> None:
    cluster = a_running_job()
    assert cluster.condition("Progressing") == ("Unknown", "NotReported")
    cluster.edit(lambda spec: spec.update(suspend=True)).settle()
    assert cluster.condition("Progressing") == ("Unknown", "NotTraining")


def test_the_time_of_the_newest_commit_is_that_of_the_first_scrape_with_its_step() -> None:
    history, times = TelemetryHistory(), []
    for second, step in enumerate([3, 3, 4, 4, 4, 2]):  # at last, a resume from a checkpoint
        labels = {"worker": "w", "worker_uid": "uid", "local_rank": "0"}
        rows = [
            VectorSample({"__name__": metrics.STEP, **labels}, step),
            VectorSample({"__name__": metrics.WAITING_SECONDS, **labels}, float(second)),
        ]
        history.take(parse_everything(rows), {MemberId("uid", 0): 100.0 + second}, pools={})
        times.append(history.telemetry.commit_s)
    assert times == [100, 100, 102, 102, 102, 105]
    assert history.telemetry.gauges[MemberId("uid", 0)].waiting_s == 5
