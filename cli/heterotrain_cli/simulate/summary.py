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


def summarize(outcomes: Sequence[RunResult], *, target_steps: float) -> Summary:
    """Return the summary of one policy's runs, at least one."""
    targets = [o.target_s for o in outcomes if o.target_s is not None]
    costs = [o.cost_at_target for o in outcomes if o.cost_at_target is not None]
    all_reached = len(targets) == len(outcomes)
    errors = [abs(error) for o in outcomes for error in o.prediction_errors]
    efficiencies = [e for o in outcomes if (e := _last_efficiency(o)) is not None]
    return Summary(
        policy=outcomes[0].policy,
        runs=len(outcomes),
        reached=len(targets),
        target_s=statistics.mean(targets) if all_reached else None,
        target_low_s=min(targets) if all_reached else None,
        target_high_s=max(targets) if all_reached else None,
        cost_at_target=statistics.mean(costs) if all_reached else None,
        end_s=statistics.mean(o.end_s for o in outcomes),
        cost=statistics.mean(o.cost for o in outcomes),
        progress=statistics.mean(
            min(1.0, o.periods[-1].progress / target_steps) if o.periods else 0.0 for o in outcomes
        ),
        samples_per_s=statistics.mean(o.samples / o.end_s for o in outcomes),
        efficiency=statistics.mean(efficiencies) if efficiencies else None,
        effective_part=statistics.mean(o.effective_part for o in outcomes),
        paused_s=statistics.mean(o.paused_s for o in outcomes),
        changes=statistics.mean(o.changes for o in outcomes),
        repeated_steps=statistics.mean(o.repeated_steps for o in outcomes),
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


def _last_efficiency(outcome: RunResult) -> float | None:
    measured = [row for row in outcome.periods if row.step_s is not None]
    if not measured:
        return None
    row = measured[-1]
    return row.batch_samples / (row.step_s or 1.0) / row.solo_samples_per_s
