"""The layouts of a plan on one line, as the status draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from heterotrain_core.contract.plan import LayoutKind, Plan

from heterotrain_operator.cluster_state.telemetry import Telemetry

MOST_SHOWN = 8
"""Different layouts that are drawn; the rest is counted."""
MOST_STAGES_SHOWN = 5
"""Stages of one worker whose units are named."""


def layout_text(plan: Plan, telemetry: Telemetry) -> str:
    """Return such as ``2 members: [a100: units 0-3 (embed to blocks.2) | t4: 4-5 (blocks.3 to head)] [v100: 0-5]``.

    Of a sharded member, the part of the training state that each device holds: ``[a100: 80% + t4: 20% of all units]``.
    Empty where no member is divided among several workers. Equal layouts are drawn once. Names of units are left out
    where the workers exported none.
    """
    if not any(member.layout.kind is LayoutKind.PIPELINE or member.layout.state_weights for member in plan.members):
        return ""
    models = {tuple(unit.name for unit in profile.units) for profile in telemetry.profiles.values()}
    names = models.pop() if len(models) == 1 else ()
    shapes = Counter(_drawn(plan, index, names) for index in range(len(plan.members)))
    shown = [f"{number} × {shape}" if number > 1 else shape for shape, number in shapes.most_common(MOST_SHOWN)]
    more = [f"and {len(shapes) - MOST_SHOWN} other layouts"] if len(shapes) > MOST_SHOWN else []
    number = "1 member" if len(plan.members) == 1 else f"{len(plan.members)} members"
    return f"{number}: {' '.join([*shown, *more])}"


def _drawn(plan: Plan, index: int, names: Sequence[str]) -> str:
    """Return one member; ``names`` are those of all units, where they are known."""
    layout, ranks = plan.members[index].layout, plan.ranks_by_member[index]
    if layout.state_weights:
        whole = sum(layout.state_weights)
        parts = [
            f"{plan.pool_of(rank)}: {weight / whole:.0%}"
            for rank, weight in zip(ranks, layout.state_weights, strict=True)
        ]
        return f"[{' + '.join(parts)} of all units]"
    if layout.kind is not LayoutKind.PIPELINE:
        return f"[{plan.pool_of(ranks[0])}: all units]"
    first = (0, *layout.cuts)
    ends = [*(cut - 1 for cut in layout.cuts), len(names) - 1 if names else None]
    places = []
    for stage, (start, end) in enumerate(zip(first, ends, strict=True)):
        units = f"{start}-" if end is None else (f"{start}" if end == start else f"{start}-{end}")
        if end is not None and end < len(names) and names[start] and names[end]:
            units += f" ({names[start]})" if start == end else f" ({names[start]} to {names[end]})"
        places.append(f"{plan.pool_of(ranks[stage * layout.shards])}: {'units ' if not stage else ''}{units}")
    return f"[{' | '.join(places)}]"


def units_by_worker(plan: Plan, telemetry: Telemetry) -> dict[str, str]:
    """Return by uid the units that a worker's stages hold, such as ``0-17``, or of shards such as ``12% of all``.

    Workers that hold whole models are left out.
    """
    counts = {len(profile.units) for profile in telemetry.profiles.values()}
    if len(counts) != 1:
        return {}
    found: dict[str, list[str]] = {}
    for rank in plan.ranks:
        layout = plan.members[rank.member].layout
        if layout.kind is LayoutKind.PIPELINE:
            edges = (0, *layout.cuts, *counts)
            found.setdefault(rank.worker_uid, []).append(f"{edges[rank.stage]}-{edges[rank.stage + 1] - 1}")
        elif layout.state_weights:
            part = layout.state_weights[rank.shard] / sum(layout.state_weights)
            found.setdefault(rank.worker_uid, []).append(f"{part:.0%} of all")
    return {uid: ", ".join(list(dict.fromkeys(parts))[:MOST_STAGES_SHOWN]) for uid, parts in found.items()}
