"""Proof on one GPU that an update queued behind the trainer's gate is exact.

The gate (``heterotrain.exchange.gate``) is ``found_inf`` of torch's fused optimizers, exactly 0.0 or 1.0: closed if a
flag in page-locked memory is up, or if the gradient is not finite. Clipping happens on the device, by ``grad_scale``.

1. Bits: behind a closed gate, weights, moments and step counts stay as they are, and the next step is what it would
   have been without the closed one.
2. Aborts: two processes share the card (``NCCL_HOSTID``). One is killed in the middle of a sum. The other raises the
   flag, then aborts the communicator, while update and next forward pass are queued. Its weights must not change.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heterotrain.exchange.gate import Gate
from heterotrain.network import nccl
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.numerics.fused import take_step
from models import mlp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ABORT_S = 20.0
"""The device must have come to an end by then."""
Parameters = Sequence[torch.nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True, fused=True),
}


def a_flag(*, is_up: bool = False) -> AbortFlag:
    """Return a flag that the device can read."""
    flag = AbortFlag(is_pinned=DEVICE.type == "cuda")
    if is_up:
        flag.lift()
    return flag


def kept(parameters: Parameters, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return copies of weights, moments and step counts."""
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [each.detach().clone() for each in (*parameters, *states)]


def same(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Return whether all bits are equal."""
    return len(before) == len(after) and all(map(torch.equal, before, after))


# -- 1: bits -----------------------------------------------------------------------------------------------------------


def skips_exactly(kind: str, *, after: int, non_finite: bool, channels_last: bool) -> bool:
    """Return whether a step behind a closed gate leaves no trace.

    Args:
        kind: of the optimizer.
        after: ordinary steps before it.
        non_finite: close the gate by the gradient, not by the flag.
        channels_last: memory format of the model.
    """
    form = torch.channels_last if channels_last else torch.contiguous_format
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)
    x, y = x.to(DEVICE, memory_format=form), y.to(DEVICE)

    def trained(*, skip: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(0)
        layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))
        model = torch.nn.Sequential(*layers).to(DEVICE, memory_format=form)  # type: ignore[call-overload]  # as above
        optimizer = OPTIMIZERS[kind](model.parameters())

        def step(*, closed: bool) -> None:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            (loss * float("nan") if closed and non_finite else loss).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            take_step(optimizer, 1.0, Gate(gradients, a_flag(is_up=closed and not non_finite)))

        parameters = list(model.parameters())
        for _ in range(after):
            step(closed=False)
        before = kept(parameters, optimizer)
        if skip:
            step(closed=True)
        now = kept(parameters, optimizer)
        step(closed=False)
        return before, now, kept(parameters, optimizer)

    before, now, then = trained(skip=True)
    # The first step makes the state of the optimizer, so only the weights can be compared there.
    return same(before, now[: len(before)]) and same(then, trained(skip=False)[2])


def show_bits() -> None:
    """Print one row for steps after the first, and one for the first step, which makes the optimizer's state."""
    for after, what in ((3, "later"), (0, "first")):
        ways = [(kind, bad, last) for kind in OPTIMIZERS for bad in (False, True) for last in (False, True)]
        wrong = [
            f"{kind}{', non-finite' if bad else ''}{', channels_last' if last else ''}"
            for kind, bad, last in ways
            if not skips_exactly(kind, after=after, non_finite=bad, channels_last=last)
        ]
        figure = f"{len(ways) - len(wrong)} of {len(ways)}" + (f"; not {'; '.join(wrong)}" if wrong else "")
        goal, met = ("all", _yes(not wrong)) if after else ("all but SGD, which starts its momentum there", "-")
        print(f"| a closed gate keeps all bits, {what} steps | {figure} | {goal} | {met} |", flush=True)


def _yes(met: bool) -> str:  # noqa: FBT001  # one value, one word
    return "yes" if met else "no"


# -- 2: aborts in mid-sum ----------------------------------------------------------------------------------------------


def abort_rank(rank: int, folder: str, seconds: float) -> None:
    """Be one of two ranks on the card; rank 1 dies in the middle of the fifth step's sums."""
    os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(0)
    c10d: Any = dist
    group = nccl.nccl_group(c10d.FileStore(str(Path(folder) / "store"), 2), "gate", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = mlp(2048, 12).to(DEVICE)
    optimizer, parameters, flag = OPTIMIZERS["AdamW"](model.parameters()), list(model.parameters()), a_flag()
    x, y = torch.randn(64, 2048, device=DEVICE), torch.randint(10, (64,), device=DEVICE)

    def gradients() -> list[torch.Tensor]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        return [p.grad for p in parameters if p.grad is not None]

    def queue() -> Gate:
        found = gradients()
        for work in [group.allreduce([each], c10d.AllreduceOptions()) for each in found]:
            work.wait()  # the stream waits, and the host goes on
        gate = Gate(found, flag)
        take_step(optimizer, 1.0, gate)
        return gate

    for _ in range(4):
        assert queue().read().was_open  # noqa: S101  # nothing has happened yet
    before = kept(parameters, optimizer)
    torch.cuda.synchronize()
    if rank == 1:
        for each in gradients()[: len(parameters) // 2]:
            group.allreduce([each], c10d.AllreduceOptions())
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)
    gate, verdicts = queue(), []
    with torch.no_grad():
        model(x)  # the next forward pass is queued, too
    time.sleep(0.5)
    nccl.abort([group], flag)
    reader = threading.Thread(target=lambda: verdicts.append(gate.read()), daemon=True)
    reader.start()
    reader.join(ABORT_S)
    was_open, is_same = [each.was_open for each in verdicts], same(before, kept(parameters, optimizer))
    print(f"  abort: ended {bool(verdicts)}, gate open {was_open}, state kept {is_same}", flush=True)
    os._exit(0 if was_open == [False] and is_same else 1)


def show_aborts(count: int) -> None:
    """Print one row: how many aborts in mid-sum left all weights and moments as they were."""
    good = 0
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--rank-seconds", str(0.005 * 3**number), "--folder", folder]
            environ = os.environ | {"TORCH_CPP_LOG_LEVEL": "FATAL"}  # a page of errors for each sum that is aborted
            ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environ) for rank in range(2)]
            try:
                good += ranks[0].wait(60) == 0
            except subprocess.TimeoutExpired:
                print("  abort: the surviving rank did not end", flush=True)
            for rank in ranks:
                rank.kill()
                rank.wait()
    print(f"| aborts in mid-sum that change no bit of the survivor | {good} of {count} | all | {_yes(good == count)} |")


def main() -> None:
    """Print the rows of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aborts", type=int, default=3, help="how many (3)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        abort_rank(options.rank, options.folder, options.rank_seconds)
    show_bits()
    if DEVICE.type == "cuda":
        show_aborts(options.aborts)


if __name__ == "__main__":
    main()
