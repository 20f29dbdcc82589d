"""What ranks measure of links between namespaces whose cables have a known rate. Markdown; needs root.

Stages send tensors to each other, and parts of a unit go between three ranks, as in steps; ranks compute for different
times in between, by waits.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import torch
from machine import machine
from namespaces import Bridge, enter
from torch import distributed as dist

ROUNDS = 30
COMPUTE_S = (0.02, 0.05, 0.03)
"""Of each rank between two exchanges."""
RATES = ("200mbit", "1gbit", "2gbit")
"""Of every cable in both directions."""


def rank_of(kind: str, rank: int, namespace: str, addresses: list[str], found: Any) -> None:
    """Run one rank; put what it has measured into a queue."""
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"], ranks = "eth0", len(addresses)
    from heterotrain.layouts.link_speeds import LinkSpeeds  # noqa: PLC0415  # threads start with torch's groups
    from heterotrain.layouts.neighbours import Neighbours  # noqa: PLC0415  # as above
    from heterotrain.layouts.part_messages import Exchange  # noqa: PLC0415  # as above
    from heterotrain.network.gloo.member_group import MemberGroup  # noqa: PLC0415  # as above

    torch.set_num_threads(1)
    store = dist.TCPStore(addresses[0], 29500, ranks, rank == 0)  # type: ignore[attr-defined]  # torch's __init__ does not list it
    group, speeds = MemberGroup(rank=rank, world_size=ranks), LinkSpeeds()
    group.connect(store, kind, check=lambda: None, addresses=addresses)
    speeds.form({other: "pool" for other in range(ranks) if other != rank})
    group.on_received = speeds.received
    neighbours = Neighbours(group, torch.device("cpu"))
    values, small = torch.ones(2**20), torch.ones(16)
    for _ in range(ROUNDS):
        time.sleep(COMPUTE_S[rank])
        if kind == "stages":
            other = 1 - rank
            if rank == 0:
                neighbours.send(values, other)
                neighbours.receive(other)
            else:
                neighbours.receive(other)
                neighbours.send(values, other)
            neighbours.flush()
        else:
            Exchange(group, [values] * ranks, [torch.empty_like(values) for _ in range(ranks)]).finish()
            Exchange(group, [small] * ranks, [torch.empty_like(small) for _ in range(ranks)]).finish()
    found.put(speeds.links())
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(ranks)])


def measured(kind: str, rate: str) -> tuple[float, float]:
    """Return the fastest bandwidth in Mbit/s and latency in ms that any rank has measured."""
    ranks = 2 if kind == "stages" else 3
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    with Bridge(rate=rate) as bridge:
        places = [bridge.add() for _ in range(ranks)]
        addresses = [address for _, address in places]
        processes = [
            context.Process(target=rank_of, args=(kind, rank, places[rank][0], addresses, found), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        links = [link for _ in processes for link in found.get(timeout=40)]
        for process in processes:
            process.join(30)
    bandwidth = max(value for _, value, _ in links if value is not None)
    return bandwidth * 8 / 1e6, min(value for *_, value in links if value is not None) * 1e3


def main() -> None:
    """Print the table."""
    print(machine())
    print("\n| cable | between | measured bandwidth | measured latency |\n| --- | --- | ---: | ---: |")
    for rate in RATES:
        for kind in ("stages", "parts of a unit"):
            bandwidth, latency = measured(kind, rate)
            print(f"| {rate} | {kind} | {bandwidth:.0f} Mbit/s | {latency:.2f} ms |", flush=True)


if __name__ == "__main__":
    main()
