"""Pictures of a comparison: progress over time and cost, shares over time; all are labelled as simulated."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heterotrain_simulator.result import RunResult
from heterotrain_simulator.scenario import Scenario

from heterotrain_simulate.tables import title

_HOUR_S = 3600.0
COLOURS = {
    "even": "#8c8c8c",
    "adaptive-even": "#4c72b0",
    "proportional": "#dd8452",
    "adaptive-proportional": "#8172b3",
    "cannikin": "#937860",
    "heterotrain": "#2a7f3f",
}
_OF_POOLS = ("#2a7f3f", "#4c72b0", "#dd8452", "#937860", "#c44e52", "#8172b3")
_DPI = 110


def draw(folder: Path, scenario: Scenario, runs: Mapping[str, Sequence[RunResult]]) -> list[Path]:
    """Write the pictures of a comparison into a folder and return their paths.

    Args:
        folder: must exist.
        scenario: the scenario.
        runs: results by policy, one for each seed; the shares are those of the first seed.
    """
    import matplotlib as mpl  # noqa: PLC0415  # half a second of loading time

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # only after the backend is chosen

    pictures = [_against(plt, scenario, runs, cost=False)]
    names = ["progress"]
    if any(outcome.cost for outcomes in runs.values() for outcome in outcomes):
        pictures.append(_against(plt, scenario, runs, cost=True))
        names.append("cost")
    pictures.append(_shares(plt, scenario, runs))
    names.append("shares")
    paths = []
    for name, figure in zip(names, pictures, strict=True):
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=_DPI, metadata={"Software": None})
        plt.close(figure)
        paths.append(path)
    return paths


def _against(plt: Any, scenario: Scenario, runs: Mapping[str, Sequence[RunResult]], *, cost: bool) -> Any:
    """Return progress over simulated hours, or over cost."""
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    target = scenario.workload.target_steps
    for policy, outcomes in runs.items():
        for i, outcome in enumerate(outcomes):
            at = [0.0, *(period.cost if cost else period.until_s / _HOUR_S for period in outcome.periods)]
            done = [0.0, *(min(1.0, period.progress / target) for period in outcome.periods)]
            axes.plot(at, done, color=COLOURS[policy], label=policy if i == 0 else None, linewidth=1.4)
    axes.set(
        xlabel="US dollars" if cost else "simulated hours",
        ylabel=f"way to {scenario.workload.target}",
        ylim=(0, 1.02),
        xlim=(0, None),
    )
    axes.set_title(_heading(scenario), fontsize=8.5)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _shares(plt: Any, scenario: Scenario, runs: Mapping[str, Sequence[RunResult]]) -> Any:
    """Return each pool's samples per step over time, a panel for each policy."""
    pools = [group.pool for group in scenario.groups]
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(7.5, 1.4 + 1.2 * len(runs)), sharex=True, squeeze=False, layout="constrained"
    )
    for (policy, outcomes), axes in zip(runs.items(), panels[:, 0], strict=True):
        periods = outcomes[0].periods
        edges = [period.from_s / _HOUR_S for period in periods] + [periods[-1].until_s / _HOUR_S if periods else 0.0]
        parts = [
            [sum(s for s, p in zip(period.shares, period.pools, strict=True) if p == pool) for period in periods]
            for pool in pools
        ]
        if periods:
            axes.stackplot(
                edges,
                [[*part, part[-1]] for part in parts],
                labels=pools,
                colors=_OF_POOLS[: len(pools)],
                step="post",
                linewidth=0,
            )
        axes.set_ylabel(policy, fontsize=9)
        axes.set_xlim(0, None)
        axes.tick_params(labelsize=8)
    figure.suptitle(f"samples per step by pool; {_heading(scenario)}", fontsize=8.5)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(pools), fontsize=8, loc="outside lower center")
    panels[-1, 0].set_xlabel("simulated hours")
    return figure


def _heading(scenario: Scenario) -> str:
    """Return the title, wrapped to the width of a picture."""
    return textwrap.fill(title(scenario), 80)
