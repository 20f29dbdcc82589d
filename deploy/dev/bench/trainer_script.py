"""One worker of ``trainer_pauses.py``: the same small training with this trainer, under torchrun, or with torchft.

Each step sleeps for twenty milliseconds instead of computing, because three processes on few cores would disturb each
other. Every committed step is a line in ``$FOLDER/$NAME.commits``: its number and the time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch

COMPUTE_S = 0.02
SHARE_SAMPLES = 16
WIDTH = int(os.environ.get("WIDTH", "256"))


def net() -> torch.nn.Module:
    """Return the model: four linear layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return its optimizer, with state."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a batch's loss after the simulated compute time."""
    time.sleep(COMPUTE_S)
    loss: torch.Tensor = model(x).square().mean()
    return loss


def note(log: TextIO, step: int) -> None:
    """Log a committed step."""
    log.write(f"{step} {time.time():.6f}\n")
    log.flush()


def with_heterotrain(log: TextIO) -> None:
    """Train until the shutdown."""
    import heterotrain  # noqa: PLC0415  # absent in the interpreters of others

    job = heterotrain.init()
    model = job.wrap(net())
    optimizer = job.optimizer(optimizer_of(model))
    for step in job.steps(torch.utils.data.TensorDataset(torch.ones(100_000, WIDTH))):
        with step:
            for (x,) in step.micro_batches():
                step.backward(loss_of(model, x))
            step.apply(optimizer)
        if step.committed:
            note(log, step.number)


def with_torchrun(log: TextIO) -> None:
    """Train with DistributedDataParallel from a new state; lost work at a restart does not count."""
    import torch.distributed as dist  # noqa: PLC0415  # each way of training loads only its own

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    folder = Path(os.environ["FOLDER"])
    (folder / f"rank-{dist.get_rank()}.pid").write_text(str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(net())
    optimizer = optimizer_of(model)
    step = 0
    while True:
        optimizer.zero_grad()
        loss_of(model, torch.ones(SHARE_SAMPLES, WIDTH)).backward()
        optimizer.step()
        step += 1
        note(log, step)


def with_torchft(log: TextIO) -> None:
    """Train as one replica group of one process; survivors keep their state."""
    import torch.distributed as dist  # noqa: PLC0415  # each way of training loads only its own
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: PLC0415  # as above

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]  # torch's __init__ does not list it
    model: Any = net()
    plain = optimizer_of(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=2, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=os.environ["NAME"], timeout=timedelta(seconds=10), rank=0, world_size=1,
        store_addr="127.0.0.1", store_port=store.port,
    )  # fmt: skip
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    while True:
        optimizer.zero_grad()
        loss_of(wrapped, torch.ones(SHARE_SAMPLES, WIDTH)).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            note(log, manager.current_step())


def main(kind: str) -> None:
    """Train with one of the three systems."""
    torch.set_num_threads(1)
    name = os.environ.get("NAME") or f"rank-{os.environ['RANK']}"
    kinds = {"heterotrain": with_heterotrain, "torchrun": with_torchrun, "torchft": with_torchft}
    with (
        (Path(os.environ["FOLDER"]) / f"{name}.commits").open("a", encoding="ascii") as log,
        contextlib.suppress(KeyboardInterrupt),
    ):
        kinds[kind](log)


if __name__ == "__main__":
    main(sys.argv[1])
