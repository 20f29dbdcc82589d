"""Price of BatchNorm's statistics: over the global batch, over each micro-batch, and frozen. Prints Markdown.

Needs torch, heterotrain and two otherwise idle cores. Two ranks with one thread each train one residual network. A few
steps with each kind of statistics alternate in the same processes, so that other load affects all three. Each block
gives the ratios to frozen statistics (layers in eval mode), which cost nothing. The figure is the median of the ratios
with its 95 % interval, for wall time and for the processor time of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import heterotrain
import torch
from heterotrain.numerics.batch_norm import BatchNorm
from machine import free_port, machine
from models import Numbers, ready
from ratios import median_interval
from trainer_overhead import seconds_of

KINDS = ("frozen", "local", "global")
STEPS = 3
"""Steps of one kind in a turn."""


class Residual(torch.nn.Module):
    """Two convolutions with BatchNorm and a sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = (torch.nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, C, H, W) of (N, C, H, W)."""
        hidden = torch.relu(self.first(self.one(x)))
        return torch.relu(x + self.second(self.two(hidden)))


def network(channels: int, blocks: int) -> torch.nn.Module:
    """Return a residual network for images of 32 by 32 with ``2 blocks + 1`` layers of BatchNorm."""
    stem = [torch.nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), torch.nn.BatchNorm2d(channels)]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, 10)]
    return torch.nn.Sequential(*stem, *[Residual(channels) for _ in range(blocks)], *head)


def choose(job: heterotrain.Job, model: torch.nn.Module, kind: str) -> None:
    """Switch all BatchNorm layers to a kind of statistics, between two steps."""
    numerics = job._numerics  # noqa: SLF001  # a script cannot switch
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.__class__ = torch.nn.BatchNorm2d
            layer.train(kind != "frozen")
    numerics._mixing = []  # noqa: SLF001  # as above
    numerics._batch_norm = BatchNorm.GLOBAL if kind == "global" else BatchNorm.LOCAL  # noqa: SLF001  # as above
    numerics.layers_changed(model)


def train(job: heterotrain.Job, model: torch.nn.Module) -> Iterator[None]:
    """Train; one step a turn."""
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    for step in job.steps(Numbers((3, 32, 32)), collate=ready):
        with step:
            for x, y in step.micro_batches():
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
            step.apply(optimizer)
        yield


def work(channels: int, blocks: int, samples: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Measure in this rank; return wall and processor seconds of a step for each kind and block."""
    torch.set_num_threads(1)
    job = heterotrain.init(epochs=10**9, batch_samples=2 * samples)
    torch.manual_seed(0)
    model = job.wrap(network(channels, blocks))
    turns = train(job, model)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for block in range(rounds + 2):
        for kind in KINDS[block % 3 :] + KINDS[: block % 3]:
            choose(job, model, kind)
            next(turns)
            found[kind].append(seconds_of(turns, STEPS))
    return {kind: pairs[2:] for kind, pairs in found.items()}  # the first two warm up


def measure(*arguments: int) -> dict[str, Any]:
    """Start two ranks; return what rank 0 measured."""
    command = [sys.executable, __file__, "--rank", *map(str, arguments)]
    environ = os.environ | {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def main() -> None:
    """Print one row for each size of the network and the share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="blocks for each row (40)")
    parser.add_argument("--rank", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(work(*arguments.rank)), flush=True)
        os._exit(0)  # the job is not finished, and its termination message would report a failure
    print(machine())
    print("\n| layers, channels, samples a rank | frozen | local, wall | processor | global, wall | processor |")
    print(f"|{' --- |' * 6}")
    for channels, blocks, samples in ((16, 9, 4), (16, 9, 32), (64, 9, 8), (16, 26, 8)):
        found = measure(channels, blocks, samples, arguments.rounds)
        cells = [f"{2 * blocks + 1}, {channels}, {samples}"]
        cells.append(f"{statistics.median(wall for wall, _ in found['frozen']) * 1e3:.1f} ms")
        for kind in ("local", "global"):
            for which in range(2):
                ratios = [own[which] / base[which] - 1 for own, base in zip(found[kind], found["frozen"], strict=True)]
                middle, low, high = median_interval(ratios)
                cells.append(f"{middle:+.0%} ({low:+.0%} to {high:+.0%})")
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
