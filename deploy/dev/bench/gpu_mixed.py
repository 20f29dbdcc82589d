"""A job of ranks with different speeds on one card: even shares against learned ones, and the ceiling.

Each rank has a share of the card's threads by NVIDIA's Multi-Process Service, and gradients travel by NCCL. Where the
service is missing, a row says so.

This program is the operator: it reads the ranks' telemetry every second, decides by the operator's own functions, and
writes plans. When the shares have settled, even and learned ones take turns in the order ABBA. The ceiling has nothing
to do with the job: the same model in plain PyTorch on the same parts of the card at the same time, without exchange.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpu_mixed_rank import Device
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.plan import Boundary, BoundaryKind, Member, Plan, Rank
from heterotrain_core.split.proportion import evenly
from heterotrain_operator.cluster_state.telemetry import MemberId
from heterotrain_operator.prom.series_map import parse_everything
from heterotrain_operator.prom.snapshot import counter_name
from heterotrain_operator.prom.vector import VectorSample
from heterotrain_planner.perf.counters import CounterKey, Counters, Observation, observe
from heterotrain_planner.perf.merge import merge_old
from heterotrain_planner.planning.probe import PROBE_STEPS
from heterotrain_planner.planning.shares import MemberEvidence, SharesDecision, SharesRequest, decide_shares
from machine import free_port
from prometheus_client.parser import text_string_to_metric_families
from ratios import median_interval
from setups import Process as Worker
from setups import deliver, environment_of, is_ready, until

RANK = Path(__file__).with_name("gpu_mixed_rank.py")
EVERY_STEPS = 4
"""Steps between two boundaries at which new shares take effect."""
SETTLED = 6
"""Reads in a row after which the shares have settled when they stay."""
LONGEST_LEARNING_S = 25.0
TURN_S = 1.5
GOAL_RATIO = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Devices, and what they train.

    Attributes:
        name: for people.
        devices: by rank.
        channels: of the convolutions.
        batch: samples of a step.
        precision: of the forward pass.
    """

    name: str
    devices: tuple[Device, ...]
    channels: int
    batch: int
    precision: str


@dataclass(slots=True)
class Job:
    """Running ranks, with what the operator knows of them."""

    mixture: Mixture
    folder: Path
    workers: list[Worker] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    counters: dict[CounterKey, Counters] = field(default_factory=dict)
    plan: Plan | None = None

    def start(self) -> None:
        """Start all ranks and wait until they are ready for a plan."""
        config = TrainingConfig(
            epochs=10**6, base_batch_samples=self.mixture.batch, precision=self.mixture.precision.upper()
        )  # fmt: skip
        for number, device in enumerate(self.mixture.devices):
            worker = Worker(f"w{number}", 0, free_port(), free_port())
            plans = self.folder / worker.name
            plans.mkdir()
            environ = environment_of(worker, self.folder, plans, config) | device.environment()
            arguments = {"device": asdict(device), "number": number, "channels": self.mixture.channels}
            with (self.folder / f"{worker.name}.output").open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, str(RANK), "train", json.dumps(arguments)],
                    env=os.environ | environ, stdout=output, stderr=subprocess.STDOUT,
                )  # fmt: skip
            worker.pid = process.pid
            self.workers.append(worker)
            self.processes.append(process)
        for worker in self.workers:
            self.until(lambda worker=worker: is_ready(worker), f"{worker.name} is ready")  # type: ignore[misc]  # a default argument binds the loop's variable

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition.

        Raises:
            RuntimeError: a rank has ended; the message has the end of its output.
        """

        def holds() -> bool:
            for worker, process in zip(self.workers, self.processes, strict=True):
                if process.poll() is not None:
                    tail = (self.folder / f"{worker.name}.output").read_text(errors="replace")[-1500:]
                    raise RuntimeError(f"{worker.name} has ended with {process.returncode}: {tail}")
            return condition()

        until(holds, what)

    def names(self) -> list[str]:
        """Return the ranks' names in observations."""
        return [counter_name(MemberId(worker.name, 0)) for worker in self.workers]

    def write(self, shares: Sequence[int], decision: SharesDecision | None = None) -> None:
        """Write the next plan."""
        members = tuple(
            Member(
                index=index, pool=device.pool, share_samples=share,
                compute=decision.compute[index] if decision else None,
            )
            for index, (device, share) in enumerate(zip(self.mixture.devices, shares, strict=True))
        )  # fmt: skip
        ranks = tuple(
            Rank(
                rank=rank, member=rank, worker=w.name, worker_uid=w.name, address=w.address, peer_port=w.peer_port,
                on_demand=True,
            )
            for rank, w in enumerate(self.workers)
        )  # fmt: skip
        self.plan = Plan(
            job_uid="job", generation=1, revision=1 if self.plan is None else self.plan.revision + 1, members=members,
            ranks=ranks, global_batch_samples=self.mixture.batch,
            boundary=Boundary(kind=BoundaryKind.STEPS, every_steps=EVERY_STEPS),
            probe=decision.probe if decision else (), probe_steps=PROBE_STEPS,
        )  # fmt: skip
        for worker in self.workers:
            deliver(self.plan, self.folder / worker.name)

    def read(self) -> None:
        """Read all ranks' telemetry."""
        now: dict[CounterKey, Counters] = {}
        for worker in self.workers:
            now |= read(worker)
        self.observations.extend(observe(self.counters, now, ended_s=time.monotonic()))
        self.counters.update(now)

    def decide(self) -> SharesDecision:
        """Return what the operator decides on the telemetry so far."""
        assert self.plan is not None  # noqa: S101  # the first plan is written before
        members = zip(self.names(), self.mixture.devices, strict=True)
        evidence = tuple(
            MemberEvidence(
                member=name,
                pool=device.pool,
                observations=merge_old([o for o in self.observations if o.member == name]),
            )
            for name, device in members
        )
        found = decide_shares(
            SharesRequest(total_samples=self.mixture.batch, members=evidence, current_shares=self.plan.shares)
        )
        assert isinstance(found, SharesDecision), found  # noqa: S101  # no rank has a limit
        return found

    def learn(self) -> SharesDecision:
        """Change shares until they stay; return the last decision."""
        even = evenly(self.mixture.batch, len(self.workers))
        self.write(even)
        self.until(lambda: bool(read(self.workers[0])), "the first step")
        end_s, same = time.monotonic() + LONGEST_LEARNING_S, 0
        decision = None
        while time.monotonic() < end_s and same < SETTLED:
            time.sleep(1.0)
            self.until(lambda: True, "the ranks run")
            self.read()
            assert self.plan is not None  # noqa: S101  # written above
            decision = self.decide()
            if decision.changed or bool(decision.probe) != bool(self.plan.probe):
                self.write(decision.shares, decision)
                print(f"    {decision.shares}: {decision.reason}", flush=True)
                same = 0
            else:
                same += 1
        assert decision is not None  # noqa: S101  # the loop runs at least once
        return decision

    def step_s(self, shares: Sequence[int], seconds: float) -> float:
        """Train with these shares for some time; return the mean seconds of a step."""
        assert self.plan is not None  # noqa: S101  # learning comes first
        rank = next(i for i in range(len(shares)) if shares[i] != self.plan.shares[i] or shares == self.plan.shares)
        if tuple(shares) != self.plan.shares:
            self.write(shares)

        def count() -> tuple[float, float]:
            own = [c for key, c in read(self.workers[rank]).items() if key.share_samples == shares[rank]]
            return sum(c.steps for c in own), sum(c.phase_s["step"] for c in own)

        first = count()
        self.until(lambda: count()[0] > first[0] + 1, "the new shares are in force")
        before = count()
        time.sleep(seconds)
        self.until(lambda: count()[0] > before[0] + 2, "three steps")
        after = count()
        return (after[1] - before[1]) / (after[0] - before[0])

    def close(self) -> None:
        """Kill all ranks."""
        for process in self.processes:
            process.kill()
            process.wait()


def read(worker: Worker) -> Mapping[CounterKey, Counters]:
    """Return a rank's counters as the operator reads them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    rows = [
        VectorSample({"__name__": sample.name, **sample.labels}, float(sample.value))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    return parse_everything(rows).counters


def phases(job: Job, before: Mapping[CounterKey, Counters]) -> str:
    """Return the mean milliseconds of each phase of each rank by its share, since the counters before."""
    lines = []
    for each in observe(before, job.counters, ended_s=time.monotonic()):
        seconds = {name: getattr(each, name) for name in ("load", "forward", "backward", "sync", "update", "step")}
        spent = ", ".join(f"{name} {1e3 * value.mean:.1f}" for name, value in seconds.items() if value is not None)
        lines.append(f"    {each.member}, {each.share_samples} samples, {each.steps} steps, ms: {spent}")
    return "\n".join(lines)


def ceiling(mixture: Mixture, shares: Sequence[int], seconds: float) -> list[float]:
    """Return the samples a second of each device in plain PyTorch, all at the same time."""
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), []
        for number, (device, share) in enumerate(zip(mixture.devices, shares, strict=True)):
            arguments = {
                "device": asdict(device), "number": number, "channels": mixture.channels, "share": max(1, share),
                "seconds": seconds, "half": mixture.precision == "bf16", "folder": name,
            }  # fmt: skip
            running.append(
                subprocess.Popen(
                    [sys.executable, str(RANK), "alone", json.dumps(arguments)],
                    env=os.environ | device.environment(), stdout=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        try:
            until(
                lambda: (
                    len(list(folder.glob("warm-*"))) == len(running) or any(each.poll() is not None for each in running)
                ),
                "all devices are warm",
            )
            (folder / "go").touch()
            outputs = [each.communicate(timeout=10 * seconds + 60)[0] for each in running]
        finally:
            for each in running:
                each.kill()
                each.wait()
    return [float(json.loads(output.splitlines()[-1])["samples_per_s"]) for output in outputs]


def show(mixture: Mixture, seconds: float) -> None:
    """Measure one mixture and print its rows."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(mixture, Path(name))
        try:
            job.start()
            decision = job.learn()
            learned, even = decision.shares, tuple(evenly(mixture.batch, len(mixture.devices)))
            found: dict[tuple[int, ...], list[float]] = {even: [], learned: []}
            turns = max(2, round(seconds / (4 * TURN_S)))
            before = dict(job.counters)
            for number in range(turns):
                first, second = (even, learned) if number % 2 == 0 else (learned, even)
                for shares in (first, second, second, first):
                    found[shares].append(job.step_s(shares, TURN_S))
            job.read()
            print(phases(job, before), flush=True)
        finally:
            job.close()
    alone = ceiling(mixture, learned, max(2.0, seconds / 4))
    print(f"    alone: {', '.join(f'{rate:.0f}' for rate in alone)} samples/s, shares {learned}", flush=True)
    even_s, learned_s = statistics.median(found[even]), statistics.median(found[learned])
    middle, low, high = median_interval([a / b for a, b in zip(found[even], found[learned], strict=True)])
    figure = f"{even_s * 1e3:.1f} against {learned_s * 1e3:.1f} ms, {middle:.2f} times ({low:.2f} to {high:.2f})"
    print(f"| {mixture.name}: even against learned shares {learned} | {figure} | - | - |")
    rates = sorted(mixture.batch / step_s / sum(alone) for step_s in found[learned])
    ratio = statistics.median(rates)
    even_ratio = mixture.batch / even_s / sum(alone)
    figure = f"{ratio:.3f} ({rates[0]:.3f} to {rates[-1]:.3f}), even shares {even_ratio:.3f}"
    met = "yes" if ratio >= GOAL_RATIO else "no"
    print(
        f"| {mixture.name}: part of the sum of plain PyTorch's rates | {figure} | ≥ {GOAL_RATIO} | {met} |", flush=True
    )


@contextlib.contextmanager
def shared_card() -> Iterator[str]:
    """Run NVIDIA's Multi-Process Service for a while; yield why it cannot, or nothing."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield "nvidia-cuda-mps-control is not installed"
        return
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for place in own.values():
            Path(place).mkdir()
        os.environ |= own
        try:
            started = subprocess.run([program, "-d"], capture_output=True, text=True, timeout=30, check=False)
            yield "" if started.returncode == 0 else f"MPS does not start: {started.stdout}{started.stderr}".strip()
            subprocess.run([program], input="quit\n", capture_output=True, text=True, timeout=30, check=False)
        finally:
            for variable in own:
                os.environ.pop(variable, None)


def main() -> None:
    """Measure the mixture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of turns (20)")
    parser.add_argument("--processors", action="store_true", help="two ranks on processors instead, to try the program")
    options = parser.parse_args()
    if options.processors:
        devices = (Device(pool="two", gpu=False, threads=2), Device(pool="one", gpu=False))
        show(Mixture(name="processors", devices=devices, channels=8, batch=48, precision="fp32"), options.seconds)
        return
    with shared_card() as problem:
        if problem:
            print(f"| parts of a card | not run: {problem} | - | - |", flush=True)
            return
        parts = tuple(Device(pool=f"{each} %", percent=each) for each in (50, 30, 15))
        show(Mixture(name="parts of a card", devices=parts, channels=128, batch=768, precision="bf16"), options.seconds)


if __name__ == "__main__":
    main()
