"""A forecast as tables on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from heterotrain_core.contract.plan import Binding
from heterotrain_core.split.balance import Infeasible
from heterotrain_planner.split.expected import ExpectedSplit
from rich.console import Console

from heterotrain_cli.profile import Profile
from heterotrain_cli.terminal import plain_table, say, spread


def show_batch(console: Console, profile: Profile, batch_samples: int, found: ExpectedSplit | Infeasible) -> None:
    """Print the forecast of one batch, one row for each entry of the profile."""
    if isinstance(found, Infeasible):
        say(console, f"not possible: {found.reason}")
        return
    split, rate = found.split, batch_samples / found.expected_s
    say(console, headline(batch_samples, found.expected_s, rate, rate / split.solo_samples_per_s))
    say(console, noise_line(found.expected_s, split.step_s, [entry.variation for entry in profile.members]))
    table = plain_table("member")
    for heading in ("count", "samples each", "micro-batches"):
        table.add_column(heading, justify="right")
    table.add_column("binding", no_wrap=True)
    at = 0
    for entry in profile.members:
        own = slice(at, at + entry.count)
        at += entry.count
        limits = bindings(Counter(split.bindings[own]).most_common())
        samples, micro = spread(split.shares[own]), spread(split.micro_batches[own])
        table.add_row(entry.name, str(entry.count), samples, micro, limits)
    console.print(table)
    priced = [entry for entry in profile.members if entry.price_per_hour is not None]
    if priced:
        per_hour = sum((entry.price_per_hour or 0.0) * entry.count for entry in priced)
        per_million = per_hour * 1e6 / rate / 3600
        missing = "" if len(priced) == len(profile.members) else " (members without a price counted as free)"
        say(console, f"{per_hour:.2f} an hour, {per_million:.2f} for a million samples{missing}")


def headline(batch_samples: int, step_s: float, samples_per_s: float, efficiency: float) -> str:
    """Return the forecast in one line."""
    return (
        f"{batch_samples} samples a step: {step_s:.4g} s, {samples_per_s:.4g} samples/s, "
        f"efficiency {efficiency:.3f} of the sum of solo rates"
    )


def noise_line(step_s: float, quiet_step_s: float, variations: Sequence[float | None]) -> str:
    """Return in one line what noise adds to the step.

    Args:
        step_s: mean seconds of a step, with the known noise.
        quiet_step_s: the same without noise.
        variations: of ranks or pools; ``None`` where unknown.
    """
    known = [each for each in variations if each is not None]
    if not known:
        return "without noise: how much steps vary is not known, so they take somewhat longer"
    low, high = min(known), max(known)
    vary = f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}"
    rest = "" if len(known) == len(variations) else "; the noise of others is not known and left out"
    return f"steps of single ranks vary by {vary}, which makes a step {step_s / quiet_step_s - 1:.1%} longer{rest}"


def bindings(counts: Sequence[tuple[Binding, int]]) -> str:
    """Return binding limits with their numbers of members, in this order; a single one stands alone."""
    if len(counts) == 1:
        return counts[0][0].value
    return ", ".join(f"{binding.value} {count}" for binding, count in counts)
