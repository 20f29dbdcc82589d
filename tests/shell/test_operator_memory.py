"""What the operator keeps for each connection and each job, in bytes."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from asyncio import sslproto

import pytest
from heterotrain_core.contract import metrics
from heterotrain_core.perf.counters import PhaseSums
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.kube.client import TLS_BUFFER_BYTES, use_small_tls_buffers
from support.fake_cluster import FakeCluster


async def test_connections_with_tls_have_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own attribute decides, so a later Python without it fails here."""
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", 256 * 1024)
    use_small_tls_buffers()
    loop = asyncio.get_running_loop()
    protocol = sslproto.SSLProtocol(loop, asyncio.Protocol(), ssl.create_default_context(), loop.create_future())
    assert len(protocol.get_buffer(1_000_000)) == TLS_BUFFER_BYTES


def test_a_status_is_kept_as_text_and_read_as_it_was() -> None:
    job = FakeCluster().with_nodes("a", "b", "c").start().job
    view = parse_job(job)
    assert view.status_body == job["status"]
    assert len(view.status_text) < 1.1 * len(json.dumps(job["status"], separators=(",", ":")))


def test_sums_of_phases_take_less_than_half_of_a_dictionary_s_memory() -> None:
    sums = {phase: 1.5 + place for place, phase in enumerate(metrics.PHASES)}
    packed = PhaseSums(sums)
    as_dictionary = sys.getsizeof(sums) + sum(map(sys.getsizeof, sums.values()))
    assert 2 * (sys.getsizeof(packed) + sys.getsizeof(packed._values)) < as_dictionary
