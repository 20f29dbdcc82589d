"""One table of published instances: what was published, what a baseline gets, and what the layout planner gets."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from heterotrain_core.split.balance import Split, balance
from heterotrain_core.split.member import SplitMember, TableTime
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Cover, Template
from heterotrain_planner.layout.sharded import sharded_template, sharded_templates
from heterotrain_planner.layout.template_table import TemplateTable, template_table

from heterotrain_simulator import published
from heterotrain_simulator.grouping import Grouping, Zone, group
from heterotrain_simulator.measured_pipelines import (
    AMP_TRIALS,
    SAILOR_PIPELINES,
    amp_seconds,
    rank_correlation,
    sailor_seconds,
)
from heterotrain_simulator.pipeline_baselines import PLANNERS, best_step
from heterotrain_simulator.share_baselines import (
    divisions,
    learned_layers,
    least_maximum,
    least_variance,
    proportional_to_one,
    random_grouping_s,
)
from heterotrain_simulator.zones import zone_costs

GIB = 2**30
RECOMPUTED_BYTES = 2 * GIB
"""Assumption: activations of the layer that is being recomputed."""
GPT_MIXES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("l4", "l4", "a6000", "p40"), 32),
    (("l40s", "l40s", "p40", "p40"), 32),
    (("l40s", "a6000", "l4", "p100"), 32),
    (("l40s", "a6000", "l4", "p100"), 48),
    (("a6000", "a6000", "p100", "p100", "p100", "p100"), 48),
)
"""Cards and sequences in one micro-batch each."""
SEED = 1
OOBLECK_INSTANCES = 300
CLOSE = 0.05
"""Error of a prediction up to which a measurement counts as reproduced."""
TIGHT = 1e-9
"""Gap below which a bound is met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        instance: whose figures, and what is compared.
        published: what the source prints, empty where it prints nothing.
        baseline: the same computed here by a published rule.
        ours: by the layout planner or the split.
        verdict: reproduced, better, equal, worse or other, with a figure.
    """

    instance: str
    published: str
    baseline: str
    ours: str
    verdict: str


def rows() -> Iterator[Row]:
    """Yield the whole table; some seconds of work."""
    yield _oobleck()
    yield from _helix()
    yield from _sailor()
    yield _cephalo_plan()
    yield _cephalo_shares()
    yield from _cephalo_state()
    yield from _dtfm()
    yield _heterps()
    yield _amp()
    yield from _sailor_pipelines()
    yield from _pipelines()


def curve(passes: tuple[Sequence[float], Sequence[float]]) -> TableTime:
    """Return published milliseconds of both passes as seconds by size."""
    both = (forward + backward for forward, backward in zip(*passes, strict=True))
    return TableTime(points=tuple((size, ms / 1e3) for size, ms in enumerate(both, start=1)))


def llama(
    counts: Mapping[str, int],
    *,
    batch_samples: int,
    between_bytes_per_s: float = 1.25e9,
    within_bytes_per_s: float = 10e9,
) -> Problem:
    """Return Llama 7B of 32 equal units on kinds of cards, one node for each kind.

    Assumed: a unit has a 32nd of all parameters at 16 bytes of training state each; activations are recomputed, so a
    unit keeps its input, 512 tokens of 4096 numbers in FP16; ``RECOMPUTED_BYTES`` are set aside on each card.

    Args:
        counts: cards by kind.
        batch_samples: the global batch.
        between_bytes_per_s: of the link between two nodes.
        within_bytes_per_s: of the link between two cards of a node.
    """
    seconds = {
        name: tuple(
            UnitSeconds(micro_batch_samples=size, forward_s=forward / 1e3, backward_s=backward / 1e3)
            for size, (forward, backward) in enumerate(zip(*published.LLAMA_7B_MS[name], strict=True), start=1)
        )
        for name in counts
    }
    size = 4 * published.LLAMA_7B_PARAMETERS // published.LLAMA_7B_LAYERS
    unit = UnitProfile(
        name="layer", parameter_bytes=size, activation_bytes=2**22, boundary_bytes=2**22, seconds=seconds
    )
    kinds = tuple(
        DeviceKind(
            name=name,
            count=count,
            memory_bytes=int(published.MEMORY_GIB[name] * GIB) - RECOMPUTED_BYTES,
            devices_per_node=count,
        )
        for name, count in counts.items()
    )
    return Problem(
        units=(unit,) * published.LLAMA_7B_LAYERS,
        kinds=kinds,
        default_link=Link(bytes_per_s=between_bytes_per_s),
        links={(name, name): Link(bytes_per_s=within_bytes_per_s) for name in counts},
        batch_samples=batch_samples,
        micro_batches=(1, 2, 4, 8),
    )


def _verdict(baseline_s: float, ours_s: float) -> str:
    ratio = baseline_s / ours_s
    if math.isclose(ratio, 1, rel_tol=2e-3):
        return "equal"
    return f"better, {ratio:.2f} ×" if ratio > 1 else f"worse, {ratio:.2f} ×"


def _split(total: int, members: Sequence[TableTime]) -> Split:
    found = balance(total, [SplitMember(compute=each, floor_samples=0) for each in members])
    if not isinstance(found, Split):
        raise TypeError(found.reason)
    return found


def oobleck_instances() -> Iterator[tuple[tuple[float, ...], tuple[int, ...], int]]:
    """Yield seconds of a micro-batch and pipelines of each template, and micro-batches, of random instances."""
    chance = random.Random(SEED)  # noqa: S311  # the same instances in every run
    for _ in range(OOBLECK_INSTANCES):
        templates = chance.randint(2, 3)
        times = tuple(round(chance.uniform(1.0, 4.0), 2) for _ in range(templates))
        replicas = tuple(chance.randint(1, 3) for _ in range(templates))
        total = chance.randint(3, 12) * sum(replicas)
        if next(divisions(replicas, total), None) is not None:
            yield times, replicas, total


def _oobleck() -> Row:
    longer, ours_longer = [], []
    for times, replicas, total in oobleck_instances():

        def end(found: Sequence[int], times: Sequence[float] = times) -> float:
            return max(time * count for time, count in zip(times, found, strict=True))

        maximum = end(least_maximum(times, replicas, total))
        longer.append(end(least_variance(times, replicas, total)) / maximum)
        pipelines = [time for time, count in zip(times, replicas, strict=True) for _ in range(count)]
        found = _split(
            total, [TableTime(points=tuple((n, n * time) for n in range(1, total + 1))) for time in pipelines]
        )
        ours_longer.append(found.step_s / maximum)
    mean = sum(longer) / len(longer)
    return Row(
        instance=f"Oobleck's rules, {len(longer)} random instances of 2 or 3 templates",
        published="",
        baseline=f"least variance (2023) {mean:.3f} × least maximum (2024) on average, {max(longer):.2f} × at worst",
        ours=f"{min(ours_longer):.2f} to {max(ours_longer):.2f} × least maximum",
        verdict=f"better than 2023, {mean * len(longer) / sum(ours_longer):.2f} × on average",
    )


def _helix() -> Iterator[Row]:
    rates, machines = published.HELIX_TOKENS_PER_S, published.HELIX_MACHINES
    bound = sum(
        count * max(n * rate for n, rate in enumerate(rates[name], start=1)) for name, count in machines.items()
    )
    bound /= published.HELIX_LAYERS
    yield Row(
        instance="Helix, Llama-2 70B on 24 machines: compute alone, tokens/s",
        published=f"{published.HELIX_COMPUTE_BOUND_PER_S}",
        baseline="",
        ours=f"{bound:.2f}",
        verdict="reproduced",
    )
    members = [
        TableTime(points=tuple((n, 1 / rate) for n, rate in enumerate(rates[name], start=1)))
        for name, count in machines.items()
        for _ in range(count)
    ]
    split = _split(published.HELIX_LAYERS, members)
    ours = min(1 / split.step_s, published.HELIX_LINK_BYTES_PER_S / published.HELIX_TOKEN_BYTES)
    yield Row(
        instance="Helix, the same: layers to machines, tokens/s by its own rates",
        published=f"flow {published.HELIX_FLOW_PER_S}",
        baseline="",
        ours=f"{ours:.1f}, one chain of {sum(1 for share in split.shares if share)} machines",
        verdict=f"better, {ours / published.HELIX_FLOW_PER_S:.2f} ×",
    )


def _sailor() -> Iterator[Row]:
    for run in published.SAILOR_RUNS:
        each = -(-run.micro_batches // len(run.micro_batch_s))
        equal_s = max(run.micro_batch_s) * each + run.sync_s
        tables = [
            TableTime(points=tuple((n, n * second) for n in range(1, run.micro_batches + 1)))
            for second in run.micro_batch_s
        ]
        split = _split(run.micro_batches, tables)
        ours_s = split.step_s + run.sync_s
        yield Row(
            instance=f"Sailor, OPT-350M, {run.name}",
            published=f"measured {run.measured_s:.1f} s, equal shares",
            baseline=f"predicted {equal_s:.1f} s ({equal_s / run.measured_s - 1:+.1%})",
            ours=f"predicted {ours_s:.1f} s, shares {', '.join(map(str, split.shares))}",
            verdict=f"reproduced; {_verdict(equal_s, ours_s)}",
        )


def _cephalo_plan() -> Row:
    lines = published.GPT_27B_FP16_LINES

    def seconds(card: str, samples: int, passes: int) -> float:
        slope, fixed = lines[card]
        return (slope * samples + fixed * passes) / 1e3

    theirs = max(seconds(*part) for part in published.CEPHALO_PLAN)
    total = sum(samples for _, samples, _ in published.CEPHALO_PLAN)
    cards = [card for card, _, _ in published.CEPHALO_PLAN]
    ours = _split(total, [TableTime(points=tuple((n, seconds(card, n, 1)) for n in range(1, 65))) for card in cards])
    return Row(
        instance="Cephalo, GPT 2.7B, 2 L4 + A6000 + P40, 64 sequences: a layer",
        published=f"its plan: {theirs * 1e3:.0f} ms by its fits",
        baseline="",
        ours=f"{ours.step_s * 1e3:.0f} ms, shares {', '.join(map(str, ours.shares))}",
        verdict=_verdict(theirs, ours.step_s),
    )


def _cephalo_shares() -> Row:
    equal, proportional, broken = [], [], 0
    for cards, total in GPT_MIXES:
        times = [curve(published.GPT_27B_MS[card]) for card in cards]
        ours = _split(total, times)
        alike = -(-total // len(cards))
        if all(alike <= len(time.points) for time in times):
            equal.append(max(time.points[alike - 1][1] for time in times) / ours.step_s)
        shares = proportional_to_one([[second for _, second in time.points] for time in times], total)
        if any(share > len(time.points) for share, time in zip(shares, times, strict=True)):
            broken += 1
        else:
            ends = [time.points[share - 1][1] for share, time in zip(shares, times, strict=True)]
            proportional.append(max(ends) / ours.step_s)
    fair = f"{min(proportional):.2f} to {max(proportional):.2f}" if proportional else "–"
    return Row(
        instance=f"Cephalo, GPT 2.7B layer tables, {len(GPT_MIXES)} mixes, shares within the profiled sizes",
        published="",
        baseline=f"equal {min(equal):.2f} to {max(equal):.2f} × the least; ∝ speed at one (Metis) {fair}, beyond the "
        f"profile in {broken}",
        ours="the least in all",
        verdict=f"better, up to {max(equal):.2f} ×",
    )


def _cephalo_state() -> Iterator[Row]:
    for cards, batch in (({"a100-40": 1, "a6000": 1, "t4": 4}, 256), ({"a6000": 3, "t4": 8}, 1024)):
        problem = llama(cards, batch_samples=batch, between_bytes_per_s=6.25e9)
        equal, uneven = (_shortest_step(problem, cards, equal_shards=equal) for equal in (True, False))
        if uneven is None:
            raise TypeError("no division fits")
        equal_s = equal is not None and equal[0]
        step_s, template = uneven
        parts = [shard.state_ratio for shard in template.layout.shards]
        yield Row(
            instance=f"Cephalo's tables, Llama 7B, one sharded member of {_named(cards)}, batch {batch}, 50 Gb/s",
            published="",
            baseline=f"equal shards (FSDP): {f'{equal_s:.1f} s' if equal_s else 'do not fit'}",
            ours=f"{step_s:.1f} s, {min(parts):.1%} to {max(parts):.1%} of the state",
            verdict=_verdict(equal_s, step_s) if equal_s else "better: fits",
        )


def _shortest_step(problem: Problem, cards: Mapping[str, int], *, equal_shards: bool) -> tuple[float, Template] | None:
    """Return the shortest step of one sharded member over all numbers of passes, and one pass of it."""
    batch, devices = problem.batch_samples, [cards.get(kind.name, 0) for kind in problem.kinds]
    found = []
    for size in {-(-batch // passes) for passes in range(1, batch + 1)}:
        template = sharded_template(problem, devices, size, equal_shards=equal_shards)
        if template is not None:
            found.append((-(-batch // size) * template.next_s, template))
    return min(found, key=lambda each: each[0], default=None)


def _dtfm() -> Iterator[Row]:
    sizes = {
        "exchange_bytes": published.DTFM_STAGE_GRADIENT_BYTES,
        "boundary_bytes": published.DTFM_BOUNDARY_BYTES,
    }
    for case in published.DTFM_CASES:
        pairs = [*case.links, *((name, name, ms, gbit) for name, ms, gbit in case.within)]
        links = {(one, other): Link(bytes_per_s=gbit * 1e9 / 8, latency_s=ms / 1e3) for one, other, ms, gbit in pairs}
        zones = [Zone(name=name, devices=number) for name, number in case.zones]
        found = group(zones, links, stages=published.DTFM_STAGES, **sizes)
        if not isinstance(found, Grouping):
            raise TypeError(found.reason)
        total = found.exchange_s + found.pipeline_s
        devices = sum(zone.devices for zone in zones)
        names = [zone.name for zone in zones]
        costs = zone_costs(names, links, stage_devices=devices // published.DTFM_STAGES, **sizes)
        least, mean = random_grouping_s(
            costs, [zone.devices for zone in zones], stages=published.DTFM_STAGES, draws=300, seed=SEED
        )
        gap = total / found.bound_s - 1
        proof = f"at most {gap:.0%} above the least" if gap < 1 else f"bound {found.bound_s:.1f} s"
        yield Row(
            instance=f"DT-FM, GPT-3 XL, {devices} devices in {case.where}, 8 stages: exchange + one micro-batch",
            published="",
            baseline=f"its code, 1000 candidates: {case.found_s:.1f} s; 300 at random: {mean:.1f}, best {least:.1f} s",
            ours=f"{total:.1f} s, {proof if gap > TIGHT else 'proved least'}",
            verdict=_verdict(case.found_s, total),
        )


def _heterps() -> Row:
    counts = {"a100-40": 2, "a6000": 2, "t4": 4}
    seconds = [curve(published.LLAMA_7B_MS[name]).points[3][1] / count for name, count in counts.items()]
    learned = learned_layers(seconds, published.LLAMA_7B_LAYERS, steps=300, draws=32, seed=SEED)
    learned_s = max(second * layers for second, layers in zip(seconds, learned, strict=True))
    tables = [
        TableTime(points=tuple((n, n * second) for n in range(1, published.LLAMA_7B_LAYERS + 1))) for second in seconds
    ]
    ours = _split(published.LLAMA_7B_LAYERS, tables)
    return Row(
        instance="HeterPS, layers of Llama 7B to 2 A100 + 2 A6000 + 4 T4 by type: slowest stage",
        published="",
        baseline=f"learned {learned_s * 1e3:.0f} ms, layers {', '.join(map(str, learned))}",
        ours=f"{ours.step_s * 1e3:.0f} ms, layers {', '.join(map(str, ours.shares))}",
        verdict=_verdict(learned_s, ours.step_s),
    )


def _amp() -> Row:
    measured = [trial.measured_s for trial in AMP_TRIALS]
    own, ours = [trial.own_s for trial in AMP_TRIALS], [amp_seconds(trial) for trial in AMP_TRIALS]

    def quality(predicted: Sequence[float]) -> str:
        off = median(abs(one / other - 1) for one, other in zip(predicted, measured, strict=True))
        first_s = measured[predicted.index(min(predicted))]
        return f"rank correlation {rank_correlation(predicted, measured):.3f}, off by {off:.0%}, picks {first_s:.2f} s"

    better = rank_correlation(ours, measured) > rank_correlation(own, measured)
    return Row(
        instance=f"AMP, GPT-2 on 12 V100 + 4 T4, batch 32: {len(AMP_TRIALS)} trials without tensor parallelism",
        published=f"measured {min(measured):.2f} to {max(measured):.2f} s",
        baseline=f"its cost model: {quality(own)}",
        ours=quality(ours),
        verdict="better ranking" if better else "worse ranking",
    )


def _sailor_pipelines() -> Iterator[Row]:
    for run in SAILOR_PIPELINES:
        ours_s = sailor_seconds(run)
        off = ours_s / run.measured_s - 1
        yield Row(
            instance=f"Sailor, OPT-350M, its pipelines {run.name}: "
            + ", ".join(" → ".join(member) for member in run.members),
            published=f"measured {run.measured_s:.1f} s",
            baseline="",
            ours=f"predicted {ours_s:.1f} s",
            verdict="reproduced" if abs(off) <= CLOSE else f"prediction off by {off:+.0%}",
        )


def _pipelines() -> Iterator[Row]:
    for counts in ({"a100-40": 4, "a6000": 4, "a10g": 4, "t4": 4}, {"a100-40": 2, "a10g": 4, "t4": 8}):
        for batch in (256, 1024):
            problem = llama(counts, batch_samples=batch)
            templates = template_table(problem)
            found = (
                cover(templates, further=sharded_templates(problem))
                if isinstance(templates, TemplateTable)
                else templates
            )
            if not isinstance(found, Cover):
                raise TypeError(found.reason)
            best = [(planner.name, best_step(problem, planner, published.NOMINAL_TFLOPS)) for planner in PLANNERS]
            known = [(name, plan.step_s) for name, plan in best if plan is not None]
            shapes = "1 member" if len(found.members) == 1 else f"{len(found.members)} members"
            yield Row(
                instance=f"Llama 7B on {_named(counts)}, batch {batch}, 10 Gb/s",
                published="",
                baseline=", ".join(f"{name} {plan.step_s:.2f} s" if plan else f"{name} –" for name, plan in best),
                ours=f"{found.step_s:.2f} s, {shapes}, {found.prediction.efficiency:.3f} of all kinds' rates",
                verdict=_best_baseline(known, found.step_s),
            )


def _best_baseline(known: Sequence[tuple[str, float]], ours_s: float) -> str:
    """Return the verdict beside the best of several baselines."""
    if not known:
        return "better: fits"
    name, step_s = min(known, key=lambda pair: pair[1])
    return f"{_verdict(step_s, ours_s)} ({name})"


def _named(counts: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {name}" for name, count in counts.items())


def markdown(table: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    heading = ("instance", "published", "baseline", "heterotrain", "verdict")
    lines = [heading, tuple("---" for _ in heading)]
    lines += [(row.instance, row.published, row.baseline, row.ours, row.verdict) for row in table]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
