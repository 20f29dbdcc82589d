"""Seconds of a step on one GPU against its samples: how far from a line, and does a curve through points do better?

The planner's model of a rank is a line: seconds for a step and seconds for each sample. For each size around a usual
share (half of it to twice, odd sizes among them), the size is left out, and predicted twice: by the line through the
others, and by straight segments between its neighbours. The errors say what curves would gain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from models import GPU_CASES, OPTIMIZERS, Case

FACTORS = (0.5, 0.55, 0.63, 0.71, 0.79, 0.87, 0.94, 1.0, 1.07, 1.19, 1.33, 1.5, 1.63, 1.81, 2.0)
GOAL_RATIO = 0.02
"""A mean error of the line above this, by which curves are better, would keep the curves."""


def step_of(case: Case, samples: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that trains one step of this size."""
    shape = (samples, *case.shape)
    x = case.formatted((torch.randint(case.vocabulary, shape) if case.vocabulary else torch.randn(shape)).cuda())
    y = torch.randint(10, (samples,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def measure(case: Case, seconds: float) -> Mapping[int, float]:
    """Return the median seconds of a step by its samples; sizes take turns, so that a drift affects all alike."""
    sizes = sorted({max(1, round(factor * case.share_samples)) for factor in FACTORS})
    torch.manual_seed(0)
    model = case.formatted_model(case.make().cuda())
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    steps = {size: step_of(case, size, model, optimizer) for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        for _ in range(3):
            steps[size]()
    torch.cuda.synchronize()
    end_s, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end_s or rounds < 5:  # noqa: PLR2004  # for a median
        for size in sizes if rounds % 2 else reversed(sizes):
            began_s = time.perf_counter()
            steps[size]()
            torch.cuda.synchronize()
            found[size].append(time.perf_counter() - began_s)
        rounds += 1
    return {size: statistics.median(times) for size, times in found.items()}


def errors(measured: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Return the relative errors of the line and of the segments for each size but the first and the last."""
    sizes, times = np.array(sorted(measured), dtype=float), np.array([measured[size] for size in sorted(measured)])
    lines, segments = [], []
    for at in range(1, len(sizes) - 1):
        others = np.arange(len(sizes)) != at
        slope, fixed = np.polyfit(sizes[others], times[others], 1, w=1 / times[others])
        lines.append(abs(float((fixed + slope * sizes[at]) / times[at] - 1)))
        segments.append(abs(float(np.interp(sizes[at], sizes[others], times[others]) / times[at] - 1)))
    return lines, segments


def main() -> None:
    """Print one row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each model (8)")
    options = parser.parse_args()
    for number in (1, 3, 2, 0):
        case = GPU_CASES[number]
        measured = measure(case, options.seconds)
        print("  " + ", ".join(f"{size}: {s * 1e3:.2f} ms" for size, s in measured.items()), flush=True)
        lines, segments = errors(measured)
        line, curve = (f"{statistics.mean(each):.1%} (largest {max(each):.1%})" for each in (lines, segments))
        enough = statistics.mean(lines) - statistics.mean(segments) < GOAL_RATIO
        print(
            f"| a line through steps of {case.name} is off by | {line}, segments by {curve} | "
            f"curves gain < {GOAL_RATIO:.0%} | {'yes' if enough else 'no'} |",
            flush=True,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
