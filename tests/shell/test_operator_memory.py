"""What the operator keeps for each connection and each job, in bytes."""

from __future__ import annotations

import asyncio
import gc
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
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.engine.app import App
from heterotrain_operator.kube.client import TLS_BUFFER_BYTES, use_small_tls_buffers
from heterotrain_operator.settings import Settings
from heterotrain_planner.perf.counters import PhaseSums
from lab.scale.workload import Size
from support.executors import at_once
from support.fake_cluster import FakeCluster
from support.fakes import FakeKube
from support.load import LoadTest, bodies_of, feed

JOBS = 20
KEPT_BYTES = 110_000
"""For a job with ten workers, its plan and its nodes: 103,000 when this was written."""


@contextmanager
def allocated() -> Iterator[list[int]]:
    """Add to a list how many bytes more are in use at the end."""
    found: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        yield found
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0])
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
