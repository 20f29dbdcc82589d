"""One rank of ``gpu_mixed``: a training script on a GPU, on a part of one, or on processors.

``train`` is a script as users write it. ``alone`` trains the same model on the same device in plain PyTorch, as many
samples a step as the rank has in the job, and exchanges nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from models import Numbers, convolutions, ready

IMAGE = (3, 32, 32)
WARM_STEPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a rank computes on.

    Attributes:
        pool: name of its kind.
        gpu: whether it is a GPU.
        percent: of the GPU's threads that it may use, where several processes share it by MPS; 0 for all.
        threads: of the processor.
    """

    pool: str
    gpu: bool = True
    percent: int = 0
    threads: int = 1

    def environment(self) -> dict[str, str]:
        """Return variables that have to be set before the process starts."""
        own = {"OMP_NUM_THREADS": str(self.threads), "GLOO_SOCKET_IFNAME": "lo"}
        if not self.gpu:
            return own | {"CUDA_VISIBLE_DEVICES": ""}
        if not self.percent:
            return own
        return own | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(self.percent)}

    def use(self, number: int) -> torch.device:
        """Take this device for the process."""
        torch.set_num_threads(self.threads)
        if not self.gpu:
            return torch.device("cpu")
        torch.cuda.set_device(0)
        if self.percent:
            from cuda.shared_card import pretend  # noqa: PLC0415  # of the tests; only for several ranks on one card

            pretend(f"host-{number}")
        return torch.device("cuda", 0)


def train(device: Device, number: int, *, channels: int) -> None:
    """Train until the process is ended."""
    import heterotrain  # noqa: PLC0415  # ``alone`` must not load it

    device.use(number)
    job = heterotrain.init()
    torch.manual_seed(0)
    model = job.wrap(convolutions(channels))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
    for step in job.steps(Numbers(IMAGE, samples=10**6), collate=ready):
        with step:
            for x, y in step.micro_batches():
                step.backward(torch.nn.functional.cross_entropy(model(x), y))
            step.apply(optimizer)


def alone(device: Device, number: int, *, channels: int, share: int, seconds: float, half: bool, folder: Path) -> None:
    """Print samples a second, while the other ranks do the same at the same time."""
    place = device.use(number)
    torch.manual_seed(0)
    model = convolutions(channels).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    data = Numbers(IMAGE, samples=10**6)

    def step(at: int) -> None:
        x, y = data.__getitems__(list(range(at * share, (at + 1) * share)))
        if device.gpu:
            x, y = x.pin_memory().to(place, non_blocking=True), y.pin_memory().to(place, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(place.type, torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if device.gpu and at % 4 == 0:
            torch.cuda.current_stream().synchronize()  # no further ahead than a few steps

    for at in range(WARM_STEPS):
        step(at)
    (folder / f"warm-{number}").touch()
    while not (folder / "go").exists():
        step(0)
    began_s, steps = time.perf_counter(), 0
    while time.perf_counter() - began_s < seconds:
        step(steps)
        steps += 1
    if device.gpu:
        torch.cuda.current_stream().synchronize()
    took_s = time.perf_counter() - began_s
    end_s = time.perf_counter() + seconds / 4
    while time.perf_counter() < end_s:  # until the others have finished, too
        step(0)
    print(json.dumps({"samples_per_s": steps * share / took_s}), flush=True)


def main() -> None:
    """Do what the first argument says, with the keywords of the second one (JSON)."""
    keywords = json.loads(sys.argv[2])
    device, number = Device(**keywords.pop("device")), int(keywords.pop("number"))
    if sys.argv[1] == "alone":
        alone(device, number, folder=Path(keywords.pop("folder")), **keywords)
    else:
        train(device, number, **keywords)
    os._exit(0)


if __name__ == "__main__":
    main()
