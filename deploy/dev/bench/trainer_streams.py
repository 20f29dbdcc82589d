"""Samples a second from a data set that can only be iterated: one rank reads for all, or every rank reads all of it.

Ranks are forks of this process. A sample is a row of bytes that is decompressed when it is read, as an image or a text
would be decoded. The model is one small layer, so reading and sending take nearly all of a step. The third way is a
data set with indices, of which each rank reads its own samples only. The ways take turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heterotrain.session
import torch
from machine import free_port, machine

Sample = tuple[torch.Tensor, int]
WAYS = {
    "one": "one rank reads and sends",
    "all": "every rank reads all",
    "indices": "each rank reads its own",
}
SIZES = ((1 << 10, 240), (150 << 10, 48))
"""Bytes of a row, and samples of a step."""
FIRST_STEPS = 5
"""Steps before the measurement: ranks meet, and buckets are made."""


class Rows(torch.utils.data.Dataset[Sample]):
    """Rows of half random bytes."""

    def __init__(self, row_bytes: int, samples: int) -> None:
        half = torch.randint(256, (row_bytes // 2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self._block = zlib.compress(torch.cat([half, torch.zeros_like(half)]).numpy().tobytes(), 1)
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Sample:
        """Read one sample."""
        if index >= self._samples:
            raise IndexError
        return torch.frombuffer(bytearray(zlib.decompress(self._block)), dtype=torch.uint8), index


class Stream(torch.utils.data.IterableDataset[Sample]):
    """The same rows in their order."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Sample]:
        return (self._rows[index] for index in range(len(self._rows)))


def train(way: str, row_bytes: int, batch_samples: int, steps: int, out: Path) -> None:
    """Train some steps and write the samples a second and the bytes that this rank has sent a sample."""
    torch.set_num_threads(1)
    job = heterotrain.init(epochs=1, batch_samples=batch_samples)
    model = job.wrap(torch.nn.Linear(16, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    rows = Rows(row_bytes, batch_samples * steps)
    options: dict[str, Any] = {} if way == "indices" else {"readers": way}
    begun_s = 0.0
    for step in job.steps(rows if way == "indices" else Stream(rows), **options):
        if step.number == FIRST_STEPS:
            begun_s = time.perf_counter()
        with step:
            for x, _ in step.micro_batches():
                step.backward(model(x[:, :16] / 255).square().mean())
            step.apply(optimizer)
    elapsed_s = time.perf_counter() - begun_s
    out.write_text(str(batch_samples * (steps - FIRST_STEPS) / elapsed_s))


def measured(way: str, row_bytes: int, batch_samples: int, *, ranks: int, steps: int) -> float:
    """Return samples a second of all ranks together."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                    "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
                }  # fmt: skip
                log = os.open(Path(folder) / f"log-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(log, 1)
                os.dup2(log, 2)
                try:
                    train(way, row_bytes, batch_samples, steps, Path(folder) / f"rate-{rank}")
                except BaseException:  # noqa: BLE001  # as the interpreter does it
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        if not (Path(folder) / "rate-0").exists():
            sys.exit((Path(folder) / "log-0").read_text())
        return float((Path(folder) / "rate-0").read_text())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way, in turn")
    arguments = parser.parse_args()
    print(machine())
    print("\n| row, samples a step | " + " | ".join(WAYS.values()) + " |\n|" + " --- |" * (len(WAYS) + 1), flush=True)
    for row_bytes, batch_samples in SIZES:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way, rates in found.items():
                rates.append(measured(way, row_bytes, batch_samples, ranks=arguments.ranks, steps=arguments.steps))
        figures = [
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})" for rates in found.values()
        ]
        print(f"| {row_bytes >> 10} KiB, {batch_samples} | " + " | ".join(figures) + " |", flush=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
