"""A comparison as a table, on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heterotrain_cli.terminal import plain_table, say
from heterotrain_simulator.scenario import Scenario
from rich.console import Console

from heterotrain_simulate.summary import Summary

_HOUR_S, _MINUTE_S = 3600.0, 60.0


def title(scenario: Scenario) -> str:
    """Return the title of a scenario in one line."""
    cluster = " + ".join(f"{group.count} {group.gpu}" for group in scenario.groups if group.count) or "spot nodes"
    batch = "adaptive batch" if scenario.adaptive else f"batch {scenario.batch_samples}"
    return f"simulated: {scenario.workload.what} on {cluster}, {batch}; target {scenario.workload.target}"


def columns(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """Return the table by columns: headings, and a text for each policy; columns without content are left out.

    The first policy is the reference.
    """
    first = summaries[0]
    found = {
        "policy": [summary.policy for summary in summaries],
        "to target": [_target(summary) for summary in summaries],
        "faster": [_faster(first, summary) for summary in summaries],
    }
    if any(summary.cost for summary in summaries):
        found["cost"] = [_cost(summary) for summary in summaries]
    if not any(summary.changes for summary in summaries):
        found["samples/s"] = [_rate(summary.samples_per_s) for summary in summaries]
    found["efficiency"] = ["–" if s.efficiency is None else f"{s.efficiency:.3f}" for s in summaries]
    if any(summary.changes for summary in summaries):
        found["effective"] = [f"{summary.effective_part:.2%}" for summary in summaries]
    found["off"] = ["–" if s.prediction_error is None else f"{s.prediction_error:.1%}" for s in summaries]
    return found


_MEANINGS = {
    "faster": "times as fast as the first",
    "efficiency": "of the sum of solo rates, in the last period",
    "effective": "fraction of the time in committed steps",
    "off": "predicted against simulated step, median",
}


def legend(headings: Iterable[str]) -> str:
    """Return the meaning of the shorter headings in one line."""
    return "; ".join(f"{heading}: {_MEANINGS[heading]}" for heading in headings if heading in _MEANINGS)


def show(console: Console, scenario: Scenario, summaries: Sequence[Summary]) -> None:
    """Print the comparison."""
    say(console, title(scenario))
    by_heading = columns(summaries)
    table = plain_table("policy")
    for heading in list(by_heading)[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*by_heading.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    say(console, legend(by_heading))


def markdown(scenario: Scenario, summaries: Sequence[Summary]) -> str:
    """Return the comparison as a Markdown table under its title."""
    by_heading = columns(summaries)
    lines = [title(scenario), "", _line(list(by_heading)), _line(["---"] + ["---:"] * (len(by_heading) - 1))]
    return "\n".join([*lines, *(_line(row) for row in zip(*by_heading.values(), strict=True))]) + "\n"


def span(seconds: float) -> str:
    """Return a time span with a suitable unit."""
    if seconds >= 2 * _HOUR_S:
        return f"{seconds / _HOUR_S:.2f} h"
    return f"{seconds / _MINUTE_S:.1f} min" if seconds >= 2 * _MINUTE_S else f"{seconds:.1f} s"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rate(samples_per_s: float) -> str:
    """Return a rate with at least three digits."""
    return f"{samples_per_s:.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"  # noqa: PLR2004  # three digits


def _target(summary: Summary) -> str:
    if summary.target_s is None or summary.target_low_s is None or summary.target_high_s is None:
        return f"{summary.progress:.0%} in {span(summary.end_s)}"
    if summary.runs == 1:
        return span(summary.target_s)
    off = max(summary.target_high_s - summary.target_s, summary.target_s - summary.target_low_s)
    return f"{span(summary.target_s)} ± {off / summary.target_s:.1%}"


def _faster(first: Summary, summary: Summary) -> str:
    if first.target_s is not None and summary.target_s is not None:
        return f"{first.target_s / summary.target_s:.2f}"
    return f"{summary.progress / summary.end_s / (first.progress / first.end_s):.2f}" if first.progress else "–"


def _cost(summary: Summary) -> str:
    cost = summary.cost if summary.cost_at_target is None else summary.cost_at_target
    return f"{cost:.2f}" if cost else "–"
