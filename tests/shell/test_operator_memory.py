"""What the operator keeps for each connection and each job, in bytes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import ssl
import sys
import tracemalloc
from asyncio import sslproto
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog
from heterotrain_core.contract import metrics
from heterotrain_operator.api import lean
from heterotrain_operator.cluster_state.parse import parse_job, parse_pod
from heterotrain_operator.engine.app import App
from heterotrain_operator.kube.client import TLS_BUFFER_BYTES, use_small_tls_buffers
from heterotrain_operator.settings import Settings
from heterotrain_planner.perf.counters import PhaseSums
from lab.scale.workload import Size
from support.executors import at_once
from support.fake_cluster import FakeCluster
from support.fakes import FakeKube
from support.load import LoadTest, bodies_of, feed


def _line_of(text: str) -> int:
    """Return the number of the only line of ``lean`` with a text."""
    [found] = [number for number, line in enumerate(inspect.getsource(lean).splitlines(), 1) if text in line]
    return found


JOBS = 20
KEPT_BYTES = 50_000
"""For a job with ten workers, its plan and its nodes: 44,000 when this was written, and 68,000 with nothing shared."""


TABLE = tracemalloc.Filter(False, lean.__file__, lineno=_line_of("sys.intern("))
"""Python's table of shared strings: it grows by megabytes at a time, whenever a process happens to fill it."""


@contextmanager
def allocated() -> Iterator[list[int]]:
    """Add to a list how many bytes more are in use at the end, without those of ``TABLE``."""
    found: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield found
        gc.collect()
        traces = tracemalloc.take_snapshot().filter_traces([TABLE]).traces
        found.append(sum(trace.size for trace in traces))
    finally:
        tracemalloc.stop()


async def test_connections_with_tls_have_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own attribute decides, so a later Python without it fails here."""
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", 256 * 1024)
    use_small_tls_buffers()
    loop = asyncio.get_running_loop()
    protocol = sslproto.SSLProtocol(loop, asyncio.Protocol(), ssl.create_default_context(), loop.create_future())
    assert len(protocol.get_buffer(1_000_000)) == TLS_BUFFER_BYTES


def test_a_status_is_kept_packed_and_read_as_it_was() -> None:
    job = FakeCluster().with_nodes("a", "b", "c").start().job
    view = parse_job(job)
    assert view.status_body == job["status"]
    assert len(view.packed_status) < 0.5 * len(json.dumps(job["status"], separators=(",", ":")))


def test_sums_of_phases_take_less_than_half_of_a_dictionary_s_memory() -> None:
    sums = {phase: 1.5 + place for place, phase in enumerate(metrics.PHASES)}
    packed = PhaseSums(sums)
    as_dictionary = sys.getsizeof(sums) + sum(map(sys.getsizeof, sums.values()))
    assert 2 * (sys.getsizeof(packed) + sys.getsizeof(packed._values)) < as_dictionary


async def test_what_is_kept_of_a_job_is_bounded() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    load = LoadTest(Size(jobs=JOBS, pods=10 * JOBS))
    await load.settle()
    structlog.reset_defaults()
    bodies = bodies_of(load)
    app = App(FakeKube(), Settings(leader_election=False), threads=at_once())
    with allocated() as found:
        feed(app, bodies)
    assert len(app.store.jobs.all()) == JOBS
    assert len(app.store.pods.all()) >= 10 * JOBS
    assert found[0] < KEPT_BYTES * JOBS


def test_pods_of_a_job_share_what_is_equal() -> None:
    cluster = FakeCluster().with_nodes("a", "b").start()
    one, other = [pod for text in map(json.dumps, cluster.pods.values()) if (pod := parse_pod(json.loads(text)))][:2]
    assert one.name != other.name
    assert one.requests
    for name in ("phase", "owner_uid", "image", "plan_version", "requests"):
        assert getattr(one, name) is getattr(other, name), name
    assert one.key.name is other.key.name


def test_shared_strings_are_freed_with_their_last_user() -> None:
    """Some versions of Python keep interned strings for ever."""
    with allocated() as found:
        kept = [lean.share_text("".join(("free", str(number), "x" * 80))) for number in range(2000)]
        assert kept[7] is lean.share_text("".join(("free", "7", "x" * 80)))
        del kept
    assert found[0] < 100_000


def test_shared_amounts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean, "_amounts", {})
    monkeypatch.setattr(lean, "MOST_AMOUNTS", 3)
    found = [lean.share_amounts({"cpu": float(number)}) for number in range(5)]
    assert [each["cpu"] for each in found] == [0, 1, 2, 3, 4]
    assert len(lean._amounts) == 3
    assert lean.share_amounts({"cpu": 1.0}) is found[1]
