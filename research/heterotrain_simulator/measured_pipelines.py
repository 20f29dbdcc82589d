"""Measured pipelines on unequal cards, as tests of the planner's own prediction of given layouts.

    AMP: NeurIPS 2022, repository MccRee17/AMP (72eeea4), ``src/results/het_cluster_results.txt`` and
        ``src/known_cost/gpt2_*_1.npy``. GPT-2 of 24 layers on three p3.8xlarge and one g4dn.12xlarge, batch 32, those
        trials that ended and that have no tensor parallelism.
    Sailor: SOSP 2025, repository eth-easl/sailor (cf2c8e3), ``sailor/Planner/simulations/validation/mit``. OPT-350M
        in micro-batches of 2, nodes with tensor parallelism as one device each. N6_D2 is left out: it repeats the
        seconds of N3_D1 to the last digit.

Assumed: shares are equal, as they were; a trial's passes take the profiled seconds, backward twice as long as forward
where only the latter was profiled (AMP's own rule). Sailor's exchange is the measured one of the same run, and its
activations have two bytes a number.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.costs import costs_of
from heterotrain_planner.layout.cut import layout_of
from heterotrain_planner.layout.exchange import exchange_seconds
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import DeviceLayout
from heterotrain_planner.layout.schedule import passes, share_seconds

ROOMY_BYTES = 10**15
"""Memory of a card: these layouts ran, so they fit."""


@dataclass(frozen=True, slots=True)
class AmpTrial:
    """One trial.

    Attributes:
        edges: first layer of each stage, and the number of layers.
        micro_batch_samples: of a micro-batch.
        own_s: by AMP's cost model.
        measured_s: of a step.
    """

    edges: tuple[int, ...]
    micro_batch_samples: int
    own_s: float
    measured_s: float

    @property
    def members(self) -> int:
        """Pipelines; all sixteen cards are in one."""
        return AMP_CARDS // (len(self.edges) - 1)


AMP_CARDS, AMP_BATCH, AMP_WIDTH, AMP_TOKENS, AMP_WORDS = 16, 32, 1024, 1024, 52_256
AMP_V100_S = (
    0.000365973, 0.000175476, 0.00427794, 0.00397944, 0.00387478, 0.0039413, 0.00392938, 0.00389767, 0.00394106,
    0.0038681, 0.00390744, 0.00392413, 0.00398278, 0.00389361, 0.00388288, 0.00391984, 0.00387859, 0.00386357,
    0.00386357, 0.00392962, 0.00385714, 0.00393295, 0.00386548, 0.00387955, 0.00388885, 0.00387931, 7.72476e-05,
    0.000107288, 0.00245786, 0.00086832,
)  # fmt: skip
AMP_T4_S = (
    0.000274181, 7.93934e-05, 0.00490427, 0.00489593, 0.00492525, 0.0049305, 0.0049026, 0.00490403, 0.00529432,
    0.00528407, 0.00529313, 0.00540495, 0.00569773, 0.00569868, 0.00571227, 0.005759, 0.00581455, 0.0057807, 0.00581002,
    0.00579071, 0.00582814, 0.00579691, 0.00571871, 0.00572729, 0.00569344, 0.00570965, 2.45571e-05, 6.93798e-05,
    0.00307631, 0.00147963,
)  # fmt: skip
"""Forward seconds of one sample by layer: embedding, nothing, 24 blocks, nothing twice, head, loss."""
AMP_NODES = ("v100-0", "v100-1", "v100-2", "t4")
"""Of four cards each; cards are numbered by node, and stages by card."""
AMP_TRIALS = (
    AmpTrial((0, 7, 14, 20, 30), 1, 1.0859, 1.47),
    AmpTrial((0, 5, 9, 12, 15, 18, 21, 24, 30), 1, 1.1402, 1.28),
    AmpTrial((0, 3, 5, 7, 9, 11, 13, 15, 16, 17, 19, 20, 21, 22, 23, 25, 30), 1, 1.1465, 1.52),
    AmpTrial((0, 7, 14, 20, 30), 2, 1.3291, 1.53),
    AmpTrial((0, 5, 9, 12, 14, 17, 20, 23, 30), 2, 1.4332, 1.54),
    AmpTrial((0, 3, 5, 7, 9, 11, 13, 14, 16, 18, 19, 20, 21, 23, 24, 25, 30), 2, 1.4591, 1.58),
    AmpTrial((0, 6, 13, 20, 30), 4, 1.8221, 1.71),
    AmpTrial((0, 14, 30), 1, 1.9761, 2.23),
    AmpTrial((0, 3, 7, 11, 14, 17, 20, 23, 30), 4, 2.0041, 1.71),
    AmpTrial((0, 14, 30), 2, 2.1342, 2.26),
    AmpTrial((0, 14, 30), 4, 2.4505, 2.34),
    AmpTrial((0, 30), 1, 2.7789, 2.90),
    AmpTrial((0, 8, 14, 20, 30), 8, 2.7881, 2.07),
)


@dataclass(frozen=True, slots=True)
class SailorPipelines:
    """One run of Sailor's validation with pipelines.

    Attributes:
        name: in the repository.
        edges: first layer of each stage, and the number of layers.
        members: kinds of each pipeline's nodes.
        micro_batches: of the batch.
        exchange_s: measured.
        measured_s: of a step.
    """

    name: str
    edges: tuple[int, ...]
    members: tuple[tuple[str, ...], ...]
    micro_batches: int
    exchange_s: float
    measured_s: float


SAILOR_LAYERS, SAILOR_MICRO_BATCH = 26, 2
SAILOR_S: Mapping[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "3090": ((0.018533, 2e-6), (0.037522, 0.039646), (0.002892, 0.022585)),
    "2080": ((0.007675, 2e-6), (0.016606, 0.020125), (0.00621, 0.014632)),
    "titan": ((0.006495, 2e-6), (0.013889, 0.01741), (0.005318, 0.013428)),
    "3090x2": ((0.001105, 2e-6), (0.005598, 0.013036), (0.010105, 0.014792)),
    "titanx2": ((0.004768, 2e-6), (0.016691, 0.029242), (0.019002, 0.033385)),
}
"""Forward and backward seconds of a micro-batch by kind of node, of eight or two cards: embedding, a block, head."""
SAILOR_BOUNDARY_BYTES = 2 * SAILOR_MICRO_BATCH * 2048 * 1024
SAILOR_SLOW_BYTES_PER_S, SAILOR_FAST_BYTES_PER_S = 0.1149e9, 2.857e9
"""Its fits for large messages between nodes; the fast one is for two nodes of one kind, without a 3090."""
SAILOR_PIPELINES = (
    SailorPipelines("N2_D1", (0, 12, 26), (("3090x2", "titanx2"),), 128, 0.00788, 119.839),
    SailorPipelines("N3_D1", (0, 8, 17, 26), (("3090", "2080", "titan"),), 72, 5.4637, 59.455),
    SailorPipelines("N4_D1", (0, 5, 12, 19, 26), (("3090", "2080", "titan", "2080"),), 128, 0.00158, 83.766),
    SailorPipelines("N4_D2", (0, 12, 26), (("3090", "titan"), ("2080", "2080")), 128, 7.16698, 66.067),
    SailorPipelines(
        "N6_D3", (0, 12, 26), (("3090", "titan"), ("2080", "2080"), ("2080", "titan")), 144, 8.89421, 54.239
    ),
)


def amp_seconds(trial: AmpTrial) -> float:
    """Return the predicted seconds of a step of one trial, exchange of the gradients included."""
    problem = amp_problem(trial.micro_batch_samples)
    stages = len(trial.edges) - 1
    # Card ``stage · members + member`` has this stage of this member.
    layouts = [
        _layout(problem, trial.edges, [(stage * trial.members + member) // 4 for stage in range(stages)])
        for member in range(trial.members)
    ]
    each = AMP_BATCH // trial.members // trial.micro_batch_samples
    return max(share_seconds(passes(layout.stages), each) for layout in layouts) + exchange_seconds(problem, layouts)


def amp_problem(micro_batch_samples: int) -> Problem:
    """Return GPT-2 on AMP's nodes, with its links and numbers of four bytes."""
    embedding, block = AMP_WIDTH * AMP_WORDS, 12 * AMP_WIDTH**2
    parameters = [embedding, 0, *[block] * 24, 0, 0, embedding, 0]
    units = tuple(
        UnitProfile(
            name=f"layer {index}",
            parameter_bytes=4 * parameters[index],
            activation_bytes=0,
            boundary_bytes=4 * AMP_TOKENS * AMP_WIDTH,
            seconds={
                node: (UnitSeconds(micro_batch_samples=1, forward_s=forward, backward_s=2 * forward),)
                for node in AMP_NODES
                for forward in [(AMP_T4_S if node == "t4" else AMP_V100_S)[index]]
            },
        )
        for index in range(len(parameters))
    )
    inside = {(node, node): Link(bytes_per_s=(50e9 if node == "t4" else 170e9) / 8) for node in AMP_NODES}
    return Problem(
        units=units,
        kinds=tuple(DeviceKind(name=node, count=4, memory_bytes=ROOMY_BYTES) for node in AMP_NODES),
        default_link=Link(bytes_per_s=10e9 / 8),
        links=inside,
        batch_samples=AMP_BATCH,
        micro_batches=(micro_batch_samples,),
    )


def sailor_seconds(run: SailorPipelines) -> float:
    """Return the predicted seconds of a step of one run, with its measured exchange."""
    kinds = sorted({kind for member in run.members for kind in member})
    units = tuple(
        UnitProfile(
            name=f"layer {index}",
            parameter_bytes=0,
            activation_bytes=0,
            boundary_bytes=SAILOR_BOUNDARY_BYTES,
            seconds={
                kind: (UnitSeconds(micro_batch_samples=1, forward_s=forward, backward_s=backward),)
                for kind in kinds
                for forward, backward in [SAILOR_S[kind][(index > 0) + (index == SAILOR_LAYERS - 1)]]
            },
        )
        for index in range(SAILOR_LAYERS)
    )
    fast = {(kind, kind): Link(bytes_per_s=SAILOR_FAST_BYTES_PER_S) for kind in kinds if "3090" not in kind}
    problem = Problem(
        units=units,
        kinds=tuple(DeviceKind(name=kind, count=8, memory_bytes=ROOMY_BYTES) for kind in kinds),
        default_link=Link(bytes_per_s=SAILOR_SLOW_BYTES_PER_S),
        links=fast,
        batch_samples=run.micro_batches,
        micro_batches=(1,),
    )
    each = run.micro_batches // len(run.members)
    layouts = [_layout(problem, run.edges, [kinds.index(kind) for kind in member]) for member in run.members]
    return max(share_seconds(passes(layout.stages), each) for layout in layouts) + run.exchange_s


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation; equal values share their mean rank."""
    return float(np.corrcoef([_ranks(one), _ranks(other)])[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum((each > other) + (each >= other) for other in values) / 2 for each in values]


def _layout(problem: Problem, edges: Sequence[int], kinds: Sequence[int]) -> DeviceLayout:
    costs = costs_of(problem, problem.micro_batches[0])
    stages = [(kind, first, end) for kind, (first, end) in zip(kinds, itertools.pairwise(edges), strict=True)]
    return layout_of(problem, costs, stages)
