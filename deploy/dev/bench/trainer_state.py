"""How long a state takes to a joiner from one donor and from several, and to a checkpoint by one rank and by several.

Prints Markdown. All processes run on this machine: the links are loopback and the disk is one, so what is shared here
(memory, cores, disk) bounds every row alike, and a gain by more donors or writers can only show where a real network or
store gives each of them a path of its own. The pause is what training waits for: the copy to host memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from heterotrain.checkpoints.checkpoint import CheckpointFolder, Label
from heterotrain.checkpoints.writer import CheckpointWriter, WriteRequest, WriteResult
from heterotrain.network.connection_setup import c10d
from heterotrain.network.group import Group, SocketFilter
from heterotrain.state.parts import sizes_bytes
from heterotrain.state.tensors import flatten
from heterotrain.state.transfer import Roles, exchange
from machine import free_port, machine

MOST_DONORS = 3
TENSORS = 24


def a_state(size_bytes: int) -> dict[str, list[torch.Tensor]]:
    """Return a state of equal tensors."""
    return {"x": [torch.randn(size_bytes // 4 // TENSORS) for _ in range(TENSORS)]}


def rank_main(rank: int, ranks: int, *, port: int, folder: str, size_bytes: int, repeats: int) -> None:
    """Be one rank: the last one is the joiner, the others hold the state."""
    torch.set_num_threads(1)
    store = c10d.TCPStore("127.0.0.1", port, ranks, rank == 0)
    group = Group(rank=rank, world_size=ranks, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    group.build(connect=lambda: store, backend="gloo", own_address=None)
    state = a_state(size_bytes)
    found: dict[str, list[float]] = {}
    roles = Roles(leader=0, donors=tuple(range(ranks - 1)), receivers=(ranks - 1,), cold_start=False)
    seconds = found.setdefault(f"to one joiner, {ranks - 1} donor(s)", [])
    for _ in range(repeats):
        group.gather_now([0.0])
        began_s = time.perf_counter()
        exchange(group, roles, lambda: flatten(state))
        seconds.append(time.perf_counter() - began_s)
    for writers in (1, ranks) if ranks > MOST_DONORS else ():
        checkpoints(group, state, Path(folder), writers=writers, repeats=repeats, found=found)
    Path(folder, f"found-{rank}").write_text(json.dumps(found))
    group.close()


def checkpoints(
    group: Group, state: dict[str, list[torch.Tensor]], folder: Path, *, writers: int, repeats: int,
    found: dict[str, list[float]],
) -> None:  # fmt: skip
    """Write checkpoints by the first ``writers`` ranks together."""
    done: list[WriteResult] = []
    writer = CheckpointWriter(CheckpointFolder(folder, max_to_keep=1), on_done=done.append)
    whole = sum(sizes_bytes(state["x"]))
    if group.rank < writers:
        writer.prepare(whole * (group.rank + 1) // writers - whole * group.rank // writers, pin=False)
    pauses = found.setdefault(f"checkpoint by {writers} rank(s): pause", [])
    totals = found.setdefault(f"checkpoint by {writers} rank(s): durable", [])
    for step in range(repeats):
        label = Label(generation=1, step=step, mark=int(group.gather_now([float(1000 * writers + step)])[0][0]))
        began_s = time.perf_counter()
        if group.rank < writers:
            request = WriteRequest(label=label, index=group.rank, count=writers, completes=group.rank == 0)
            pauses.append(writer.start_part(state, request))
            writer.wait()
            totals.append(time.perf_counter() - began_s)
            if done[-1].failure:
                raise SystemExit(done[-1].failure)
        group.gather_now([0.0])


def main() -> None:
    """Run all ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=600, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--folder", default="/var/tmp", help="where checkpoints go")  # noqa: S108 - a disk, unlike /tmp
    options = parser.parse_args()
    size_bytes = options.mb * 1_000_000
    if options.rank is not None:
        rank_main(
            options.rank,
            options.ranks,
            port=options.port,
            folder=options.folder,
            size_bytes=size_bytes,
            repeats=options.repeats,
        )
        return
    rows: dict[str, list[float]] = {}
    head = machine()
    for ranks in range(2, MOST_DONORS + 2):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            common = ["--ranks", str(ranks), "--port", str(free_port()), "--folder", folder,
                      "--mb", str(options.mb), "--repeats", str(options.repeats)]  # fmt: skip
            processes = [
                subprocess.Popen([sys.executable, __file__, "--rank", str(rank), *common]) for rank in range(ranks)
            ]
            codes = [process.wait() for process in processes]
            if any(codes):
                raise SystemExit(f"a rank failed: {codes}")
            found = [json.loads(Path(folder, f"found-{rank}").read_text()) for rank in range(ranks)]
            for name, values in found[0].items():
                rows[name] = found[-1][name] if "joiner" in name else values
    print(f"{head}\n\nA state of {options.mb} MB in {TENSORS} tensors, median of {options.repeats} (least to most).\n")
    print("| what | seconds |\n| --- | --- |")
    for name, values in rows.items():
        print(f"| {name} | {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) |")


if __name__ == "__main__":
    main()
