"""Published measurements and results of systems that train models larger than one device.

Sources
    Cephalo: ICS 2025, repository benson-guo/cephalo at 16b5ed3, ``data/model_latencies.json`` (milliseconds of one
        transformer layer, sequences of 512, by size of the micro-batch), ``data/model_memory.json`` and
        ``example/gpt_2.7b.json``, a plan of its own planner.
    Sailor: SOSP 2025, repository eth-easl/sailor, measured iterations of OPT-350M on mixed cards, equal shares.
    Helix: ASPLOS 2025, repository Thesys-lab/Helix-ASPLOS25. Tokens per second by layers held are what its profiles
        and its own formulas give for the 24 machines of ``examples/simulation``; the flow is the one of its README.
    DT-FM: NeurIPS 2022, repository DS3Lab/DT-FM at 69f05e5, ``scheduler/heuristic_evolutionary_solver``: delay and
        bandwidth of five networks in ``config.py``; sizes in ``scheduler.py`` (GPT-3 XL, 64 devices, 8 stages).
    HetHub: arXiv 2405.16256, the ratio of its abstract.

Figures were read in these repositories; none of their code is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

Floats = tuple[float, ...]

LLAMA_7B_PARAMETERS = 6_878_924_800
LLAMA_7B_LAYERS = 32
LLAMA_7B_MS: Mapping[str, tuple[Floats, Floats]] = {
    "h100": (
        (0.80, 1.31, 2.14, 2.61, 3.27, 4.12, 4.45, 5.26, 5.93, 6.45, 6.96, 7.73, 8.99, 8.62, 9.30, 10.87),
        (2.79, 3.92, 5.35, 6.52, 7.88, 9.19, 10.56, 11.73, 13.13, 14.14, 15.47, 17.02, 18.49, 19.86, 21.39, 22.02),
    ),
    "a100-40": (
        (1.47, 2.61, 3.81, 4.97, 5.96, 7.43, 8.58, 9.68, 10.80, 11.89, 13.31, 14.41, 15.44, 16.63, 17.76, 18.88),
        (5.52, 8.14, 10.26, 12.65, 14.87, 17.38, 19.76, 21.81, 24.46, 26.93, 29.31, 31.65, 33.83, 36.03, 38.47, 40.48),
    ),
    "a6000": (
        (2.72, 5.09, 6.99, 9.43, 11.57, 13.65, 15.73, 18.08, 20.52, 21.66, 24.01, 26.36, 28.35, 30.63, 31.89, 34.31),
        (10.70, 15.26, 19.51, 24.40, 28.46, 33.27, 37.76, 42.60, 47.14, 52.07, 56.71, 62.15, 65.83, 71.16,
         76.10, 81.22),
    ),
    "a10g": (
        (5.10, 9.32, 12.52, 17.15, 21.40, 24.75, 28.67, 32.33, 36.80, 39.85, 43.81, 48.36, 51.86, 56.09, 59.25, 63.32),
        (17.04, 25.33, 32.11, 40.62, 47.78, 56.33, 65.28, 73.14, 80.99, 88.33, 97.01, 105.7, 112.5, 121.2,
         128.4, 137.1),
    ),
    "l4": (
        (4.19, 7.45, 11.30, 15.76, 20.88, 24.45, 28.80, 33.02, 37.26, 42.44, 46.65, 51.07, 55.78, 60.30, 65.12, 69.89),
        (23.14, 31.49, 39.78, 49.76, 60.93, 70.70, 81.58, 92.45, 103.5, 115.5, 127.5, 138.8, 149.7, 162.0,
         176.9, 187.7),
    ),
    "t4": (
        (8.35, 16.52, 20.85, 28.73, 35.11, 45.98, 52.73, 64.71, 72.16, 84.31, 98.23, 106.6, 121.1, 128.7, 136.0, 152.1),
        (31.38, 44.28, 59.11, 78.60, 98.53, 117.7, 141.9, 167.1, 181.9, 203.7, 230.3, 251.3, 271.9, 291.9,
         323.7, 336.8),
    ),
    "v100-16": (
        (3.77, 7.00, 10.70, 13.79, 16.29, 18.67, 22.52, 26.18, 29.50, 32.20, 35.78, 38.91, 41.78, 45.37, 48.04, 51.68),
        (11.33, 18.25, 24.83, 31.08, 34.65, 42.02, 48.70, 54.78, 61.01, 68.27, 74.49, 81.41, 85.72, 92.01,
         98.13, 104.7),
    ),
}  # fmt: skip
"""Cephalo: Llama 7B in FP16, forward and backward milliseconds of one layer for 1 … 16 sequences, recomputation
included in backward."""
GPT_27B_MS: Mapping[str, tuple[Floats, Floats]] = {
    "l40s": (
        (3.67, 7.88, 11.84, 16.24, 20.09, 24.14, 27.49, 32.33, 36.16, 40.07, 44.63, 48.45, 52.23, 56.01, 60.70, 65.14),
        (8.26, 15.02, 21.94, 29.50, 35.82, 43.23, 49.97, 57.73, 65.77, 72.01, 79.58, 86.29, 95.23, 102.8, 109.5, 116.2),
    ),
    "a6000": (
        (6.03, 11.53, 17.60, 23.06, 29.06, 34.67, 40.50, 46.31, 52.48, 58.53, 64.46, 70.69, 77.18, 83.16, 91.13, 98.26),
        (12.54, 23.41, 33.93, 45.12, 55.59, 66.51, 77.32, 88.90, 100.2, 111.7, 122.7, 134.7, 147.0, 159.5,
         173.0, 184.5),
    ),
    "l4": (
        (12.42, 25.97, 39.10, 51.46, 64.05, 78.19, 90.49, 103.8, 117.3, 130.9, 145.1, 160.3, 175.0, 190.1,
         209.1, 224.2),
        (27.07, 50.38, 73.77, 99.43, 125.4, 148.6, 173.0, 205.1, 235.2, 257.8, 294.6, 319.7, 345.3, 394.1,
         412.4, 448.5),
    ),
    "p40": (
        (17.77, 34.38, 52.26, 70.13, 89.12, 105.6, 123.6, 148.5, 160.3, 178.2, 208.0, 215.4, 233.6, 268.6,
         271.1, 288.9),
        (33.69, 58.97, 84.43, 113.6, 139.6, 166.6, 196.1, 223.3, 252.2, 282.1, 311.9, 343.4, 375.0, 405.9,
         436.8, 467.5),
    ),
    "p100": (
        (15.91, 31.58, 47.48, 62.38, 78.51, 94.57, 112.8, 130.3, 148.8, 168.1, 186.5, 206.2),
        (35.18, 59.16, 84.34, 107.4, 135.7, 163.2, 183.4, 211.5, 239.9, 266.0, 288.6, 317.0),
    ),
}  # fmt: skip
"""The same for GPT 2.7B in FP32. The P100 was measured up to 12 sequences."""
GPT_27B_FP16_LINES: Mapping[str, tuple[float, float]] = {
    "a6000": (7.056488, 3.068228),
    "l4": (18.361196, 6.024328),
    "p40": (43.654190, 6.010050),
}
"""Cephalo's fits for GPT 2.7B in FP16: milliseconds a sequence, and fixed milliseconds, both passes together."""
CEPHALO_PLAN: tuple[tuple[str, int, int], ...] = (("l4", 13, 1), ("l4", 12, 2), ("a6000", 34, 1), ("p40", 5, 1))
"""Cephalo's own plan for GPT 2.7B, FP16, batch 64: card, sequences, micro-batches."""

MEMORY_GIB: Mapping[str, float] = {
    "t4": 15, "v100-16": 16, "l4": 22.5, "a10g": 22.5, "a100-40": 40, "a6000": 48, "h100": 94, "p40": 22.5, "p100": 12,
    "l40s": 48,
}  # fmt: skip
NOMINAL_TFLOPS: Mapping[str, float] = {"a100-40": 312, "a6000": 155, "a10g": 70, "t4": 65}
"""Dense FP16 of the makers' data sheets, for planners that do not measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRun:
    """One measured run of Sailor's validation.

    Attributes:
        name: of the run.
        micro_batch_s: seconds of a micro-batch by replica.
        micro_batches: of the global batch.
        sync_s: measured exchange.
        measured_s: of an iteration with equal shares.
    """

    name: str
    micro_batch_s: Floats
    micro_batches: int
    sync_s: float
    measured_s: float


SAILOR_RUNS = (
    MixedRun(
        name="4 replicas: 3090, 2080, Titan, 2080 at tensor parallel 8",
        micro_batch_s=(1.896, 0.910, 0.776, 0.910),
        micro_batches=128,
        sync_s=21.6,
        measured_s=83.45,
    ),
    MixedRun(
        name="6 replicas: 3090, 3 × 2080, 2 × Titan at tensor parallel 8",
        micro_batch_s=(1.896, 0.910, 0.910, 0.910, 0.776, 0.776),
        micro_batches=144,
        sync_s=22.6,
        measured_s=70.79,
    ),
)

HELIX_TOKENS_PER_S: Mapping[str, Floats] = {
    "A100": (
        23833.9, 11384.3, 7201.4, 5264.6, 4096.7, 3124.1, 2595.7, 2045.6, 1754.4, 1392.6, 1212.2, 952.1,
    ),
    "L4": (7557.9, 3625.7, 2171.9, 1476.1, 1017.6, 747.8, 531.7),
    "T4": (5709.2, 2434.4, 1347.9, 757.9),
}  # fmt: skip
"""Llama-2 70B: tokens per second of a machine that holds 1, 2, … layers, as many as fit."""
HELIX_MACHINES: Mapping[str, int] = {"A100": 4, "L4": 8, "T4": 12}
HELIX_LAYERS = 80
HELIX_COMPUTE_BOUND_PER_S, HELIX_FLOW_PER_S = 2803.86, 1289.56
"""Printed in its README: the sum of all machines' best rates, and the flow of the placement that it found."""
HELIX_TOKEN_BYTES, HELIX_LINK_BYTES_PER_S = 16_384, 1e9 / 8

WIDE_AREA: tuple[tuple[str, str, float, float], ...] = (
    ("Oregon", "Virginia", 67, 0.79),
    ("Oregon", "Ohio", 49, 1.1),
    ("Oregon", "Tokyo", 96, 0.523),
    ("Oregon", "Seoul", 124, 0.46),
    ("Oregon", "Singapore", 163, 0.341),
    ("Oregon", "Sydney", 139, 0.36),
    ("Oregon", "London", 136, 0.42),
    ("Oregon", "Frankfurt", 143, 0.404),
    ("Oregon", "Ireland", 124, 0.482),
    ("Virginia", "Ohio", 11, 1.12),
    ("Virginia", "Tokyo", 143, 0.524),
    ("Virginia", "Seoul", 172, 0.5),
    ("Virginia", "Singapore", 230, 0.364),
    ("Virginia", "Sydney", 197, 0.383),
    ("Virginia", "London", 76, 1.16),
    ("Virginia", "Frankfurt", 90, 1.02),
    ("Virginia", "Ireland", 67, 1.05),
    ("Ohio", "Tokyo", 130, 0.694),
    ("Ohio", "Seoul", 159, 0.529),
    ("Ohio", "Singapore", 197, 0.452),
    ("Ohio", "Sydney", 185, 0.484),
    ("Ohio", "London", 86, 1.05),
    ("Ohio", "Frankfurt", 99, 0.799),
    ("Ohio", "Ireland", 77, 1.14),
    ("Tokyo", "Seoul", 34, 1.1),
    ("Tokyo", "Singapore", 73, 1.01),
    ("Tokyo", "Sydney", 100, 0.761),
    ("Tokyo", "London", 210, 0.366),
    ("Tokyo", "Frankfurt", 223, 0.36),
    ("Tokyo", "Ireland", 199, 0.465),
    ("Seoul", "Singapore", 74, 1.14),
    ("Seoul", "Sydney", 148, 0.58),
    ("Seoul", "London", 238, 0.342),
    ("Seoul", "Frankfurt", 235, 0.358),
    ("Seoul", "Ireland", 228, 0.335),
    ("Singapore", "Sydney", 92, 0.816),
    ("Singapore", "London", 169, 0.5),
    ("Singapore", "Frankfurt", 155, 0.535),
    ("Singapore", "Ireland", 179, 0.492),
    ("Sydney", "London", 262, 0.326),
    ("Sydney", "Frankfurt", 265, 0.328),
    ("Sydney", "Ireland", 254, 0.344),
    ("London", "Frankfurt", 14, 1.14),
    ("London", "Ireland", 12, 1.09),
    ("Frankfurt", "Ireland", 24, 1.08),
)
"""DT-FM: city, city, milliseconds, Gb/s."""
DTFM_STAGES = 8
DTFM_STAGE_GRADIENT_BYTES = 0.65e9
"""An eighth of 1.3 billion parameters in FP32."""
DTFM_BOUNDARY_BYTES = 0.4713e9
"""61 sequences of 2048 tokens of 2024 numbers in FP16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WideAreaCase:
    """One of DT-FM's simulated cases.

    Attributes:
        where: short.
        zones: of the devices, with their numbers: nodes, regions or cities.
        within: zone, milliseconds, Gb/s between two of its devices.
        links: zone, zone, milliseconds, Gb/s.
        found_s: what DT-FM's code finds for it, run once here with a population of 100 and 900 offspring.
    """

    where: str
    zones: tuple[tuple[str, int], ...]
    within: tuple[tuple[str, float, float], ...]
    links: tuple[tuple[str, str, float, float], ...]
    found_s: float


_NODES = tuple(f"node {number}" for number in range(8))
_SPOT = (*_NODES, "single devices")
_WORLD = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
_AMERICA = ("Virginia", "Oregon", "California", "Ohio")
DTFM_CASES = (
    WideAreaCase(
        where="8 nodes of a data centre",
        zones=tuple((name, 8) for name in _NODES),
        within=tuple((name, 0, 100) for name in _NODES),
        links=tuple((*pair, 0, 3.125) for pair in itertools.combinations(_NODES, 2)),
        found_s=3.44,
    ),
    WideAreaCase(
        where="8 spot nodes of 4 and 32 single ones",
        zones=(*((name, 4) for name in _NODES), (_SPOT[-1], 32)),
        within=(*((name, 0, 100) for name in _NODES), (_SPOT[-1], 0, 1.25)),
        links=tuple((*pair, 0, 1.25) for pair in itertools.combinations(_SPOT, 2)),
        found_s=49.50,
    ),
    WideAreaCase(
        where="2 campuses",
        zones=(("Ohio", 32), ("Virginia", 32)),
        within=(("Ohio", 1, 5), ("Virginia", 1, 5)),
        links=(("Ohio", "Virginia", 11, 1.12),),
        found_s=16.09,
    ),
    WideAreaCase(
        where="4 American regions",
        zones=tuple((name, 16) for name in _AMERICA),
        within=tuple((name, 5, 2) for name in _AMERICA),
        links=(
            ("Virginia", "Oregon", 67, 1.15),
            ("Virginia", "California", 59, 1.05),
            ("Virginia", "Ohio", 11, 1.12),
            ("Oregon", "California", 12, 1.25),
            ("Oregon", "Ohio", 49, 1.10),
            ("California", "Ohio", 52, 1.02),
        ),
        found_s=34.80,
    ),
    WideAreaCase(
        where="8 cities of the world",
        zones=tuple((name, 8) for name in _WORLD),
        within=tuple((name, 5, 2) for name in _WORLD),
        links=WIDE_AREA,
        found_s=49.22,
    ),
)

HETHUB_RATIO = 0.9749
"""Achieved by HetHub on 768 accelerators of two makers, of the sum of what each type reaches alone."""
