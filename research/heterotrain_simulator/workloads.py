"""Published measurements of workloads, each with its source.

Sources
    Sia: the artifact of "Sia: Heterogeneity-aware, goodput-optimized ML-cluster scheduling" (SOSP 2023), repository
        siasosp23/artifacts at aaf7a0d. Step times of one GPU (step_time - sync_time) from
        ``adaptdl/adaptdl/adaptdl/torch/seed``; noise scale (B_0 grad_var / grad_sqr, median of five epochs) and
        progress from ``sia-simulator/traces/*/validation-<B_0>.csv``; batch ranges from
        ``adaptdl/benchmark/models``; restart seconds from ``sia-simulator/applications.py``.
    Sailor: "Sailor: Automating distributed training over dynamic, heterogeneous, and geo-distributed clusters" (SOSP
        2025), repository eth-easl/sailor, profiles of OPT-350M at sequence 2048, forward and backward over 26 layers;
        prices from the same repository.

GPU names of the Sia tables are those of its paper: dgx is an A100, quad a Quadro RTX 6000, rtx an RTX 2080 Ti.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_core.split.member import SplitMember

MILLISECOND_S = 1e-3
Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training job with published step times.

    Attributes:
        name: short name.
        what: model and data.
        source: where the figures come from.
        step_ms: by GPU, (samples, milliseconds) of forward and backward; the last point is the limit of the memory.
        backward_part: fraction of a step in backward.
        gradient_bytes: size of the gradient, at four bytes per parameter.
        epoch_samples: samples of the data set.
        base_batch: B_0, the batch of the recorded progress below.
        most_batch: largest global batch of the published adaptive runs.
        noise: (progress in steps of B_0, noise scale in samples), empty if none was published.
        target: the goal of the training.
        target_steps: steps of B_0 until the target in the recorded run.
        restart_s: seconds for checkpoint and restart of the recorded job at a change of its workers.
    """

    name: str
    what: str
    source: str
    step_ms: Mapping[str, Points]
    backward_part: float
    gradient_bytes: float
    epoch_samples: int
    base_batch: int
    most_batch: int
    noise: tuple[tuple[float, float], ...]
    target: str
    target_steps: float
    restart_s: float


TWO_THIRDS = 2 / 3
"""Assumption for published whole steps: a backward pass costs about two forward passes."""

CIFAR10 = Workload(
    name="cifar10",
    what="ResNet-18 on CIFAR-10",
    source="Sia",
    step_ms={
        "a100": (
            (32, 34.33), (45, 34.32), (64, 34.73), (91, 36.61), (129, 38.43), (182, 40.78), (257, 49.05), (363, 58.55),
            (513, 71.57), (725, 92.37), (1025, 118.7), (1450, 160.1), (2051, 216.8), (2901, 294.5), (4096, 406.8),
        ),
        "v100": (
            (32, 92.19), (45, 96.87), (64, 100.8), (91, 106.2), (129, 109.6), (182, 113.3), (257, 116.8), (363, 118.2),
            (513, 127.2), (725, 169.6), (1025, 231.8), (1450, 315.8), (2051, 439.7), (2901, 612.0), (3072, 651.3),
        ),
        "rtx6000": (
            (32, 40.71), (45, 38.18), (64, 43.25), (91, 49.35), (129, 60.85), (182, 67.87), (257, 89.92), (363, 115.7),
            (513, 155.6), (725, 207.7), (1025, 283.4), (1450, 395.8), (2048, 547.3),
        ),
        "rtx2080ti": (
            (32, 43.08), (45, 56.53), (64, 59.23), (91, 65.94), (129, 74.23), (182, 84.46), (257, 105.7), (363, 133.8),
            (513, 168.9), (725, 227.2), (1024, 309.4),
        ),
        "t4": (
            (32, 42.29), (45, 49.98), (64, 59.33), (91, 75.39), (129, 103.3), (182, 136.7), (257, 186.6), (363, 259.0),
            (513, 354.8), (725, 495.6), (1024, 701.5),
        ),
    },
    backward_part=TWO_THIRDS,
    gradient_bytes=4 * 11.17e6,
    epoch_samples=50_000,
    base_batch=128,
    most_batch=4096,
    noise=(
        (391, 72), (1173, 145), (2344, 325), (4297, 992), (8204, 2214), (12110, 2904), (16016, 3834), (19922, 4944),
        (23438, 6444), (27344, 9430), (31250, 17071),
    ),
    target="94 % accuracy",
    target_steps=26_172,
    restart_s=50,
)  # fmt: skip

IMAGENET = Workload(
    name="imagenet",
    what="ResNet-50 on ImageNet",
    source="Sia",
    step_ms={
        "a100": (
            (20, 150.9), (28, 150.1), (40, 155.9), (57, 165.8), (81, 179.1), (115, 200.5), (163, 243.1), (231, 297.8),
            (327, 368.0), (462, 489.1), (653, 641.6), (800, 773.0),
        ),
        "v100": (
            (20, 156.5), (28, 154.4), (40, 170.7), (57, 180.4), (81, 214.8), (115, 247.0), (163, 311.1), (231, 414.4),
            (327, 529.9), (462, 714.4), (600, 890.6),
        ),
        "rtx6000": (
            (20, 172.9), (28, 173.2), (40, 185.6), (57, 199.1), (81, 274.5), (115, 278.3), (163, 447.0), (231, 606.8),
            (327, 595.9), (400, 963.4),
        ),
        "rtx2080ti": (
            (20, 213.5), (28, 224.5), (40, 229.0), (57, 213.8), (81, 320.8), (115, 329.1), (163, 505.4), (200, 462.6),
        ),
        "t4": (
            (20, 146.2), (28, 206.9), (40, 252.3), (57, 322.7), (81, 419.5), (115, 559.0), (163, 761.2), (200, 922.3),
        ),
    },
    backward_part=TWO_THIRDS,
    gradient_bytes=4 * 25.56e6,
    epoch_samples=1_281_167,
    base_batch=200,
    most_batch=12_800,
    noise=(
        (6406, 928), (19218, 3783), (32030, 4580), (64059, 5408), (121_712, 5934), (179_363, 6057), (237_014, 11_584),
        (288_261, 11_397), (345_913, 11_256), (403_565, 14_686), (461_217, 14_262),
    ),
    target="75 % accuracy",
    target_steps=429_191,
    restart_s=250,
)  # fmt: skip

DEEPSPEECH2 = Workload(
    name="deepspeech2",
    what="DeepSpeech2 on VoxForge",
    source="Sia",
    step_ms={
        "a100": (
            (10, 423.4), (14, 490.9), (20, 570.9), (28, 622.1), (40, 859.1), (57, 1119.0), (81, 1520.0), (115, 2088.0),
            (163, 2566.0), (231, 3237.0), (320, 4128.0),
        ),
        "v100": (
            (10, 270.1), (14, 289.5), (20, 350.5), (28, 414.3), (40, 541.0), (57, 718.4), (81, 1003.0), (115, 1460.0),
            (163, 2122.0), (231, 3130.0), (240, 3341.0),
        ),
        "rtx6000": (
            (10, 391.5), (14, 421.2), (20, 490.0), (28, 560.9), (40, 702.0), (57, 973.7), (81, 1500.0), (115, 2313.0),
            (160, 3288.0),
        ),
        "rtx2080ti": ((10, 298.4), (14, 344.8), (20, 393.2), (28, 528.9), (40, 661.1), (57, 1075.0)),
        "t4": ((10, 464.9), (14, 557.0), (20, 679.7), (28, 849.4), (40, 1120.0), (57, 1663.0), (80, 2539.0)),
    },
    backward_part=TWO_THIRDS,
    # Five bidirectional GRU layers of 800 on two convolutions, counted from the architecture.
    gradient_bytes=4 * 41.2e6,
    epoch_samples=7140,
    base_batch=20,
    most_batch=640,
    noise=(
        (357, 10), (1071, 14), (1785, 60), (3213, 334), (6069, 1465), (8925, 5569), (11_781, 15_741), (14_637, 25_174),
    ),
    target="25 % word error rate",
    target_steps=11_415,
    restart_s=25,
)  # fmt: skip

BERT = Workload(
    name="bert",
    what="BERT-base fine-tuned on SQuAD",
    source="Sia",
    step_ms={
        "a100": (
            (4, 145.5), (6, 147.0), (8, 153.3), (11, 160.0), (16, 183.0), (23, 216.9), (33, 265.9), (47, 335.3),
            (48, 338.7),
        ),
        "v100": ((4, 187.2), (6, 228.5), (8, 270.4), (11, 325.7), (16, 434.7), (23, 580.2), (33, 776.8), (36, 861.2)),
        "rtx6000": ((4, 206.7), (6, 248.2), (8, 291.2), (11, 358.3), (16, 460.3), (23, 615.6), (24, 634.9)),
        "rtx2080ti": ((4, 245.9), (6, 319.5), (8, 361.4), (11, 406.3), (12, 440.5)),
        "t4": ((4, 441.6), (6, 555.7), (8, 689.6), (11, 841.6), (12, 907.8)),
    },
    backward_part=TWO_THIRDS,
    gradient_bytes=4 * 108.9e6,
    epoch_samples=88_641,
    base_batch=12,
    most_batch=384,
    noise=((7387, 423), (14_774, 1124)),
    target="F1 of 88",
    target_steps=14_774,
    restart_s=120,
)  # fmt: skip

OPT_350M = Workload(
    name="opt-350m",
    what="OPT-350M at sequence 2048",
    source="Sailor",
    step_ms={
        "gh200": ((1, 99.0), (2, 176.0), (4, 349.0), (8, 719.0)),
        "a100-40": ((1, 207.0), (2, 396.0), (4, 774.0), (8, 1531.0)),
        "a100-80": ((1, 200.0), (2, 362.0), (4, 699.0), (8, 1379.0)),
        "rtx3090": ((1, 417.0), (2, 825.0), (4, 1643.0), (8, 3412.0)),
        "v100": ((1, 638.0), (2, 1250.0), (4, 2610.0)),
        "titan-rtx": ((1, 723.0), (2, 1434.0), (4, 2870.0), (8, 5740.0)),
        "rtx2080": ((1, 766.0), (2, 1525.0), (4, 3057.0)),
    },
    # 146 of 207 ms on the A100-40; the other cards lie between 0.67 and 0.75.
    backward_part=0.71,
    gradient_bytes=4 * 331e6,
    epoch_samples=20_480,
    base_batch=256,
    most_batch=256,
    noise=(),
    target="ten passes over 20,480 sequences",
    target_steps=800,
    restart_s=76,
)

WORKLOADS: Mapping[str, Workload] = {w.name: w for w in (CIFAR10, IMAGENET, DEEPSPEECH2, BERT, OPT_350M)}

PRICES_PER_HOUR: Mapping[str, float] = {"a100": 3.67, "a100-40": 3.67, "v100": 2.86, "gh200": 11.06}
"""US dollars for one GPU, Sailor's figures for one cloud; other cards were not priced there."""


def straight_line(workload: Workload, gpu: str) -> SplitMember:
    """Return a member of this GPU with the operator's model: a line in seconds, by relative least squares."""
    points: Points = workload.step_ms[gpu]
    weight = [1.0 / ms**2 for _, ms in points]
    whole = sum(weight)
    x_mean = sum(w * x for w, (x, _) in zip(weight, points, strict=True)) / whole
    y_mean = sum(w * y for w, (_, y) in zip(weight, points, strict=True)) / whole
    spread = sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weight, points, strict=True))
    joint = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weight, points, strict=True))
    slope = max(0.0, joint / spread) if spread > 0 else y_mean / x_mean
    fixed = max(0.0, y_mean - slope * x_mean)
    part = workload.backward_part
    return SplitMember(
        compute=ComputeTime(
            per_sample_s=(1 - part) * slope * MILLISECOND_S,
            fixed_s=(1 - part) * fixed * MILLISECOND_S,
            backward_per_sample_s=part * slope * MILLISECOND_S,
            backward_fixed_s=part * fixed * MILLISECOND_S,
        ),
        micro_cap_samples=points[-1][0],
    )
