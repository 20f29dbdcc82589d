"""Overhead of a step beyond bare DistributedDataParallel on equal workers, and telemetry's part of it. Prints Markdown.

Needs torch, heterotrain and two otherwise idle cores. Two processes with one thread each train the same model twice:
with DistributedDataParallel (gradients as bucket views, a DataLoader in the process) and with this trainer. A few steps
of each alternate in the same processes in the order ABBA, so that other load and slow changes affect both.

On a machine with GPUs, each of them has a process, which trains other models in bf16, with batches from pinned memory.
A turn ends when its device has finished. With one GPU there is nothing to exchange.

Each block gives one ratio. The figure is the median of the ratios with its 95 % interval, which is valid for any
distribution. A median may miss the cost of steps that measure gradients. Therefore the ratio of the sums over all
blocks is printed as well, with twice its standard error. The processor time of rank 0 (all its threads) follows,
because a busy machine disturbs it less.

Two guards are timed by the processor time of the training thread: the comparison of the ranks' copies of the state (one
slice in each measured step), and the test whether the gradient is finite (in each step).

Telemetry is timed directly, because half a percent is less than the difference between two runs: by its own exported
clock over all blocks, and afterwards by a stopwatch around its functions.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import heterotrain
import torch
import torch.distributed as dist
from heterotrain.exchange.flat.buckets import WholeBucket
from heterotrain.numerics.noise import Measurement
from heterotrain.steps.observer import LEARN_STEPS, Observer
from heterotrain.telemetry.tensorboard import TensorBoardWriter
from machine import free_port, machine
from models import CASES, GPU_CASES, OPTIMIZERS, Case, Numbers, ready
from prometheus_client import generate_latest
from ratios import median_interval, ratio_of_sums
from torch.distributed.distributed_c10d import GroupName

TURN_S = 0.1
"""Length of one side's turn, at least one step: longer than a scheduler's slice, shorter than changes of load."""
GUARDED_STEPS = 40
"""Steps in which the guards are timed."""
GPUS = torch.cuda.device_count()
DEVICE = torch.device("cuda" if GPUS else "cpu")
MODELS = GPU_CASES if GPUS else CASES
PROFILED_STEPS = 5
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
"""Calls in which the host waits for the device."""

TELEMETRY = {
    Observer: ("begin", "committed", "cost"),
    Measurement: ("group_done", "reduced", "_bucket", "_gradient"),
    TensorBoardWriter: ("committed",),
}
"""Functions that count as telemetry: phases and gauges, the noise scale's statistics, and curves for TensorBoard."""


def ranks_of(case: Case) -> int:
    """Return the number of ranks."""
    return (case.ranks or GPUS) if GPUS else 2


def own_group(ranks: int) -> dist.ProcessGroup:
    """Return a group of all ranks that has nothing to do with the job's, which allows scripts no further groups."""
    file, rank = str(Path(os.environ["FOLDER"]) / "bare"), int(os.environ["RANK"])
    store = dist.FileStore(file, ranks)  # type: ignore[attr-defined]  # torch's __init__ does not list it
    group, _ = dist.distributed_c10d._new_process_group_helper(  # noqa: SLF001  # new_group takes the job's store
        ranks, rank, list(range(ranks)), "nccl" if GPUS else "gloo", store,
        group_name=GroupName("bare"), timeout=timedelta(minutes=5),
    )  # fmt: skip
    assert isinstance(group, dist.ProcessGroup)  # noqa: S101  # an integer stands for no group
    dist.distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(ranks)}  # noqa: SLF001  # as above
    return group


def bare(case: Case, group: dist.ProcessGroup, workers: int) -> Iterator[None]:
    """Train with DistributedDataParallel; one step a turn."""
    torch.manual_seed(0)
    module = case.formatted_model(case.make().to(DEVICE))
    if case.graphs:
        torch.cuda.make_graphed_callables(module, (case.sample(),))
    model = torch.nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    scaler = torch.amp.GradScaler(enabled=case.precision == "fp16" and GPUS > 0)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision)
    dataset = Numbers(case.shape, case.vocabulary)
    sampler: torch.utils.data.DistributedSampler[object] = torch.utils.data.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=case.share_samples, sampler=sampler, collate_fn=ready, pin_memory=GPUS > 0,
        num_workers=workers, persistent_workers=workers > 0,
    )  # fmt: skip
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        for batch in loader:
            x, y = (part.to(DEVICE, non_blocking=True) for part in batch)
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, half or torch.bfloat16, enabled=GPUS > 0 and half is not None):
                loss = torch.nn.functional.cross_entropy(model(case.formatted(x)), y)
            scaler.scale(loss).backward()
            if case.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            scaler.step(optimizer)
            scaler.update()
            yield


def ours(case: Case, job: heterotrain.Job, workers: int) -> Iterator[None]:
    """Train with this trainer; one step a turn."""
    torch.manual_seed(0)
    model = case.formatted_model(job.wrap(case.make(), graphs=case.graphs))
    optimizer = job.optimizer(OPTIMIZERS[case.optimizer](model.parameters()))
    data = Numbers(case.shape, case.vocabulary)
    for step in job.steps(data, collate=ready, workers=workers, confirm=case.confirm):
        with step:
            for x, y in step.micro_batches():
                step.backward(torch.nn.functional.cross_entropy(model(case.formatted(x)), y))
            step.apply(optimizer, clip_norm=case.clip_norm)
        yield


@dataclass(slots=True)
class Spent:
    """Seconds of the training thread in some functions; nested calls count once."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0
    depth: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added up."""

        @functools.wraps(function)
        def around(*args: Any, **options: Any) -> Any:
            began_s = self.clock()
            self.depth += 1
            try:
                return function(*args, **options)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += self.clock() - began_s

        return around


def guards_s(job: heterotrain.Job, turns: Iterator[None]) -> tuple[float, float]:
    """Return the processor seconds of comparing one slice of the state, and of a step's test of its gradient."""
    comparing, testing = Spent(time.thread_time), Spent(time.thread_time)
    measure = comparing.timed(job._loop._replicas.measure)  # noqa: SLF001  # not reachable otherwise
    bucket: Any = WholeBucket
    kept, bucket.look = bucket.look, testing.timed(bucket.look)
    for _ in range(GUARDED_STEPS):
        next(turns)  # between two calls, a step has filled the caches with other data
        measure()
    bucket.look = kept
    return comparing.seconds / GUARDED_STEPS, testing.seconds / GUARDED_STEPS


def seconds_of(turns: Iterator[None], steps: int) -> tuple[float, float]:
    """Return the mean seconds of some steps, and the processor seconds."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        next(turns)
    if GPUS:
        torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / steps, (time.process_time() - began_cpu_s) / steps


def waits_of(turns: Iterator[None]) -> float:
    """Return how often the host waits for the device in a step."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(PROFILED_STEPS):
            next(turns)
    return float(sum(event.count for event in profile.key_averages() if event.key in WAITS)) / PROFILED_STEPS


def work(number: int, seconds: float, workers: int, tensorboard_dir: str) -> dict[str, Any]:
    """Measure one case in this rank, for about so many seconds."""
    torch.set_num_threads(1)
    case = MODELS[number]
    ranks = ranks_of(case)
    if case.ranks:
        from cuda.shared_card import take  # noqa: PLC0415  # of the tests, which the other cases do not need

        take("0", f"host-{os.environ['RANK']}")
    if GPUS:
        torch.cuda.set_device(0 if case.ranks else int(os.environ["LOCAL_RANK"]))
    job = heterotrain.init(
        epochs=10**9, batch_samples=case.share_samples * ranks, tensorboard_dir=tensorboard_dir,
        precision=case.precision if GPUS else "fp32",
    )  # fmt: skip
    turns = {"ours": ours(case, job, workers)}
    next(turns["ours"])  # makes the default group, without which torch has no further ones
    group = own_group(ranks)
    turns["bare"] = bare(case, group, workers)
    pace_s = torch.tensor([max(seconds_of(turns[name], 5)[0] for name in turns for _ in range(2))], device=DEVICE)
    dist.all_reduce(pace_s, op=dist.ReduceOp.SUM, group=group)
    step_s = float(pace_s) / ranks
    steps = max(1, round(TURN_S / step_s))
    while job._training.progress.steps < 2 * LEARN_STEPS:  # noqa: SLF001  # in its first steps it measures everything
        next(turns["ours"])
    observer = job._loop._observer  # noqa: SLF001  # as above
    budget = observer.budget
    before_s = budget.spent_s
    found: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
    for block in range(max(8, round(seconds / (4 * steps * step_s)))):
        first, second = ("bare", "ours") if block % 2 == 0 else ("ours", "bare")
        parts: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
        for name in (first, second, second, first):
            observer.evaluated()  # the other side's turn is not part of a step, to which telemetry's budget refers
            parts[name].append(seconds_of(turns[name], steps))
        for name, pair in parts.items():
            found[name].append((sum(wall_s for wall_s, _ in pair) / 2, sum(cpu_s for _, cpu_s in pair) / 2))
    own_clock_s = (budget.spent_s - before_s) / (2 * steps * len(found["ours"]))
    spent = Spent()
    for kind, names in TELEMETRY.items():
        for name in names:
            setattr(kind, name, spent.timed(getattr(kind, name)))
    timed = max(64, 10 * steps)
    step_s = seconds_of(turns["ours"], timed)[0]
    comparing_s, testing_s = guards_s(job, turns["ours"])
    began_s = time.perf_counter()
    for _ in range(20):
        generate_latest(job._report.registry)  # noqa: SLF001  # as above
    scrape_s = (time.perf_counter() - began_s) / 20
    model = job._training.model  # noqa: SLF001  # as above
    assert model is not None  # noqa: S101  # the turns above have trained it
    elements = sum(p.numel() for p in model.parameters())
    return found | {
        "own_clock_s": own_clock_s, "every": observer.every,
        "telemetry_s": spent.seconds / timed, "scrape_s": scrape_s, "step_s": step_s, "elements": elements,
        "steps": steps, "comparing_s": comparing_s, "testing_s": testing_s,
        "waits": {name: waits_of(turns[name]) for name in ("bare", "ours")} if GPUS else {},
    }  # fmt: skip


def measure(number: int, seconds: float, workers: int) -> dict[str, Any]:
    """Start all ranks for one case; return what rank 0 measured."""
    port, count = free_port(), ranks_of(MODELS[number])
    command = [sys.executable, __file__, "--seconds", str(seconds), "--workers", str(workers), "--case", str(number)]
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {
            "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
            "FOLDER": folder, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "68719476736",  # as in the trainer's image
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                command, env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
            )
            for rank in range(count)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of case {number} failed")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def beyond(found: dict[str, Any], which: int) -> str:
    """Return the relative overhead of this trainer: the median over blocks, and its interval."""
    middle, low, high = median_interval([own / bare - 1 for bare, own in pairs(found, which)])
    return f"{middle:+.2%} ({low:+.2%} to {high:+.2%})"


def beyond_in_all(found: dict[str, Any]) -> str:
    """Return the relative overhead of this trainer over all blocks together, and twice the standard error."""
    ratio, error = ratio_of_sums(pairs(found, 0))
    return f"{ratio - 1:+.2%} ± {2 * error:.2%}"


def pairs(found: dict[str, Any], which: int) -> list[tuple[float, float]]:
    """Return (bare, ours) of each block: wall seconds of a step (0) or processor seconds (1)."""
    return [(bare[which], own[which]) for bare, own in zip(found["bare"], found["ours"], strict=True)]


def median_difference_s(found: dict[str, Any]) -> float:
    """Return the overhead of a step in wall seconds, the median over blocks."""
    return statistics.median(own - bare for bare, own in pairs(found, 0))


HEADS = (
    "model, samples a rank", "parameters", "bare DDP", "this trainer", "beyond, ms", "beyond, wall", "in all",
    "beyond, processor", "blocks", "telemetry", "by its own clock", "gradients measured", "a scrape",
    "comparing copies", "of a step", "testing the gradient", "of a step",
)  # fmt: skip


def cells(case: Case, found: dict[str, Any]) -> tuple[str, ...]:
    """Return a row below ``HEADS``."""
    bare_s, ours_s = (statistics.median(wall for wall, _ in found[name]) for name in ("bare", "ours"))
    return (
        f"{case.name}, {case.share_samples}", f"{found['elements'] / 1e6:.2f} M", f"{bare_s * 1e3:.2f} ms",
        f"{ours_s * 1e3:.2f} ms", f"{median_difference_s(found) * 1e3:.2f}", beyond(found, 0),
        beyond_in_all(found), beyond(found, 1),
        f"{len(found['bare'])} of 4 x {found['steps']}",
        f"{found['telemetry_s'] / found['step_s']:.2%}", f"{found['own_clock_s'] / ours_s:.2%}",
        f"every {found['every']}", f"{found['scrape_s'] * 1e3:.1f} ms",
        f"{found['comparing_s'] * 1e3:.2f} ms", f"{found['comparing_s'] / found['every'] / ours_s:.2%}",
        f"{found['testing_s'] * 1e3:.2f} ms", f"{found['testing_s'] / ours_s:.2%}",
    )  # fmt: skip


def goal(case: Case, found: dict[str, Any]) -> str:
    """Return a row with the time beyond DistributedDataParallel, what is aimed at, and whether that is met."""
    _, _, high = median_interval([own / bare - 1 for bare, own in pairs(found, 0)])
    waits = found["waits"]
    figure = f"{statistics.median(bare for bare, _ in pairs(found, 0)) * 1e3:.2f} ms, {beyond(found, 0)}"
    if waits:
        figure += f", the host waits {waits['ours']:g} times a step (bare {waits['bare']:g})"
    aim = "- | -"
    if case.goal_ratio is not None:
        aim = f"≤ {case.goal_ratio:+.1%} | {'yes' if high <= case.goal_ratio else 'no'}"
    return f"| step of {case.name} beyond DDP | {figure} | {aim} |"


def main() -> None:
    """Print one row for each model."""
    rows = "; ".join(f"{row} is {case.name}, {case.share_samples} samples a rank" for row, case in enumerate(MODELS))
    known = range(len(MODELS))
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"Rows: {rows}.")
    parser.add_argument("--seconds", type=float, default=60.0, help="alternate for about so long with each model (60)")
    parser.add_argument("--models", type=int, nargs="+", default=known, choices=known, help="which rows (all)")
    parser.add_argument("--workers", type=int, default=0, help="processes of each side that load samples ahead (0)")
    parser.add_argument("--goals", action="store_true", help="rows for the table of make gpu")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not 0 < arguments.seconds < math.inf:
        parser.error(f"--seconds has to be a number above 0, not {arguments.seconds:g}")
    if arguments.case is not None:
        print(json.dumps(work(arguments.case, arguments.seconds, arguments.workers, os.environ["FOLDER"])), flush=True)
        os._exit(0)  # the job is not finished, and its termination message would report a failure
    print(machine())
    if not arguments.goals:
        print(f"\n| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}")
    failed = False
    for number in arguments.models:
        try:
            found = measure(number, arguments.seconds, arguments.workers)
        except RuntimeError as error:
            failed = True
            print(f"| {MODELS[number].name} | {error} | it runs | no |", flush=True)
            continue
        row = " | ".join(cells(MODELS[number], found))
        print(f"  {row}\n{goal(MODELS[number], found)}" if arguments.goals else f"| {row} |", flush=True)
    print(f"\n{machine()}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
