"""Transfer times of a state from one, two and three donors to one joiner, and from one donor to several joiners.

Prints Markdown; needs root. Every rank has a network namespace with a link to one switch. Token buckets (tc tbf) on
both ends of each link limit its rate in each direction. A joiner's own link bounds every row; if the donors' links are as
fast, one donor fills it. The namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from machine import machine, run

SWITCH = "htswitch"
MOST_DONORS = 3
PORT = 29400
CASES = (("1gbit", "1gbit"), ("1gbit", "250mbit"))
"""The joiner's rate and the donors'."""
JOINERS = (1, 2, 3)
"""Of one donor, all with the first case's rates."""


def node(rank: int) -> str:
    """Return the name of a rank's namespace."""
    return f"htnode{rank}"


def address(rank: int) -> str:
    """Return a rank's address."""
    return f"10.213.8.{rank + 1}"


@contextlib.contextmanager
def network(rates: list[str]) -> Iterator[None]:
    """A switch and a node on a cable of each of these rates."""
    names = [SWITCH, *(node(rank) for rank in range(len(rates)))]
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "br0", "up")
        for rank, rate in enumerate(rates):
            port = f"p{rank}"
            run("ip", "link", "add", "eth0", "netns", node(rank), "type", "veth", "peer", "name", port, "netns", SWITCH)
            run("ip", "-n", SWITCH, "link", "set", port, "master", "br0")
            run("ip", "-n", node(rank), "address", "add", f"{address(rank)}/24", "dev", "eth0")
            for name, device in ((node(rank), "eth0"), (SWITCH, port)):
                run("ip", "-n", name, "link", "set", device, "up")
                limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", *limit)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def rank_main(rank: int, ranks: int, *, donors: int, size_bytes: int, repeats: int) -> list[float]:
    """Run one rank: the first ``donors`` ranks hold the state, the others join.

    Returns:
        Seconds until all ranks have the state, for each repetition.
    """
    import torch  # noqa: PLC0415  # not in the driver
    from heterotrain.network.connection_setup import c10d  # noqa: PLC0415  # not in the driver
    from heterotrain.network.group import Group, SocketFilter  # noqa: PLC0415  # not in the driver
    from heterotrain.state.tensors import flatten  # noqa: PLC0415  # not in the driver
    from heterotrain.state.transfer import Roles, exchange  # noqa: PLC0415  # not in the driver
    from trainer_state import a_state  # noqa: PLC0415  # not in the driver

    torch.set_num_threads(1)
    store = c10d.TCPStore(address(0), PORT, ranks, rank == 0)
    group = Group(rank=rank, world_size=ranks, sockets=SocketFilter(members=frozenset(), excluded_ports=frozenset()))
    group.build(connect=lambda: store, backend="gloo", own_address=address(rank))
    state = a_state(size_bytes)
    roles = Roles(leader=0, donors=tuple(range(donors)), receivers=tuple(range(donors, ranks)), cold_start=False)
    found = []
    for _ in range(repeats):
        group.gather_now([0.0])
        began_s = time.perf_counter()
        exchange(group, roles, lambda: flatten(state))
        group.gather_now([0.0])
        found.append(time.perf_counter() - began_s)
    group.close()
    return found


def measured(
    donors: int, joiners: int = 1, *, joiner_rate: str, donor_rate: str, mb: int, repeats: int
) -> list[float]:  # fmt: skip
    """Return the seconds until the last joiner has everything.

    Raises:
        SystemExit: a rank failed.
    """
    ranks = donors + joiners
    with network([donor_rate] * donors + [joiner_rate] * joiners):
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", node(rank), sys.executable, __file__,
                 "--rank", str(rank), "--ranks", str(ranks), "--donors", str(donors), "--mb", str(mb),
                 "--repeats", str(repeats)],
                stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        said = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"a rank failed: {[process.returncode for process in processes]}")
    return list(map(float, json.loads(said[-1].splitlines()[-1])))


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=200, help="size of the state")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--donors", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        found = rank_main(
            options.rank, options.ranks, donors=options.donors, size_bytes=options.mb * 1_000_000,
            repeats=options.repeats,
        )  # fmt: skip
        print(json.dumps(found))
        return
    sys.path.insert(0, str(Path(__file__).parent))
    print(f"{machine()}\n\nA state of {options.mb} MB to one joiner, median of {options.repeats} (least to most).\n")
    counts = range(1, MOST_DONORS + 1)
    print(f"| joiner's link | each donor's | {' | '.join(f'{n} donor(s)' for n in counts)} |")
    print("| --- | --- |" + " --- |" * MOST_DONORS)
    for joiner_rate, donor_rate in CASES:
        cells = []
        for donors in counts:
            found = measured(
                donors, joiner_rate=joiner_rate, donor_rate=donor_rate, mb=options.mb, repeats=options.repeats
            )
            cells.append(f"{statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})")
        print(f"| {joiner_rate}/s | {donor_rate}/s | {' | '.join(cells)} |", flush=True)
    joiner_rate, donor_rate = CASES[0]
    print(f"\n| from one donor, every link {donor_rate}/s, to | seconds |\n| --- | --- |")
    for joiners in JOINERS:
        found = measured(
            1, joiners, joiner_rate=joiner_rate, donor_rate=donor_rate, mb=options.mb, repeats=options.repeats
        )
        low, high = min(found), max(found)
        print(f"| {joiners} joiner(s) | {statistics.median(found):.2f} s ({low:.2f} to {high:.2f}) |", flush=True)


if __name__ == "__main__":
    main()
