"""Summary of several runs of one policy, for tables and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from heterotrain_simulator.result import RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Means over seeds; ``None`` where a run lacks the figure.

    Attributes:
        policy: its name.
        runs: number of runs.
        reached: runs that reached the target.
        target_s, target_low_s, target_high_s: seconds to the target: mean, least, largest.
        cost_at_target: US dollars until the target.
        end_s, cost: of the whole run.
        progress: fraction of the way to the target at the end, in [0, 1].
        samples_per_s: over the whole run.
        efficiency: samples per second over the sum of solo rates in the last period.
        effective_part: fraction of the time with members that went into committed steps.
        paused_s, changes, repeated_steps: means.
        prediction_error: median of |predicted / measured - 1| over all periods; ``None`` without predictions.
    """

    policy: str
    runs: int
    reached: int
    target_s: float | None
    target_low_s: float | None
    target_high_s: float | None
    cost_at_target: float | None
    end_s: float
    cost: float
    progress: float
    samples_per_s: float
    efficiency: float | None
    effective_part: float
    paused_s: float
    changes: float
    repeated_steps: float
    prediction_error: float | None


def summarize(runs: Sequence[RunResult], *, target_steps: float) -> Summary:
    """Return the summary of one policy's runs, at least one."""
    targets = [run.target_s for run in runs if run.target_s is not None]
    costs = [run.cost_at_target for run in runs if run.cost_at_target is not None]
    all_reached = len(targets) == len(runs)
    errors = [abs(error) for run in runs for error in run.prediction_errors]
    efficiencies = [e for run in runs if (e := _last_efficiency(run)) is not None]
    return Summary(
        policy=runs[0].policy,
        runs=len(runs),
        reached=len(targets),
        target_s=statistics.mean(targets) if all_reached else None,
        target_low_s=min(targets) if all_reached else None,
        target_high_s=max(targets) if all_reached else None,
        cost_at_target=statistics.mean(costs) if all_reached else None,
        end_s=statistics.mean(run.end_s for run in runs),
        cost=statistics.mean(run.cost for run in runs),
        progress=statistics.mean(
            min(1.0, run.periods[-1].progress / target_steps) if run.periods else 0.0 for run in runs
        ),
        samples_per_s=statistics.mean(run.samples / run.end_s for run in runs),
        efficiency=statistics.mean(efficiencies) if efficiencies else None,
        effective_part=statistics.mean(run.effective_part for run in runs),
        paused_s=statistics.mean(run.paused_s for run in runs),
        changes=statistics.mean(run.changes for run in runs),
        repeated_steps=statistics.mean(run.repeated_steps for run in runs),
        prediction_error=statistics.median(errors) if errors else None,
    )


def as_document(summary: Summary) -> dict[str, Any]:
    """Return the summary in JSON's names, units at their end."""
    names = {
        "target_s": "targetSeconds", "target_low_s": "targetSecondsLeast", "target_high_s": "targetSecondsMost",
        "end_s": "endSeconds", "paused_s": "pausedSeconds", "samples_per_s": "samplesPerSecond",
    }  # fmt: skip
    return {names.get(key, _camel(key)): value for key, value in asdict(summary).items()}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _last_efficiency(run: RunResult) -> float | None:
    measured = [period for period in run.periods if period.step_s is not None]
    if not measured:
        return None
    period = measured[-1]
    return period.batch_samples / (period.step_s or 1.0) / period.solo_samples_per_s
