"""A forecast of layouts on a terminal."""

from __future__ import annotations

from itertools import groupby

from heterotrain_planner.layout.result import Cover, DeviceLayout, NoLayout
from rich.console import Console

from heterotrain_cli.layouts.forecast import LayoutForecast, draw
from heterotrain_cli.terminal import plain_table, say, spread

_GIB = 1024**3


def show_layout(console: Console, forecast: LayoutForecast) -> None:
    """Print the members of a forecast, one row for equal ones, and what else would be possible."""
    found = forecast.found
    if isinstance(found, NoLayout):
        say(console, f"not possible: {found.reason}")
    else:
        _show_cover(console, forecast, found)
    modes = [f"{name} {_rate(rate)}" for name, rate in forecast.by_mode.items()]
    say(console, f"samples/s by mode: {', '.join(modes)}")
    base = None if isinstance(found, NoLayout) else found.samples_per_s
    for each in forecast.one_more:
        if each.samples_per_s is None:
            gain = "does not make it fit"
        elif base is None:
            gain = f"makes it fit: {each.samples_per_s:.4g} samples/s"
        else:
            gain = f"brings {100 * (each.samples_per_s / base - 1):+.1f} %"
        say(console, f"one more {each.kind} {gain}")


def _show_cover(console: Console, forecast: LayoutForecast, found: Cover) -> None:
    batch = forecast.problem.batch_samples
    say(
        console,
        f"{batch} samples a step: {found.step_s:.4g} s, {found.samples_per_s:.4g} samples/s, of which the exchange "
        f"between members takes {found.exchange_s:.3g} s",
    )
    least_s = forecast.least_s
    proved = "" if not least_s else f"at most {100 * (found.step_s / least_s - 1):.2g} % above the shortest step; "
    efficiency = found.prediction.efficiency
    say(console, f"{proved}{efficiency:.3f} of the rate of all devices if they computed all the time")
    table = plain_table("members")
    table.add_column("layout")
    for heading in ("share", "micro-batches", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    drawn = map(draw, found.layouts)
    rows = zip(drawn, found.members, found.layouts, found.prediction.bindings, strict=True)
    for picture, group in groupby(sorted(rows, key=lambda row: row[0]), key=lambda row: row[0]):
        (_, first, layout, binding), *others = group
        members = [first, *(member for _, member, *_ in others)]
        shares = spread([each.share_samples for each in members])
        table.add_row(
            str(len(members)), picture, shares, f"{first.micro_batches} x {first.micro_batch_samples}",
            f"{_memory(layout) / _GIB:.2g} GiB", binding.value,
        )  # fmt: skip
    console.print(table)
    if any(found.unused.values()):
        left = ", ".join(f"{count} {name}" for name, count in found.unused.items() if count)
        say(console, f"not used: {left}")
    if forecast.price_per_hour:
        per_million = forecast.price_per_hour * 1e6 / found.samples_per_s / 3600
        say(console, f"{forecast.price_per_hour:.2f} an hour, {per_million:.2f} for a million samples")


def _memory(layout: DeviceLayout) -> int:
    return max([stage.memory_bytes for stage in layout.stages] + [shard.memory_bytes for shard in layout.shards])


def _rate(rate: float | None) -> str:
    return "does not fit" if rate is None else f"{rate:.4g}"
