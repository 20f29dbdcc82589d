"""What a worker checks before it trains, up to the series that the operator reads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from heterotrain.checkpoints.storage import Storage
from heterotrain.identity import Identity, Mode
from heterotrain.preflight import in_job, machine
from heterotrain.preflight.result import Check, Verdict
from heterotrain.telemetry.report import RankMetrics
from heterotrain_core.contract import metrics
from heterotrain_operator.cluster_state.telemetry import PreflightProblem
from heterotrain_operator.prom.accepted import PLAUSIBLE
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.vector import VectorSample

CPU = torch.device("cpu")


def checked(uri: str | None, *, mode: Mode = Mode.OPERATED, local_rank: int = 0) -> RankMetrics:
    """Return a worker's report after its checks."""
    identity = Identity(mode=mode, worker="job-w0", worker_uid="u", local_rank=local_rank)
    report = RankMetrics(identity)
    in_job.start(identity, CPU, uri, report)
    for thread in threading.enumerate():
        if thread.name == "heterotrain-preflight":
            thread.join()
    return report


def problems(report: RankMetrics) -> list[tuple[str, float]]:
    """Return check and value of each exported problem."""
    return [
        (sample.labels["check"], sample.value)
        for family in report.collect()
        for sample in family.samples
        if sample.name == metrics.PREFLIGHT_PROBLEM
    ]


@pytest.fixture(autouse=True)
def _a_machine_with_names_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_SHM_BYTES", 1)
    monkeypatch.setattr(machine, "hosts_to_resolve", lambda: ("localhost",))


def test_a_healthy_worker_reports_the_number_of_its_checks_only(tmp_path: Path) -> None:
    report = checked(str(tmp_path / "store"))
    assert report.current()[metrics.PREFLIGHT_PASSED] == 3.0
    assert problems(report) == []
    assert list((tmp_path / "store").iterdir()) == [], "the probe is removed"


def test_other_ranks_of_the_machine_check_their_device_only(tmp_path: Path) -> None:
    report = checked(str(tmp_path / "store"), local_rank=1)
    assert report.current()[metrics.PREFLIGHT_PASSED] == 0.0
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("mode", [Mode.ALONE, Mode.TORCHRUN])
def test_without_an_operator_nothing_is_checked(mode: Mode, tmp_path: Path) -> None:
    report = checked(str(tmp_path / "store"), mode=mode)
    assert metrics.PREFLIGHT_PASSED not in report.current()
    assert not (tmp_path / "store").exists()


def test_a_store_that_refuses_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = checked(str(tmp_path / "file"))
    assert problems(report) == [("store", metrics.PREFLIGHT_FAILURE)]
    assert report.current()[metrics.PREFLIGHT_PASSED] == 2.0


def test_a_store_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*_: object, **__: object) -> Check:
        release.wait()
        return Check(name="store", verdict=Verdict.OK, message="late")

    monkeypatch.setattr(in_job, "ANSWER_S", 0.01)
    monkeypatch.setattr(machine, "store", hang)
    monkeypatch.setattr(in_job, "_names", lambda: Check(name="DNS", verdict=Verdict.OK, message="m"))
    try:
        assert problems(checked(str(tmp_path))) == [("store", metrics.PREFLIGHT_FAILURE)]
    finally:
        release.set()


def test_a_check_with_an_error_of_its_own_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Check:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(machine, "gpu_memory", broken)
    monkeypatch.setattr(machine, "shared_memory", broken)
    report = checked(str(tmp_path))
    assert problems(report) == [("GPU memory", metrics.PREFLIGHT_WARNING), ("shared memory", metrics.PREFLIGHT_WARNING)]
    assert "could not be checked (RuntimeError: CUDA driver" in report._preflight.rows[0][0][1]


def test_a_missing_name_server_is_a_limit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "hosts_to_resolve", lambda: ("no-such-host.invalid",))
    assert problems(checked(str(tmp_path))) == [("DNS", metrics.PREFLIGHT_WARNING)]


def test_the_operator_reads_what_is_exported(tmp_path: Path) -> None:
    report = RankMetrics(Identity(mode=Mode.OPERATED, worker="job-w0", worker_uid="u"))
    found = [Check(name="store", verdict=Verdict.FAILED, message='"no"\nrights')]
    in_job.report_checks([*found, Check(name="DNS", verdict=Verdict.OK, message="m")], report)
    rows = [
        VectorSample({"__name__": sample.name, **sample.labels}, sample.value)
        for family in report.collect()
        for sample in family.samples
    ]
    (gauges,) = parse_everything([row for row in rows if row.labels["__name__"] in PLAUSIBLE]).gauges.values()
    assert gauges.preflight_passed == 1
    assert gauges.preflight_problems == (PreflightProblem(False, "store", '"no" rights'),)


def test_sentences_are_one_printable_line_of_bounded_length(tmp_path: Path) -> None:
    report = checked(str(tmp_path))
    in_job.report_checks([Check(name="store", verdict=Verdict.FAILED, message="a\nb\x1b" + "c" * 999)], report)
    (row,) = report._preflight.rows
    assert row[0][1].startswith("a b?ccc")
    assert len(row[0][1]) == metrics.MOST_MESSAGE
    in_job.report_checks(
        [Check(name=f"check {number}", verdict=Verdict.WARNING, message="m") for number in range(99)], report
    )
    assert len(problems(report)) == metrics.MOST_PREFLIGHT_PROBLEMS


def test_a_worker_that_was_killed_leaves_at_most_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "remove", lambda *_: None)
    for _ in range(3):
        checked(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["preflight-default-job-w0"]
