"""What encryption costs between two ranks on this machine: a state, the numbers of a step, and gradients by gloo.

``python deploy/dev/bench/trainer_encryption.py`` prints medians and ranges, in turns without and with TLS. Each rank is
a process with one thread for torch.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heterotrain.network.authentication import Credentials
from heterotrain.network.connection_setup import gloo_group, route_of
from heterotrain.network.encryption import Tls
from heterotrain.network.mesh.connect import connect
from heterotrain.network.mesh.exchange import Payload
from heterotrain.network.mesh.mesh import Mesh
from heterotrain_core.contract import keys
from heterotrain_operator.engine.certificate import make_certificate

STATE_BYTES = 100_000_000
BUCKET_BYTES = 25 * 2**20
ROW_BYTES = 200
ROUNDS = 7
_dist: Any = dist


def rank_main(rank: int, port: int, folder: str, answers: Any) -> None:
    """Measure on one rank; rank 0 reports seconds by measurement and kind."""
    torch.set_num_threads(1)
    store = _dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    sides = {}
    for name, tls in (("plain", None), ("TLS", Tls.mounted(folder))):
        credentials = Credentials(secret=b"s" * keys.SECRET_BYTES, tls=tls)
        view = _dist.PrefixStore(name, store)
        mesh = connect(
            view, rank=rank, world_size=2, address="127.0.0.1", within_s=60, limit_s=60, credentials=credentials
        )
        route = route_of("127.0.0.1", credentials)
        sides[name] = mesh, gloo_group(view, "gradients", rank=rank, world_size=2, route=route)
    state, bucket = bytearray(STATE_BYTES), torch.zeros(BUCKET_BYTES // 4)
    for _ in range(ROUNDS):
        for name, (mesh, group) in sides.items():
            for what, work in works(mesh, group, rank, state, bucket).items():
                mesh.gather(b"").wait()
                begin_s = time.perf_counter()
                work()
                if rank == 0:
                    answers.put((what, name, time.perf_counter() - begin_s))
    mesh.gather(b"").wait()


def works(mesh: Mesh, group: Any, rank: int, state: bytearray, bucket: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return what to measure, by name."""

    def send() -> None:
        payload = Payload(len(state), [memoryview(state)])
        mesh.send_receive(outgoing={} if rank else {1: payload}, incoming={0: payload} if rank else {}).wait()
        mesh.gather(b"").wait()

    def control() -> None:
        for _ in range(100):
            mesh.gather(b"x" * ROW_BYTES).wait()

    def reduce() -> None:
        group.allreduce([bucket], _dist.AllreduceOptions()).wait()

    return {"a state of 100 MB": send, "100 rows of a step": control, "gradients of 25 MiB": reduce}


def main() -> None:
    """Run both ranks and print a table."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in zip(
            (keys.TLS_CERTIFICATE_KEY, keys.TLS_PRIVATE_KEY), make_certificate("bench"), strict=True
        ):
            (Path(folder) / name).write_bytes(content)
        answers = context.Queue()
        probe = _dist.TCPStore("127.0.0.1", 0, 1, True)  # finds a free port
        port = probe.port
        del probe
        ranks = [context.Process(target=rank_main, args=(rank, port, folder, answers)) for rank in range(2)]
        for each in ranks:
            each.start()
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(ROUNDS * 6):
            what, name, seconds = answers.get(timeout=300)
            found.setdefault((what, name), []).append(seconds)
        for each in ranks:
            each.join()
    for (what, name), all_s in found.items():
        later_s = all_s[1:]  # the first round warms up
        print(
            f"{what:<20} {name:<6} {1e3 * statistics.median(later_s):8.1f} ms "
            f"({1e3 * min(later_s):.1f} to {1e3 * max(later_s):.1f})"
        )


if __name__ == "__main__":
    main()
