"""Training scripts that are told to stop, outside an operator."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from distributed.scripts import begun, net, problem

GATE_STEP = 3


class Slow(torch.utils.data.Dataset[Any]):
    """The usual problem, in a data set of its own."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return problem(96)[index]


def hold(folder: Path, name: str) -> None:
    """Say that a place is reached, and wait there until the test opens the gate."""
    (folder / f"reached-{name}").touch()
    while not (folder / f"open-{name}").exists():
        time.sleep(0.01)


def check_own_process() -> None:
    """Check that a process of the script, forked from the same server as the loaders, can be terminated."""
    own = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    own.start()
    own.terminate()
    own.join()
    assert own.exitcode == -signal.SIGTERM


def start_loader(worker: int) -> None:
    """Hold a loader process before its first sample."""
    hold(Path(os.environ["FOLDER"]), f"loader-{worker}")


def train(*, folder: str, gates: bool = True, workers: int = 0, catches: bool = False, fails: int = -1) -> None:
    """Train in a process group of its own; the lowest rank waits in a step.

    ``gates``: whether it does; ``catches``: whether the script catches ``KeyboardInterrupt``, as many do;
    ``fails``: the rank that fails in that step, -1 for none.
    """
    os.setsid()
    os.environ["FOLDER"] = folder
    sys.modules["__main__"].__file__ = None  # loaders would import all that the zygote has loaded for others
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        loop(Path(folder), gates=gates, workers=workers, fails=fails)
    except KeyboardInterrupt:
        if not catches:
            raise
        (Path(folder) / "caught").touch()


def loop(folder: Path, *, gates: bool, workers: int, fails: int) -> None:
    """Train four epochs of six steps."""
    kept = {"checkpoint_uri": folder / "checkpoints", "checkpoint_interval_s": 86_400}
    job, model, optimizer, _ = begun(net(), epochs=4, batch_samples=16, **kept)
    started = []
    for step in job.steps(Slow(), workers=workers, worker_init_fn=start_loader if workers else None):
        started or print(f"begins with step {step.number}", flush=True)
        started.append(step.number)
        if workers:
            check_own_process()
        with step:
            if gates and step.number == GATE_STEP and job.is_leader:
                hold(folder, "step")
            if step.number == GATE_STEP and os.environ.get("RANK") == str(fails):
                raise ZeroDivisionError
            for x, y in step.micro_batches():
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    print(f"ends after step {started[-1] if started else None}", flush=True)
