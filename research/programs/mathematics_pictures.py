"""`make pictures`: draw the pictures of docs/mathematics.md into docs/pictures/, the same bytes each time."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from heterotrain_core.contract.hiccups import Hiccups
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.balance import Split, balance, evaluate
from heterotrain_core.split.member import SplitMember
from heterotrain_planner.goodput import choose_batch
from heterotrain_planner.perf.expected_maximum import balanced_ceiling, common_variation
from heterotrain_simulator.baselines import Even, Proportional
from heterotrain_simulator.cannikin import Cannikin
from heterotrain_simulator.engine import simulate
from heterotrain_simulator.ground_truth import GroundTruth, Worker
from heterotrain_simulator.heterotrain_policy import HeterotrainPolicy
from heterotrain_simulator.policy import Policy
from simulated_comparison import MIXES, USUAL, scenario

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.noise_weights import least_variance_weights, local_estimates, published_weights, uniform_weights

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
GREEN, BLUE, ORANGE, BROWN, GREY, RED = "#2a7f3f", "#4c72b0", "#dd8452", "#937860", "#8c8c8c", "#c44e52"
SEEDS = 5
mpl.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "heterotrain", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
)


def member(per_sample_s: float, fixed_s: float = 0.0, **limits: int) -> SplitMember:
    """Return a member whose backward is two thirds of its time."""
    return SplitMember(
        compute=ComputeTime(
            per_sample_s=per_sample_s / 3,
            fixed_s=fixed_s / 3,
            backward_per_sample_s=2 * per_sample_s / 3,
            backward_fixed_s=2 * fixed_s / 3,
        ),
        **limits,
    )


def step() -> Any:
    """One step of two ranks, bucket by bucket, with a, P, gamma, T_o and T_u."""
    figure, axes = plt.subplots(figsize=(7.5, 2.6), layout="constrained")
    ranks = [("rank 0", 0.30, 0.50), ("rank 1", 0.38, 0.30)]
    gamma, transfers = 0.2, [0.16, 0.16, 0.16, 0.12]
    for y, (name, before, backward) in enumerate(ranks):
        axes.barh(-y, before, color=BLUE, height=0.6)
        axes.barh(-y, backward, left=before, color=GREEN, height=0.6)
        axes.text(before / 2, -y, "a: load, forward", ha="center", va="center", color="white")
        axes.text(before + backward / 2, -y, "P: backward", ha="center", va="center", color="white")
        for j in range(len(transfers)):
            ready = before + backward * (gamma + (1 - gamma) * j / (len(transfers) - 1))
            axes.plot([ready, ready], [-y - 0.3, -y + 0.3], color="black", linewidth=0.8)
        axes.text(-0.01, -y, name, ha="right", va="center")
    end = 0.0
    for j, transfer in enumerate(transfers):
        part = gamma + (1 - gamma) * j / (len(transfers) - 1)
        all_ready = max(before + part * backward for _, before, backward in ranks)
        begin = max(end, all_ready)
        last = j == len(transfers) - 1
        axes.barh(-2, transfer, left=begin, color=RED if last else ORANGE, height=0.6, edgecolor="white")
        axes.text(
            begin + transfer / 2,
            -2,
            "T_u" if last else "T_o" if j == 1 else "",
            ha="center",
            va="center",
            color="white",
        )
        end = begin + transfer
    axes.text(-0.01, -2, "exchange", ha="right", va="center")
    axes.axvline(end, color="black", linestyle=":", linewidth=1)
    axes.text(end, 0.45, " end of the step", va="center")
    axes.set(xlim=(-0.16, end + 0.2), ylim=(-2.5, 0.7), yticks=[], xlabel="seconds")
    axes.set_title("A bucket is exchanged when every rank has filled it (thin lines) and the one before is over")
    axes.grid(visible=False)
    return figure


def level() -> Any:
    """Time curves of four members and the level that gives them the batch together."""
    members = {
        "fast": member(1.0e-3, 0.05),
        "medium": member(2.2e-3, 0.04),
        "slow, accumulates beyond 40": member(3.0e-3, 0.06, micro_cap_samples=40),
        "small memory (at most 60)": member(1.2e-3, 0.03, cap_samples=60),
    }
    exchange = CommunicationTime(overlapped_s=0.12, last_bucket_s=0.03, gamma=0.15)
    split = balance(480, list(members.values()), communication=exchange)
    if not isinstance(split, Split):
        raise SystemExit(split.reason)
    figure, axes = plt.subplots(figsize=(7.5, 4.0), layout="constrained")
    for (name, curve), share, binding, colour in zip(
        members.items(), split.shares, split.bindings, (GREEN, BLUE, ORANGE, BROWN), strict=True
    ):
        most = curve.cap_samples or 300
        times = [_alone(curve, n, exchange) for n in range(1, most + 1)]
        axes.plot(range(1, most + 1), times, color=colour, label=f"{name}: {share} samples, {binding.value}")
        axes.plot([share], [_alone(curve, share, exchange)], "o", color=colour)
    axes.axhline(split.step_s, color="black", linestyle=":", linewidth=1)
    axes.text(185, split.step_s, f"level: {split.step_s * 1000:.0f} ms", ha="center", va="bottom")
    axes.set(xlabel="share in samples", ylabel="t(n) in seconds", ylim=(0, 0.9), xlim=(0, 300))
    axes.set_title("480 samples at the lowest level: each member takes the samples that it finishes by then")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    return figure


def _alone(curve: SplitMember, share: int, exchange: CommunicationTime) -> float:
    """Return the end of the step for this member alone, in seconds."""
    split = evaluate((share,), (curve,), communication=exchange)
    return split.step_s if isinstance(split, Split) else float("nan")


def ceiling() -> Any:
    """The best expected efficiency of balanced members by their variation."""
    figure, axes = plt.subplots(figsize=(7.5, 3.0), layout="constrained")
    variations = np.linspace(0, 0.2, 41)
    for members, colour in ((2, BLUE), (3, GREEN), (8, ORANGE), (32, BROWN), (256, GREY)):
        ceilings = [balanced_ceiling([v] * members) for v in variations.tolist()]
        axes.plot(variations, ceilings, color=colour, label=f"{members} members")
    axes.set(
        xlabel="standard deviation of a member's step, relative to its mean", ylabel="efficiency at most", xlim=(0, 0.2)
    )
    axes.set_title("Even a perfect split waits for the slowest member of each step")
    axes.legend(frameon=False)
    return figure


def other_members() -> Any:
    """Ceilings of so many members with rare long steps, as learned with three, next to drawn steps."""
    figure, axes = plt.subplots(figsize=(7.5, 3.0), layout="constrained")
    rng = np.random.default_rng(1)
    hiccups, variation = Hiccups(rate=0.01, ratio=2.0), 0.03
    numbers = list(range(2, 41))
    # Of the mean with long steps, which is 1 here: they are longer by 2 of the time without them.
    seen = Hiccups(rate=hiccups.rate, ratio=hiccups.ratio / (1 + hiccups.rate * hiccups.ratio))
    ceilings = [balanced_ceiling([variation] * n, seen) for n in numbers]
    alone = common_variation(balanced_ceiling([variation] * 3, seen), 3)
    normal = [balanced_ceiling([alone] * n) for n in numbers]
    drawn = {}
    for n in (2, 3, 4, 8, 12, 16, 24, 32, 40):
        times = 1 + variation * rng.standard_normal((20_000, n))
        times += hiccups.ratio * (rng.random(times.shape) < hiccups.rate)
        drawn[n] = float(times.mean() / times.max(axis=1).mean())
    axes.plot(numbers, ceilings, color=GREEN, label="long steps and normal noise of a member")
    axes.plot(numbers, normal, color=GREY, linestyle="--", label="normal noise alone, equal for three members")
    axes.plot(list(drawn), list(drawn.values()), "o", color=BLUE, label="drawn steps")
    axes.set(xlabel="members", ylabel="efficiency at most", xlim=(1, 41), ylim=(0.5, 1))
    axes.set_title("One step in a hundred takes three times as long; other noise is 3 %")
    axes.legend(frameon=False)
    return figure


def estimators() -> Any:
    """Relative standard deviation of three unbiased estimators of the gradient's square, by Monte Carlo."""
    rng = np.random.default_rng(1)
    cases = {
        "10, 90": [10, 90],
        "5, 15, 30, 50": [5, 15, 30, 50],
        "100, 5 × 20": [100, *[20] * 5],
        "64, 32, 16, 8": [64, 32, 16, 8],
    }
    dimensions, draws = 300, 3000
    kinds: dict[str, Callable[[list[float]], Any]] = {
        "equal weights": uniform_weights,
        "Cannikin's published weights": lambda b: published_weights(b)[0],
        "heterotrain, closed form": least_variance_weights,
    }
    figure, axes = plt.subplots(figsize=(7.5, 3.0), layout="constrained")
    for i, (kind, colour) in enumerate(zip(kinds, (GREY, BROWN, GREEN), strict=True)):
        heights = []
        for shares in cases.values():
            total = sum(shares)
            true = np.full(dimensions, 1.0 / np.sqrt(dimensions))  # |G|^2 = 1
            sigma = np.sqrt(20.0 * total / dimensions)  # noise scale 20 batches
            weights = kinds[kind]([float(b) for b in shares])
            found = []
            for _ in range(draws):
                each = [true + sigma / np.sqrt(b) * rng.standard_normal(dimensions) for b in shares]
                whole = sum(b * g for b, g in zip(shares, each, strict=True)) / total
                local, _variance = local_estimates(shares, [float(g @ g) for g in each], float(whole @ whole))
                found.append(float(weights @ local))
            heights.append(statistics.stdev(found))
        at = np.arange(len(cases)) + (i - 1) * 0.27
        bars = axes.bar(at, heights, width=0.25, color=colour, label=kind)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(cases)), [f"shares {name}" for name in cases])
    axes.set(ylabel="relative standard deviation")
    axes.set_title("Estimating |G|² when noise is 20 times the batch; less is better, all are unbiased")
    axes.legend(frameon=False, fontsize=8)
    return figure


def goodput() -> Any:
    """Goodput against the global batch for growing noise scales."""
    members = [member(0.2e-3, 0.02), member(0.2e-3, 0.02), member(0.5e-3, 0.04), member(0.5e-3, 0.04)]
    exchange = CommunicationTime(overlapped_s=0.03, last_bucket_s=0.01, gamma=0.15)
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    for phi, colour in ((100, GREY), (1000, BLUE), (10_000, ORANGE), (100_000, GREEN)):
        choice = choose_batch(
            members, communication=exchange, base_samples=128, least_samples=128, most_samples=16_384,
            current_samples=None, noise_samples=phi,
        )  # fmt: skip
        if not hasattr(choice, "candidates"):
            raise SystemExit(choice.reason)
        best = max(choice.candidates, key=lambda c: c.goodput_per_s)
        axes.plot(
            [c.samples for c in choice.candidates],
            [c.goodput_per_s for c in choice.candidates],
            color=colour,
            label=f"φ = {phi:,}",
        )
        axes.plot([best.samples], [best.goodput_per_s], "o", color=colour)
    axes.set(xlabel="global batch in samples", ylabel="goodput, samples/s worth of B₀", xscale="log", ylim=(0, None))
    axes.set_title("Larger batches are faster, but each of their samples teaches less")
    axes.legend(frameon=False)
    return figure


def learning() -> Any:
    """Simulated: distance of each policy's shares from the true optimum, epoch by epoch."""
    of = scenario("bert", MIXES["2 A100 + 6 RTX 2080 Ti + 8 T4"], adaptive=False, on=USUAL)
    truth = GroundTruth(of)
    workers = [Worker(name=f"{g.pool}-{i}", pool=g.pool, gpu=g.gpu, index=i) for g in of.groups for i in range(g.count)]
    best = truth.optimum(workers, of.batch_samples, 0.0)
    if best is None:
        raise SystemExit("the batch is too small for the cluster")
    figure, axes = plt.subplots(figsize=(7.5, 3.2), layout="constrained")
    kinds: dict[str, tuple[Callable[[], Policy], str]] = {
        "even": (Even, GREY),
        "proportional (LB-BSP)": (Proportional, ORANGE),
        "Cannikin as published": (Cannikin, BROWN),
        "heterotrain": (HeterotrainPolicy, GREEN),
    }
    for name, (policy, colour) in kinds.items():
        runs = [simulate(of, policy(), seed=seed) for seed in range(1, SEEDS + 1)]
        epochs = min(len(run.periods) for run in runs)
        off = [statistics.mean(run.periods[e].planned_s for run in runs) / best.step_s for e in range(epochs)]
        axes.step(range(epochs), off, where="mid", color=colour, label=name)
    axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="epoch", ylabel="step over the true optimum", ylim=(0.95, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Simulated: BERT on 2 A100, 6 RTX 2080 Ti and 8 T4, batch 384, mean of five seeds")
    axes.legend(frameon=False)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "step": step,
    "level": level,
    "ceiling": ceiling,
    "members": other_members,
    "estimators": estimators,
    "goodput": goodput,
    "learning": learning,
}


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw()
        path = FOLDER / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        print(f"{path.relative_to(FOLDER.parents[1])}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
