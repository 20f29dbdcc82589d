"""The metrics of a scrape."""

from __future__ import annotations

import re
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from heterotrain.identity import Identity, Mode
from heterotrain.network.authentication import REFUSALS
from heterotrain.telemetry.report import RankMetrics, StepTimes
from heterotrain.telemetry.serving import serve
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.plan import SCHEMA_VERSION
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from support.ports import free_port

IDENTITY = Identity(mode=Mode.OPERATED, job_uid="j", worker="w0", worker_uid="u0")


def rendered(report: RankMetrics) -> dict[str, float]:
    """Return all samples by name and labels, without the identity's labels."""
    found = {}
    for line in generate_latest(report.registry).decode().splitlines():
        if not line.startswith("#"):
            sample = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line)
            assert sample is not None, line
            name, labels, value = sample.groups()
            kept = sorted(label for label in labels.split(",") if label.split("=")[0] not in names.IDENTITY_LABELS)
            found[f"{name}{{{','.join(kept)}}}"] = float(value)
    return found


def times(**fields: float) -> StepTimes:
    """Return one step's seconds."""
    plain = {"load_s": 0.1, "forward_s": 0.2, "backward_s": 0.4, "sync_s": 0.05, "update_s": 0.1, "step_s": 0.9}
    return StepTimes(**(plain | fields))


def test_a_step_is_counted_under_its_shape() -> None:
    """Seconds and squares are counted by phase; compute is a sum of phases."""
    report = RankMetrics(IDENTITY)
    for _ in range(2):
        report.step(shape=(8, 4), samples=8, times=times(first_bucket_ratio=0.5), peak_bytes=None)
    found, shape = rendered(report), 'micro_batch="4"'
    assert found[f'{names.STEPS}{{{shape},share="8"}}'] == 2
    assert found[f'{names.SAMPLES}{{{shape},share="8"}}'] == 16
    assert found[f'{names.PHASE_SECONDS}{{{shape},phase="compute",share="8"}}'] == pytest.approx(1.6)
    assert found[f'{names.PHASE_SECONDS_SQUARED}{{{shape},phase="compute",share="8"}}'] == pytest.approx(2 * 0.8**2)
    assert found[f'{names.FIRST_BUCKET_FRACTION_SQUARED}{{{shape},share="8"}}'] == pytest.approx(0.5)
    assert not any(name.startswith(names.PEAK_MEMORY) for name in found)


def test_the_least_recently_used_shape_is_dropped() -> None:
    """The number of label sets is bounded; a shape that is used again stays."""
    report = RankMetrics(IDENTITY)
    for share in [*range(names.MAX_LIVE_SHAPES), 0, 99]:
        report.step(shape=(share, 1), samples=share, times=times(), peak_bytes=None)
    steps = [name for name in rendered(report) if name.startswith(names.STEPS)]
    shares = {int(share) for name in steps for share in re.findall(r'share="(\d+)"', name)}
    assert len(shares) == len(steps)
    assert shares == ({*range(names.MAX_LIVE_SHAPES)} - {1}) | {99}


def test_missing_is_missing() -> None:
    """A fresh process exports no loss, no plan and no steps, only counters whose value is really zero."""
    found = rendered(RankMetrics(IDENTITY))
    assert found == {
        f"{names.READY}{{}}": 0.0,
        f"{names.PLAN_SCHEMA}{{}}": float(SCHEMA_VERSION),
        f"{names.REPEATED_STEPS}{{}}": 0.0,
        f"{names.NON_FINITE_STEPS}{{}}": 0.0,
        f"{names.DIVERGENCES}{{}}": 0.0,
        f"{names.OUT_OF_MEMORY}{{}}": 0.0,
        f"{names.CHECKPOINT_FAILURES}{{}}": 0.0,
        f"{names.REFUSED_CONNECTIONS}{{}}": float(REFUSALS.count),
    }


def test_buckets_causes_and_user_values() -> None:
    """The last bucket is T_u, the others T_o; pauses are by cause."""
    report = RankMetrics(IDENTITY)
    report.buckets((0.2, 0.3, 0.1))
    report.count(names.PAUSE_SECONDS, 0.5, cause=names.CAUSE_LOSS)
    report.user({"accuracy": 0.9})
    found = rendered(report)
    assert found[f"{names.OVERLAPPED_SECONDS}{{}}"] == pytest.approx(0.5)
    assert found[f"{names.LAST_BUCKET_SECONDS}{{}}"] == pytest.approx(0.1)
    assert found[f'{names.PAUSE_SECONDS}{{cause="loss"}}'] == 0.5
    assert found[f'{names.USER_METRIC}{{name="accuracy"}}'] == 0.9


def test_readiness_waits_for_all_local_ranks() -> None:
    """Local rank 0 answers for the pod; each other rank for itself."""
    port = next(p for p in iter(free_port, 0) if free_port() == p + 1)
    reports: list[RankMetrics] = []
    servers: list[Any] = []
    for rank in range(2):
        identity = Identity(
            mode=Mode.OPERATED, job_uid="j", worker="w", worker_uid="u", local_rank=rank, num_proc_per_worker=2,
            metrics_port=port + rank,
        )  # fmt: skip
        reports.append(RankMetrics(identity))
        servers.append(serve(reports[-1], identity))

    def status(rank: int) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/ready", timeout=60) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return int(error.code)

    try:
        assert [status(0), status(1)] == [503, 503]
        reports[0].gauges({names.READY: 1.0})
        assert [status(0), status(1)] == [503, 503]
        reports[1].gauges({names.READY: 1.0})
        assert [status(0), status(1)] == [200, 200]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_probes_and_scrapes_come_over_ipv4_and_ipv6(host: str) -> None:
    """In a cluster with IPv6 only, no worker could get ready otherwise."""
    identity = Identity(mode=Mode.OPERATED, job_uid="j", worker="w", worker_uid="u", metrics_port=free_port())
    report = RankMetrics(identity)
    report.gauges({names.READY: 1.0})
    server: Any = serve(report, identity)
    try:
        with urllib.request.urlopen(f"http://{host}:{identity.metrics_port}/ready", timeout=20) as reply:
            assert reply.status == 200
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("fault", ["hangs up", "defect"])
def test_only_defects_are_logged(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    """A scraper that disconnects while the response is made leaves no log line; an exception in the code does."""
    identity = Identity(mode=Mode.OPERATED, job_uid="j", worker="w", worker_uid="u", metrics_port=free_port())
    report, asked, answer = RankMetrics(identity), threading.Event(), threading.Event()

    class Slow:
        def collect(self) -> Iterator[Metric]:
            asked.set()
            answer.wait()
            if fault == "defect":
                raise KeyError("a defect")
            yield GaugeMetricFamily("large", "x" * 10_000_000, value=1.0)

    server = serve(report, identity)
    assert server is not None
    report.registry.register(Slow())
    handled, finish = threading.Event(), server.shutdown_request
    server.shutdown_request = lambda request: (  # type: ignore[method-assign]  # to note the end of the response
        finish(request),
        handled.set(),
    )
    try:
        with socket.create_connection(("127.0.0.1", identity.metrics_port or 0)) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            asked.wait()
            scraper.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # reset, not an orderly end
        answer.set()
        handled.wait()
    finally:
        server.shutdown()
        server.server_close()
    assert ["a defect" in str(record.exc_info) for record in caplog.records] == ([True] if fault == "defect" else [])
