"""The planner's members against all members, orders, cuts and shares, with memory and natural links.

Steps are played in the trainer's own order of passes, and rings are added up here: nothing is shared with the planner.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from heterotrain.parts.stages.schedule_1f1b import Pass, passes
from heterotrain_planner.layout.best import allowed_kinds, best_members
from heterotrain_planner.layout.problem import Link, Problem
from heterotrain_planner.layout.result import Cover, NoLayout
from heterotrain_planner.layout.step_bound import least_step
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from heterotrain_planner.layout.whole_step import Pipeline, WholeStep
from support.repeat import times
from unit.planner.layout.instances import a_problem, most_kept

Stages = tuple[tuple[str, int, int], ...]
"""Kind, first unit and end of each stage of a member."""


def a_cluster(seed: int) -> Problem:
    """Return up to four devices of two kinds; links within a kind are ten times as fast as those between them."""
    rng = random.Random(seed)
    problem = a_problem(rng, kinds=2, units=4, most=2, memory=(250, 1600), batch_samples=rng.choice([4, 8, 16]))
    slow = Link(bytes_per_s=rng.choice([10.0, 40.0, 200.0, 2000.0]), latency_s=rng.choice([0.0, 0.05]))
    fast = Link(bytes_per_s=slow.bytes_per_s * 10, latency_s=slow.latency_s / 10)
    links = {("k0", "k0"): fast, ("k0", "k1"): slow, ("k1", "k1"): fast} if rng.random() < 0.8 else {}
    return replace(problem, links=links, default_link=fast, least_members=rng.choice([1, 1, 1, 2]))


def a_mixture(seed: int) -> Problem:
    """Return three or four devices of up to three kinds, whose members' devices may change places."""
    rng = random.Random(seed)
    while True:
        problem = a_problem(rng, kinds=3, units=5, most=2, memory=(250, 1600), batch_samples=rng.choice([4, 8]))
        if 3 <= sum(kind.count for kind in problem.kinds) <= 4:
            break
    slow = Link(bytes_per_s=rng.choice([10.0, 40.0, 200.0]), latency_s=rng.choice([0.0, 0.05]))
    fast = Link(bytes_per_s=slow.bytes_per_s * 10, latency_s=slow.latency_s / 10)
    links = {(kind.name, kind.name): fast for kind in problem.kinds}
    return replace(problem, links=links, default_link=slow, least_members=rng.choice([1, 1, 2]))


def played(problem: Problem, stages: Stages, micro_batches: int, again: frozenset[int] = frozenset()) -> float:
    """Return the seconds of a member's share; infinite where a stage lacks memory.

    Stages in ``again`` keep what enters their units, and all activations of one unit at a time, which takes its forward
    pass once more. The model's first and last unit keep all.
    """
    number, memory = len(stages), {kind.name: kind.memory_bytes for kind in problem.kinds}
    for place, (kind, first, end) in enumerate(stages):
        kept = most_kept(stage=place, stages=number, micro_batches=micro_batches)
        needed, working = 0.0, 0
        for unit in range(first, end):
            own = problem.units[unit]
            twice = place in again and 0 < unit < len(problem.units) - 1
            held = problem.units[unit - 1].boundary_bytes if twice else own.activation_bytes
            working = max(working, own.activation_bytes if twice else 0)
            needed += own.parameter_bytes * problem.state_ratio + kept * held
        if needed + working > memory[kind]:
            return math.inf
    orders = [list(passes(stage=place, stages=number, micro_batches=micro_batches)) for place in range(number)]
    ended: dict[tuple[int, Pass, int], float] = {}
    at, free_s = [0] * number, [0.0] * number
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage, (kind, first, end) in enumerate(stages):
            while at[stage] < len(orders[stage]):
                which, batch = orders[stage][at[stage]]
                forward = which is Pass.FORWARD
                beside = stage - 1 if forward else stage + 1
                before = (beside, which, batch) if 0 <= beside < number else (stage, Pass.FORWARD, batch)
                if before[:2] != (stage, which) and not (forward and stage == 0) and before not in ended:
                    break
                sent = problem.units[(first if forward else end) - 1].boundary_bytes
                received_s = problem.link(stages[beside][0], kind).seconds(sent) if 0 <= beside < number else 0.0
                points = [unit.seconds[kind][0] for unit in problem.units[first:end]]
                own_s = sum(point.forward_s if forward else point.backward_s for point in points)
                if stage in again and not forward:
                    inner = range(max(first, 1), min(end, len(problem.units) - 1))
                    own_s += sum(problem.units[unit].seconds[kind][0].forward_s for unit in inner)
                start_s = max(free_s[stage], 0.0 if forward and stage == 0 else ended[before])
                ended[stage, which, batch] = free_s[stage] = start_s + received_s + own_s
                at[stage] += 1
    return max(free_s)


def ring(problem: Problem, members: Sequence[Stages]) -> float:
    """Return the seconds of the exchange with the members in this order."""
    if len(members) == 1:
        return 0.0
    busy = defaultdict[tuple[int, int], float](float)
    cuts = sorted({edge for member in members for _, first, end in member for edge in (first, end)})
    pieces: Counter[tuple[int, ...]] = Counter()
    for first, end in itertools.pairwise(cuts):
        owners = tuple(next(i for i, (_, a, b) in enumerate(m) if a <= first < b) for m in members)
        pieces[owners] += sum(unit.parameter_bytes for unit in problem.units[first:end])
    for owners, size in pieces.items():
        names = [member[owner][0] for member, owner in zip(members, owners, strict=True)]
        pairs = zip(names, [*names[1:], names[0]], strict=True)
        round_s = max(problem.link(*pair).seconds(size / len(members)) for pair in pairs)
        for device in enumerate(owners):
            busy[device] += 2 * (len(members) - 1) * round_s
    return max(busy.values())


def exchanged(problem: Problem, members: Sequence[Stages]) -> float:
    """Return the seconds of the exchange with the best order of the members in the rings."""
    return min(ring(problem, (members[0], *order)) for order in itertools.permutations(members[1:]))


def divided(shares: Sequence[np.ndarray], batch: int) -> float:
    """Return the least longest share of all divisions, where each member takes at least one sample."""
    level_N = shares[0]
    for share_N in shares[1:]:
        level_N = np.array(
            [min((max(level_N[k], share_N[n - k]) for k in range(1, n)), default=math.inf) for n in range(batch + 1)]
        )
    return float(level_N[batch])


def partitions(counts: tuple[int, ...], most: tuple[int, ...] | None = None) -> Iterator[list[tuple[int, ...]]]:
    """Yield all members that these devices can form, some devices may be left over."""
    yield []
    for own in itertools.product(*(range(count + 1) for count in counts)):
        if any(own) and (most is None or own <= most):
            for rest in partitions(tuple(a - b for a, b in zip(counts, own, strict=True)), own):
                yield [own, *rest]


def _subsets(stages: int) -> Iterator[frozenset[int]]:
    for chosen in itertools.product((False, True), repeat=stages):
        yield frozenset(stage for stage, each in enumerate(chosen) if each)


def shortest_step(problem: Problem) -> float:
    """Return the shortest step of all members, orders, cuts and shares; infinite where nothing fits."""
    batch, units, best = problem.batch_samples, len(problem.units), math.inf
    known: dict[tuple[int, ...], list[tuple[Stages, np.ndarray]]] = {}

    def templates(own: tuple[int, ...]) -> list[tuple[Stages, np.ndarray]]:
        if own not in known:
            names = [kind.name for kind, count in zip(problem.kinds, own, strict=True) for _ in range(count)]
            found = []
            for order in sorted(set(itertools.permutations(names))):
                for cuts in itertools.combinations(range(1, units), len(order) - 1):
                    stages = tuple(zip(order, (0, *cuts), (*cuts, units), strict=True))
                    for again in _subsets(len(order)) if problem.may_recompute else [frozenset[int]()]:
                        share_N = np.array(
                            [math.inf, *(played(problem, stages, n, again) for n in range(1, batch + 1))]
                        )
                        if np.isfinite(share_N).any():
                            found.append((stages, share_N))
            known[own] = found
        return known[own]

    for members in partitions(tuple(kind.count for kind in problem.kinds)):
        if len(members) < max(1, problem.least_members) or len(members) > batch:
            continue
        for chosen in itertools.product(*map(templates, members)):
            level_s = divided([share_N for _, share_N in chosen], batch)
            if level_s < best:
                best = min(best, level_s + exchanged(problem, [stages for stages, _ in chosen]))
    return best


def gap(problem: Problem) -> float | None:
    """Return how much longer the planner's step is than the best one; ``None`` where neither finds members."""
    found, best = solved(problem), shortest_step(problem)
    if not isinstance(found, Cover):
        assert math.isinf(best), f"refused, although a step of {best:.4g} s is possible: {found.reason}"
        return None
    assert found.step_s >= best * (1 - 1e-9)
    book = template_table(problem)
    assert isinstance(book, TemplateTable)
    counts = [kind.count for kind in problem.kinds]
    assert least_step(book, counts, allowed_kinds(problem), known_s=2 * found.step_s) <= best * (1 + 1e-9)
    check_memory(problem, found)
    return found.step_s / best - 1


@pytest.mark.parametrize("first", range(0, times(gate=8, every=400), 8))
def test_members_are_close_to_the_best_of_all(first: int) -> None:
    """Nothing is refused that fits; no step is over a tenth longer than the best, and on average one in a hundred."""
    gaps = [found for seed in range(first, first + 8) if (found := gap(a_cluster(seed))) is not None]
    assert max(gaps, default=0.0) <= 0.1
    assert sum(gaps) <= 0.01 * 8


FAR_ONCE = (96, 61, 139)
"""Here templates that were chosen one by one took 9, 8 and 6 % longer than the best members."""


@pytest.mark.parametrize("seed", [*FAR_ONCE, *range(times(gate=12, every=400))])
def test_members_of_three_kinds_are_close_to_the_best_of_all(seed: int) -> None:
    """Cuts and places of devices that are good for all members together are found."""
    found = gap(a_mixture(seed))
    assert found is None or found <= 0.05


@pytest.mark.parametrize("seed", range(times(gate=30, every=1000)))
def test_the_whole_step_of_given_members(seed: int) -> None:
    """Any orders and cuts of the members, memory or not: the best division of the batch, played, and the exchange."""
    rng, problem = random.Random(seed), a_mixture(seed)
    book = template_table(problem)
    if not isinstance(book, TemplateTable):
        return
    names = [i for i, kind in enumerate(problem.kinds) for _ in range(kind.count)]
    rng.shuffle(names)
    at = rng.randint(1, len(names) - 1)
    members = [
        Pipeline(
            tuple(own), (0, *sorted(rng.sample(range(1, len(problem.units)), len(own) - 1)), len(problem.units)), 0
        )
        for own in (names[:at], names[at:])
    ]
    stages = [tuple((problem.kinds[kind].name, a, b) for kind, a, b in member.stages) for member in members]
    shares = [
        np.array([math.inf, *(played(problem, own, n) for n in range(1, problem.batch_samples + 1))]) for own in stages
    ]
    expected = divided(shares, problem.batch_samples)
    expected += ring(problem, stages) if math.isfinite(expected) else 0.0
    step = WholeStep(book)
    assert step.seconds(members)[0] == pytest.approx(expected)
    assert step.seconds(members, expected * 0.999)[0] == math.inf


def a_tight_problem(seed: int) -> Problem:
    """Return up to three devices that lack memory for activations, most of which can be computed again."""
    rng = random.Random(seed)
    kinds = rng.choice([1, 2])
    problem = a_problem(rng, kinds=kinds, units=5, most=4 - kinds, memory=(250, 900), batch_samples=rng.choice([3, 8]))
    units = tuple(
        replace(unit, activation_bytes=rng.randint(50, 250), boundary_bytes=rng.choice([1, 10]))
        for unit in problem.units
    )
    fast = Link(bytes_per_s=rng.choice([100.0, 2000.0]))
    return replace(problem, units=units, links={}, default_link=fast, may_recompute=True)


@pytest.mark.parametrize("first", range(0, times(gate=16, every=400), 8))
def test_stages_compute_activations_again_where_that_is_best(first: int) -> None:
    """Any stages of any members may, by the oracle. A step is no longer than with all of them, or with none."""
    gaps, chosen = [], 0
    for seed in range(first, first + 8):
        problem = a_tight_problem(seed)
        found = solved(problem)
        gaps += [] if (own := gap(problem)) is None else [own]
        if isinstance(found, Cover):
            chosen += any(member.layout.recomputing for member in found.members)
            plain = solved(replace(problem, may_recompute=False))
            assert not isinstance(plain, Cover) or found.step_s <= plain.step_s * (1 + 1e-9)
    assert max(gaps) <= 0.05
    assert sum(gaps) <= 0.01 * 8
    assert chosen >= 1


def check_memory(problem: Problem, found: Cover) -> None:
    """Check that members fit with as many micro-batches as they may get, and that the planner counts no less."""
    for member, layout in zip(found.members, found.layouts, strict=True):
        stages = tuple((stage.kind, stage.first_unit, stage.last_unit + 1) for stage in layout.stages)
        most = member.cap_samples or problem.batch_samples
        assert member.share_samples <= most
        assert math.isfinite(played(problem, stages, most, frozenset(member.layout.recomputing)))
        for stage in layout.stages:
            assert stage.memory_bytes <= next(kind.memory_bytes for kind in problem.kinds if kind.name == stage.kind)


def solved(problem: Problem) -> Cover | NoLayout:
    return best_members(template_table(problem), problem)
