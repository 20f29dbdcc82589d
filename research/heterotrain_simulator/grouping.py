"""Grouping over slow networks: which devices form a stage, and which a member, when links differ by zone.

Equal devices in zones are arranged as stages of one device of each member. Devices of a stage exchange gradients with
each other; a micro-batch passes from stage to stage inside its member. Minimised is

    slowest exchange of a stage + Σ over neighbouring stages of the slowest link between paired devices

as in DT-FM (Yuan et al., NeurIPS 2022), which searches it by a genetic algorithm. Here small problems are solved
exactly, by dynamic programming over what is left of each zone. Larger ones start from arrangements between "a stage
stays in a zone" and "a member stays in a zone", improve by exchanging two devices or turning a run of stages round, and
state the gap to a bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from heterotrain_planner.layout.problem import Link
from heterotrain_planner.layout.result import NoLayout

from heterotrain_simulator.grouping_bound import least_total
from heterotrain_simulator.zones import Counts, ZoneCosts, zone_costs

MOST_ZONES = 10
"""Zones of one problem; pairings look at all sets of zones."""
EXACT_WORK = 100_000
"""Pairs of a state and a stage up to which dynamic programming is used: some seconds at most."""
MOST_TRIALS = 15_000
"""Changes that the local search tries from all starts together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """Devices that are close to each other: a node, a rack, a data centre or a region.

    Attributes:
        name: unique.
        devices: at least 1.
    """

    name: str
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Stages and members.

    Attributes:
        stages: devices of each stage by zone, in the order of computation.
        members: the zones through which each member's micro-batches pass.
        exchange_s: seconds of the slowest stage's exchange of gradients.
        pipeline_s: seconds of one micro-batch on the slowest links between stages, there and back.
        bound_s: no grouping has a smaller sum of both.
        exact: whether this is the least sum.
        reason: one sentence for people.
    """

    stages: tuple[Mapping[str, int], ...]
    members: tuple[tuple[str, ...], ...]
    exchange_s: float
    pipeline_s: float
    bound_s: float
    exact: bool
    reason: str


def group(
    zones: Sequence[Zone],
    links: Mapping[tuple[str, str], Link],
    *,
    stages: int,
    exchange_bytes: float,
    boundary_bytes: float,
) -> Grouping | NoLayout:
    """Return the grouping with the least communication that was found, and the bound that no grouping beats.

    Args:
        zones: 1 to ``MOST_ZONES``, with unique names.
        links: by pair of names, in either order; each pair that occurs, and each zone with itself.
        stages: of every member; the number of devices has to be a multiple of it.
        exchange_bytes: gradient bytes of one stage.
        boundary_bytes: of one micro-batch between two stages.
    """
    if clause := _problem(zones, links, stages, exchange_bytes, boundary_bytes):
        return NoLayout(reason=clause)
    counts = tuple(zone.devices for zone in zones)
    names = [zone.name for zone in zones]
    members = sum(counts) // stages
    costs = zone_costs(
        names, links, stage_devices=members, exchange_bytes=exchange_bytes, boundary_bytes=boundary_bytes
    )
    found, exact = _exact(costs, counts, stages), True
    if found is None:
        found, exact = _search(costs, counts, stages), False
    total = costs.total_s(found)
    bound = total if exact else least_total(costs, stages, total)
    exchange = max(costs.stage_s(stage) for stage in found)
    gap = "the least possible" if exact else f"at most {total / bound - 1:.1%} above the least" if bound else "bounded"
    return Grouping(
        stages=tuple({name: n for name, n in zip(names, stage, strict=True) if n} for stage in found),
        members=tuple(tuple(names[zone] for zone in path) for path in _paths(costs, found)),
        exchange_s=exchange,
        pipeline_s=total - exchange,
        bound_s=bound,
        exact=exact,
        reason=f"{members} members of {stages} stages: exchange {exchange:.3g} s, pipeline {total - exchange:.3g} s, "
        f"{gap}",
    )


def _problem(
    zones: Sequence[Zone],
    links: Mapping[tuple[str, str], Link],
    stages: int,
    exchange_bytes: float,
    boundary_bytes: float,
) -> str | None:
    names = [zone.name for zone in zones]
    if not 1 <= len(zones) <= MOST_ZONES or len(set(names)) < len(names):
        return f"{len(zones)} zones are given: use 1 to {MOST_ZONES} with different names, and merge near ones"
    if any(zone.devices < 1 for zone in zones):
        return "a zone without devices is given: leave it out"
    for one, other in itertools.combinations_with_replacement(names, 2):
        if (one, other) not in links and (other, one) not in links:
            return f"the link between {one} and {other} is missing: give its bandwidth and latency"
    for link in links.values():
        if not link.bytes_per_s > 0 or not 0 <= link.latency_s < math.inf:
            return f"the link {link} needs bytes_per_s above 0 and a finite latency_s of at least 0"
    if not all(0 <= size < math.inf for size in (exchange_bytes, boundary_bytes)):
        return "exchange_bytes and boundary_bytes have to be finite and at least 0"
    devices = sum(zone.devices for zone in zones)
    if stages < 1 or devices % stages or devices < stages:
        return (
            f"{devices} devices do not form members of {stages} stages: leave {devices % max(1, stages)} out, or take "
            "another number of stages"
        )
    return None


def _stages_of(left: Counts, devices: int) -> Iterator[Counts]:
    """Yield all stages of so many devices out of what is left."""
    if len(left) == 1:
        if left[0] >= devices:
            yield (devices,)
        return
    for number in range(min(left[0], devices), -1, -1):
        for rest in _stages_of(left[1:], devices - number):
            yield (number, *rest)


def _exact(costs: ZoneCosts, counts: Counts, stages: int) -> list[Counts] | None:
    """Return the best stages, ``None`` where the effort would be too large.

    For each limit of the exchange, dynamic programming from stage to stage over (what is left, the last stage). The
    limits grow, so the search ends when the limit alone exceeds the best sum.
    """
    size = sum(counts) // stages
    kinds = math.comb(size + len(counts) - 1, size)
    states = math.prod(count + 1 for count in counts) / size
    if kinds * kinds * states > EXACT_WORK * stages and stages > 1:
        return None
    every = list(_stages_of(counts, size))
    limits = sorted({costs.stage_s(stage) for stage in every})
    best: tuple[float, list[Counts]] | None = None
    for limit in limits:
        if best is not None and limit >= best[0]:
            break
        allowed = [stage for stage in every if costs.stage_s(stage) <= limit]
        path = _shortest(costs, counts, stages, allowed)
        if path is not None and (best is None or costs.total_s(path) < best[0]):
            best = (costs.total_s(path), path)
    return best[1] if best else None


def _shortest(costs: ZoneCosts, counts: Counts, stages: int, allowed: Sequence[Counts]) -> list[Counts] | None:
    """Return the stages with the least traffic between them that use every device."""
    layers: list[dict[tuple[Counts, Counts], tuple[float, tuple[Counts, Counts] | None]]] = [{}]
    for stage in allowed:
        layers[0][_minus(counts, stage), stage] = (0.0, None)
    for _ in range(stages - 1):
        layer: dict[tuple[Counts, Counts], tuple[float, tuple[Counts, Counts] | None]] = {}
        for (left, last), (spent, _) in layers[-1].items():
            for stage in allowed:
                rest = _minus(left, stage)
                if min(rest) < 0:
                    continue
                cost = spent + costs.edge_s(last, stage)
                if cost < layer.get((rest, stage), (math.inf, None))[0]:
                    layer[rest, stage] = (cost, (left, last))
        layers.append(layer)
    if not layers[-1]:
        return None
    state: tuple[Counts, Counts] | None = min(layers[-1], key=lambda key: layers[-1][key][0])
    path = []
    for layer in reversed(layers):
        assert state is not None  # noqa: S101  # each state of a layer has one in the layer before
        path.append(state[1])
        state = layer[state][1]
    return path[::-1]


def _minus(left: Counts, stage: Counts) -> Counts:
    return tuple(have - use for have, use in zip(left, stage, strict=True))


def _search(costs: ZoneCosts, counts: Counts, stages: int) -> list[Counts]:
    """Return the best local optimum from all starts."""
    best: list[Counts] | None = None
    trials = 0
    starts = _starts(costs, counts, stages)
    for index, start in enumerate(starts):
        share = (MOST_TRIALS - trials) // (len(starts) - index)
        found, used = _improved(costs, start, share)
        trials += used
        if best is None or costs.total_s(found) < costs.total_s(best):
            best = found
    assert best is not None  # noqa: S101  # there is always a start
    return best


def _starts(costs: ZoneCosts, counts: Counts, stages: int) -> list[list[Counts]]:
    """Return arrangements by clusters of zones: one cluster is members inside zones, one for each zone stages inside.

    Zones are merged by the shortest links. Clusters follow each other along short links, and fill stages one after the
    other; inside a cluster, stages take from all zones alike.
    """
    size = sum(counts) // stages
    clusters = [[zone] for zone in range(len(counts))]
    found = []
    while True:
        order = _chain(costs, clusters)
        queue: list[int] = []
        for cluster in order:
            # Zones take turns by the part of their devices that is placed, so each stage gets from all of them.
            places = sorted(((place + 0.5) / counts[zone], zone) for zone in cluster for place in range(counts[zone]))
            queue.extend(zone for _, zone in places)
        rows = [queue[start : start + size] for start in range(0, len(queue), size)]
        found.append([tuple(row.count(zone) for zone in range(len(counts))) for row in rows])
        if len(clusters) == 1:
            return found
        pairs = itertools.combinations(range(len(clusters)), 2)
        first, second = min(pairs, key=lambda pair: _distance(costs, clusters[pair[0]], clusters[pair[1]]))
        merged = clusters[first] + clusters[second]
        clusters = [each for index, each in enumerate(clusters) if index not in (first, second)] + [merged]


def _distance(costs: ZoneCosts, one: Sequence[int], other: Sequence[int]) -> float:
    return max(float(costs.boundary_s[a, b]) for a in one for b in other)


def _chain(costs: ZoneCosts, clusters: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Return the clusters in the best order among those that always go on to the nearest one."""
    best: list[Sequence[int]] = []
    least = math.inf
    for start in range(len(clusters)):
        chain, length = [start], 0.0
        while len(chain) < len(clusters):
            rest = (index for index in range(len(clusters)) if index not in chain)
            last = clusters[chain[-1]]
            nearest = min(rest, key=lambda index: (_distance(costs, last, clusters[index]), index))
            length += _distance(costs, last, clusters[nearest])
            chain.append(nearest)
        if length < least:
            least, best = length, [clusters[index] for index in chain]
    return best


def _improved(costs: ZoneCosts, start: Sequence[Counts], most_trials: int) -> tuple[list[Counts], int]:
    """Return a local optimum, or what the number of trials allowed, and how many were used."""
    stages, total, trials = list(start), costs.total_s(start), 0
    better = True
    while better and trials < most_trials:
        better = False
        for other in _neighbours(stages):
            trials += 1
            cost = costs.total_s(other)
            if cost < total * (1 - 1e-12):
                stages, total, better = other, cost, True
                break
            if trials >= most_trials:
                break
    return stages, trials


def _neighbours(stages: Sequence[Counts]) -> Iterator[list[Counts]]:
    """Yield the arrangements one change away: a run of stages turned round, or two devices exchanged."""
    for first, last in itertools.combinations(range(len(stages) + 1), 2):
        if last - first > 1:
            yield [*stages[:first], *reversed(stages[first:last]), *stages[last:]]
    zones = range(len(stages[0]))
    for first, second in itertools.combinations(range(len(stages)), 2):
        for out, into in itertools.permutations(zones, 2):
            if stages[first][out] and stages[second][into]:
                changed = list(stages)
                changed[first] = _swapped(stages[first], out, into)
                changed[second] = _swapped(stages[second], into, out)
                yield changed


def _swapped(stage: Counts, out: int, into: int) -> Counts:
    return tuple(count - (zone == out) + (zone == into) for zone, count in enumerate(stage))


def _paths(costs: ZoneCosts, stages: Sequence[Counts]) -> list[list[int]]:
    """Return the zones of each member's devices, stage by stage."""
    paths = [[zone] for zone, count in enumerate(stages[0]) for _ in range(count)]
    for one, other in itertools.pairwise(stages):
        waiting: dict[int, list[int]] = {}
        for start, end in costs.pairs(one, other):
            waiting.setdefault(start, []).append(end)
        for path in paths:
            path.append(waiting[path[-1]].pop(0))
    return paths
