"""``python -m heterotrain_simulate``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import click
from heterotrain_cli.documents import schema_option
from heterotrain_cli.errors import InputError
from heterotrain_cli.output import TABLE, output_option, print_document
from heterotrain_cli.terminal import plain_table, say
from heterotrain_simulator.engine import simulate as run_once
from heterotrain_simulator.published_comparison import markdown as markdown_of_rows
from heterotrain_simulator.published_comparison import rows
from heterotrain_simulator.result import RunResult
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from heterotrain_simulate.pictures import draw
from heterotrain_simulate.scenario_file import POLICIES, Comparison, ScenarioFile, read_scenario, shipped
from heterotrain_simulate.summary import Summary, as_document, summarize
from heterotrain_simulate.tables import markdown, show, title


def _print_list(context: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001  # click's own signature
    if wanted:
        table = plain_table("scenario")
        table.add_column("what")
        for name, what in shipped().items():
            table.add_row(name, what)
        Console().print(table)
        context.exit()


def _print_published(context: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001  # click's own signature
    if wanted:
        with Console(stderr=True).status("comparing with published instances"):
            table = markdown_of_rows(tuple(rows()))
        click.echo(table, nl=False)
        context.exit()


@click.command()
@click.argument("scenario")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(list(POLICIES)),
    help="Run this policy only; may be repeated.",
)
@click.option("--seed", "seeds", multiple=True, type=click.IntRange(0, 10**9), help="Random seed; may be repeated.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Write tables and pictures into this folder."
)
@output_option
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_print_list, help="List the shipped scenarios."
)
@click.option(
    "--published",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_published,
    help="Compare the layout planner with published plans and planners, as a Markdown table.",
)
@schema_option(ScenarioFile)
def simulate(scenario: str, policies: tuple[str, ...], seeds: tuple[int, ...], out: Path | None, output: str) -> None:
    """Compare policies on a simulated cluster.

    SCENARIO is the name of a shipped scenario (--list) or a YAML file. All figures are simulated: published step times
    of real GPUs, an exchange bucket by bucket, seeded noise, and the operator's own decisions.

    \b
    Examples:
      python -m heterotrain_simulate mixed
      python -m heterotrain_simulate scenario.yaml --seed 1 --seed 2 --out results

    Exit status: 0 with an answer; 2 for a mistake in the scenario.
    """  # noqa: D301  # click reads the character \b
    comparison = read_scenario(scenario)
    comparison = replace(
        comparison, policies=policies or comparison.policies, seeds=tuple(dict.fromkeys(seeds)) or comparison.seeds
    )
    if out is not None:
        make_folder(out)
    runs = run_all(comparison, Console(stderr=True))
    target = comparison.scenario.workload.target_steps
    summaries = [summarize(outcomes, target_steps=target) for outcomes in runs.values()]
    if output != TABLE:
        print_document(document(comparison, summaries), output)
    else:
        show(Console(), comparison.scenario, summaries)
    if out is not None:
        for path in write(out, comparison, runs, summaries):
            say(Console(stderr=True), str(path))


def run_all(comparison: Comparison, console: Console) -> dict[str, list[RunResult]]:
    """Return the results by policy, with a progress bar on a terminal."""
    total = len(comparison.policies) * len(comparison.seeds)
    runs: dict[str, list[RunResult]] = {policy: [] for policy in comparison.policies}
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("simulating", total=total)
        for policy in comparison.policies:
            for seed in comparison.seeds:
                done = sum(map(len, runs.values()))
                progress.update(task, description=f"{policy}, seed {seed}", completed=done)

                def report(part: float, done: int = done) -> None:
                    progress.update(task, completed=done + part)

                runs[policy].append(run_once(comparison.scenario, POLICIES[policy](), seed=seed, report=report))
    return runs


def document(comparison: Comparison, summaries: Sequence[Summary]) -> dict[str, object]:
    """Return the comparison in its JSON form."""
    return {
        "simulated": True,
        "scenario": comparison.scenario.name,
        "what": title(comparison.scenario),
        "seeds": list(comparison.seeds),
        "policies": [as_document(summary) for summary in summaries],
    }


def make_folder(out: Path) -> None:
    """Make the folder for the results before the simulation starts.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error


def write(
    out: Path, comparison: Comparison, runs: dict[str, list[RunResult]], summaries: Sequence[Summary]
) -> list[Path]:
    """Write table, figures, periods and pictures into an existing folder, and return their paths.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        table, figures, periods = out / "summary.md", out / "summary.json", out / "periods.csv"
        table.write_text(markdown(comparison.scenario, summaries), encoding="utf-8")
        figures.write_text(
            json.dumps(document(comparison, summaries), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        periods.write_text(_periods_csv(comparison, runs), encoding="utf-8")
        return [table, figures, periods, *draw(out, comparison.scenario, runs)]
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error


def _periods_csv(comparison: Comparison, runs: dict[str, list[RunResult]]) -> str:
    """Return every period of training as CSV."""
    pools = [group.pool for group in comparison.scenario.groups]
    lines = [
        ",".join(
            [
                "policy",
                "seed",
                "from_s",
                "until_s",
                "epoch",
                "batch_samples",
                "steps",
                "step_s",
                "predicted_s",
                "planned_s",
            ]
            + ["progress", "cost"]
            + [f"samples_{pool}" for pool in pools]
        )
    ]
    for policy, outcomes in runs.items():
        for seed, outcome in zip(comparison.seeds, outcomes, strict=True):
            for period in outcome.periods:
                by_pool = [
                    sum(s for s, p in zip(period.shares, period.pools, strict=True) if p == pool) for pool in pools
                ]
                cells = [
                    policy,
                    seed,
                    f"{period.from_s:.3f}",
                    f"{period.until_s:.3f}",
                    period.epoch,
                    period.batch_samples,
                    period.steps,
                ]
                cells += [
                    "" if x is None else f"{x:.6f}" for x in (period.step_s, period.predicted_s, period.planned_s)
                ]
                cells += [f"{period.progress:.1f}", f"{period.cost:.4f}", *by_pool]
                lines.append(",".join(map(str, cells)))
    return "\n".join(lines) + "\n"
