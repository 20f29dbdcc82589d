"""Steps over a slow link with and without compressed gradients, compared with DistributedDataParallel.

Prints Markdown; needs root. Each of two ranks has its own network namespace, and a token bucket (tc tbf) on each end of
the link between them limits its rate. Rounds of this trainer and of DistributedDataParallel (with torch's own
compression hooks) alternate in the same two processes. The namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from machine import machine, run

NAMES = ("htbench0", "htbench1")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
CASE = 3
"""Of ``models.CASES``: 8.4 million parameters, 34 MB of gradients."""
RATES = {"1gbit": 4, "200mbit": 3}
"""Rates and how many rounds each gets."""
STEPS = 3


@contextlib.contextmanager
def cable(rate: str) -> Iterator[None]:
    """Two namespaces and a cable of this rate between them."""
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *limit)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def work(compression: str, rounds: int) -> dict[str, list[float]]:
    """Measure both in this rank: seconds of a step, round by round."""
    import heterotrain  # noqa: PLC0415 - not in the driver
    import torch  # noqa: PLC0415  # not in the driver
    from models import CASES  # noqa: PLC0415  # not in the driver
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415  # not in the driver
    from trainer_overhead import bare, ours, seconds_of  # noqa: PLC0415  # not in the driver

    torch.set_num_threads(1)
    case = CASES[CASE]
    hooks: dict[str, Callable[..., Any]] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    job = heterotrain.init(
        epochs=10**9, batch_samples=2 * case.share_samples, compression=compression, precision="fp32"
    )
    turns = {"ours": ours(case, job)}
    next(turns["ours"])
    turns["bare"] = bare(case, hook=hooks.get(compression))
    found: dict[str, list[float]] = {"bare": [], "ours": []}
    for name in found:
        seconds_of(turns[name], 2)
    for turn in range(rounds):
        for name in ("bare", "ours") if turn % 2 == 0 else ("ours", "bare"):
            found[name].append(seconds_of(turns[name], STEPS)[0])
    return found


def measure(compression: str, rounds: int) -> dict[str, list[float]]:
    """Start a rank in each namespace; return what rank 0 measured."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29611", "GLOO_SOCKET_IFNAME": "eth0"}
    common |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    script = [sys.executable, __file__, "--compression", compression, "--rounds", str(rounds)]
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *script], stdout=subprocess.PIPE, text=True,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, name in enumerate(NAMES)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(signal.SIGKILL)
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def main() -> None:
    """Print one row for each rate and format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compression", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compression is not None:
        print(json.dumps(work(arguments.compression, arguments.rounds)), flush=True)
        os._exit(0)  # the job is not finished, and its termination message would report a failure
    if os.geteuid() != 0 or not Path("/sys/module").exists():
        raise SystemExit("network namespaces need root on Linux: the figures over a slow link were not taken")
    print(machine())
    print("\n| link | gradients travel as | a step, bare DDP | a step, this trainer |\n| --- | --- | --- | --- |")
    for rate, rounds in RATES.items():
        with cable(rate):
            for compression in ("none", "fp16", "bf16"):
                found = measure(compression, rounds)
                cells = (f"{statistics.median(found[who]):.3f} s" for who in ("bare", "ours"))
                form = "fp32" if compression == "none" else compression
                print(f"| {rate}/s | {form} | {' | '.join(cells)} |", flush=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
