"""What pipelines of real trainer processes on emulated devices have measured, and the planner's times for any cut.

Workers run the trainer with gloo. They emulate devices of other speeds by waits in their blocks, because the processors
of one machine are alike. As in a job, each worker measures the model's units before the first plan.
"""

from __future__ import annotations

import sys
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from heterotrain_core.contract import metrics
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.costs import Costs
from heterotrain_planner.layout.cut import layout_of
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import PlannedStage
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
from distributed.harness import Operator, Worker  # noqa: E402  # after the path is set
from support.zygote import Zygote  # noqa: E402  # after the path is set

__all__ = ["ROOT", "Operator", "Worker", "Zygote", "profiles", "stages_of"]


def profiles(workers: Mapping[str, Worker]) -> tuple[UnitProfile, ...]:
    """Return what the workers have measured of the units and export, with each worker as a kind of device."""
    seconds: dict[int, dict[str, dict[int, dict[str, float]]]] = defaultdict(lambda: defaultdict(dict))
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    names: dict[int, str] = {}
    for worker in workers.values():
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
            if sample.name == metrics.UNIT_BYTES:
                unit = int(sample.labels[metrics.LABEL_UNIT])
                sizes[unit][sample.labels[metrics.LABEL_WHAT]] = int(sample.value)
                names[unit] = sample.labels[metrics.LABEL_UNIT_NAME]
            elif sample.name == metrics.UNIT_SECONDS:
                points = seconds[int(sample.labels[metrics.LABEL_UNIT])][worker.name]
                both = points.setdefault(int(sample.labels[metrics.LABEL_SAMPLES]), {})
                both[sample.labels[metrics.LABEL_PHASE]] = sample.value
    return tuple(
        UnitProfile(
            name=names[unit], parameter_bytes=sizes[unit][metrics.WHAT_PARAMETERS],
            activation_bytes=sizes[unit][metrics.WHAT_ACTIVATIONS], boundary_bytes=sizes[unit][metrics.WHAT_BOUNDARY],
            seconds={
                kind: tuple(
                    UnitSeconds(
                        micro_batch_samples=size, forward_s=both[metrics.PHASE_FORWARD],
                        backward_s=both[metrics.PHASE_BACKWARD],
                    )
                    for size, both in sorted(points.items())
                )
                for kind, points in seconds[unit].items()
            },
        )
        for unit in sorted(names)
    )  # fmt: skip


def stages_of(problem: Problem, costs: Costs, order: Sequence[int], cuts: Sequence[int]) -> tuple[PlannedStage, ...]:
    """Return the stages of any cut, with the times that the planner predicts for them.

    Args:
        problem: with as many units as edges can be; models beyond ``costs.MOST_CUTS`` units are grouped.
        costs: of the problem.
        order: indices of the kinds, by stage.
        cuts: the first unit of each stage but the first one.
    """
    edges = [0, *cuts, len(problem.units)]
    stages = [(kind, edges[stage], edges[stage + 1]) for stage, kind in enumerate(order)]
    return layout_of(problem, costs, stages).stages
