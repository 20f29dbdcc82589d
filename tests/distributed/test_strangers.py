"""Processes that know every name in the metrics, and no secret, at all ports of real workers: training goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from distributed.harness import Gate, Operator, Worker, assert_finished
from heterotrain_core.contract.codec import encode_plan

Operate = Callable[..., Operator]
LISTENS = "0A"
"""State of a listening socket in the kernel's table."""


def listening_ports(worker: Worker) -> set[int]:
    """Return all ports at which a worker listens over IPv4 or IPv6."""
    inodes = set()
    for descriptor in Path(f"/proc/{worker.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{worker.pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and fields[9] in inodes:
                ports.add(int(fields[1].rsplit(":", 1)[1], 16))
    return ports


def descriptors(worker: Worker) -> int:
    """Return how many descriptors a worker has open."""
    return len([*Path(f"/proc/{worker.pid}/fd").iterdir()])


def say(port: int, data: bytes) -> None:
    """Send something to a port, if that takes connections."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2) as stranger:
        stranger.sendall(data)


def frame(message: object) -> bytes:
    """Return a request as ranks send it to each other."""
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def test_strangers_change_nothing_and_leave_nothing_behind(operate: Operate, tmp_path: Path) -> None:
    """Stolen, halting and forged plans, broken formations, garbage: same weights and samples, no descriptors kept."""
    operator = operate()
    gate = Gate(tmp_path, 3)
    workers = operator.start_workers(3, faults={0: gate.fault})
    plan = operator.plan(workers)
    operator.until(gate.reached, "step 3")
    victim = workers[0]
    before = descriptors(victim)
    refused = victim.metric("heterotrain_refused_connections_total") or 0.0

    known = {"job": plan.job_uid, "to": [victim.uid, 0], "from": ["evil", 0]}
    forged = json.dumps(json.loads(encode_plan(plan)) | {"generation": 2**52 - 1})
    requests = [
        {"op": "offer", "text": forged}, {"op": "broken", "formation": [1, 0]}, {"op": "plan"},
        {"op": "decided", "formation": [1, 1], "ranks": ["x"]},
        {"op": "prepare", "formation": [1, 1], "ballot": ["z", 0]},
    ]  # fmt: skip
    for request in requests:
        say(victim.peer_port, frame({**known, **request}).ljust(200))
    for port in listening_ports(victim) - {victim.metrics_port}:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4, b"[" * 10_000):
            for _ in range(5):
                say(port, data)
    operator.until(
        lambda: (victim.metric("heterotrain_refused_connections_total") or 0.0) >= refused + 25, "all are counted"
    )
    operator.until(lambda: descriptors(victim) <= before + 3, "no descriptor is left behind")  # scrapes may be running

    gate.open()
    assert_finished(operator, workers)
    assert victim.log().count("refused a connection") == 1
    assert "formation 1.1" not in victim.log()
