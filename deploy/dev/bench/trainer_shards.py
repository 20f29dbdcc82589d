"""Peak memory of a rank (VmHWM) while ranks of one host hold a model together, in each layout.

Each rank is a process of its own. The model is a sequence of layers with Adam in FP32, so its training state is four
times its parameters. A model of next to nothing gives the memory that a process takes anyway; figures are without it.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from machine import free_port, machine

WAYS = {
    "data": "whole model on each rank",
    "sharded, built whole": "sharded, model made before `job.wrap`",
    "sharded": "sharded, model made by a function",
    "sharded, checkpointed": "sharded, by a function, `checkpoint_units=True`",
    "pipeline": "pipeline of as many stages",
}
STEPS = 4
ROWS = 8


def layers(width: int, units: int) -> torch.nn.Sequential:
    """Return the model."""
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(units)))


def train(way: str, width: int, units: int, out: Path) -> None:
    """Train some steps and write this rank's peak in bytes, and the bytes of parameters that it holds."""
    import heterotrain  # noqa: PLC0415  # only ranks need it

    torch.set_num_threads(1)
    job = heterotrain.init(batch_samples=ROWS, parallelism=way.partition(",")[0])
    whole = way in ("data", "sharded, built whole")
    model = job.wrap(
        layers(width, units) if whole else lambda: layers(width, units), checkpoint_units=way.endswith("checkpointed")
    )
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=1e-4))
    data = torch.utils.data.TensorDataset(torch.randn(ROWS * STEPS, width), torch.randn(ROWS * STEPS, width))
    for step in job.steps(data):
        with step:
            step.compute(torch.nn.functional.mse_loss)
            step.apply(optimizer)
    status = Path("/proc/self/status").read_text()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    out.write_text(str(int(peak) * 1024))


def measured(way: str, width: int, units: int, *, ranks: int) -> float:
    """Return the largest peak of the ranks in bytes."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            }  # fmt: skip
            arguments = ["--rank-of", way, "--width", str(width), "--units", str(units), "--out", f"{folder}/{rank}"]
            command = [sys.executable, __file__, *arguments]
            with (Path(folder) / f"log-{rank}").open("wb") as log:
                children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [child.wait() for child in children]
        if any(codes):
            sys.exit("\n".join((Path(folder) / f"log-{rank}").read_text()[-2000:] for rank in range(ranks)))
        return max(float((Path(folder) / str(rank)).read_text()) for rank in range(ranks))


def main() -> None:
    """Print the table, or be one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        train(arguments.rank_of, arguments.width, arguments.units, arguments.out)
        return
    size_mb = arguments.units * arguments.width * (arguments.width + 1) * 4 / 1e6
    print(machine())
    print(f"\n{arguments.units} layers, {size_mb:.0f} MB of parameters, {4 * size_mb:.0f} MB of training state.\n")
    print("| layout | " + " | ".join(f"{ranks} ranks" for ranks in arguments.ranks) + " |")
    print("| --- |" + " ---: |" * len(arguments.ranks), flush=True)
    for way, text in WAYS.items():
        figures = []
        for ranks in arguments.ranks:
            least = measured(way, 8, arguments.units, ranks=ranks)
            figures.append(f"{(measured(way, arguments.width, arguments.units, ranks=ranks) - least) / 1e6:.0f} MB")
        print(f"| {text} | " + " | ".join(figures) + " |", flush=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
