"""The order of members in the rings of their owners, against all orders; and members that need a good one."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.best import allowed_kinds, best_members
from heterotrain_planner.layout.known import known_step_seconds
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.ring_order import Rings
from heterotrain_planner.layout.step_bound import least_step
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from support.repeat import times


def clustered(rng: random.Random, *, kinds: int, counts: Sequence[int]) -> Problem:
    """Return a model of one unit, and kinds whose links differ, also inside a kind."""
    names = [f"k{index}" for index in range(kinds)]
    seconds = {
        name: (UnitSeconds(micro_batch_samples=1, forward_s=rng.uniform(0.3, 1.2), backward_s=rng.uniform(0.3, 1.2)),)
        for name in names
    }
    unit = UnitProfile(
        name="u", parameter_bytes=rng.randint(50, 300), activation_bytes=1, boundary_bytes=0, seconds=seconds
    )
    choices = [Link(bytes_per_s=each, latency_s=rng.choice((0.0, 0.05))) for each in (1000.0, rng.choice((100, 300)))]
    choices.append(Link(bytes_per_s=rng.choice((5.0, 20.0, 50.0))))
    return Problem(
        units=(unit,),
        kinds=tuple(DeviceKind(name=n, count=c, memory_bytes=10**6) for n, c in zip(names, counts, strict=True)),
        links={pair: rng.choice(choices) for pair in itertools.combinations_with_replacement(names, 2)},
        batch_samples=rng.choice((8, 16, 32)),
        micro_batches=(1,),
        least_members=rng.choice((1, 1, 2, 4)),
        may_cut=False,
    )


def orders(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield all orders of so many members of each type."""
    if not any(counts):
        yield ()
    for each, count in enumerate(counts):
        if count:
            for rest in orders([n - (i == each) for i, n in enumerate(counts)]):
                yield (each, *rest)


def busiest(
    problem: Problem, kinds: Sequence[Sequence[str]], held: Mapping[tuple[int, ...], float], order: Sequence[int]
) -> float:
    """Return the seconds of the busiest device: every owner sends to the next one, round by round."""
    busy = Counter[tuple[int, int]]()
    for owners, size in held.items():
        names = [kinds[each][owners[each]] for each in order]
        pairs = zip(names, [*names[1:], names[0]], strict=True)
        round_s = max(problem.link(*pair).seconds(size / len(order)) for pair in pairs) if size else 0.0
        for at, each in enumerate(order):
            busy[at, owners[each]] += 2 * (len(order) - 1) * round_s  # type: ignore[assignment]  # counts seconds
    return max(busy.values())


@pytest.mark.parametrize("first", range(0, times(gate=50, every=10_000), 50))
def test_no_order_of_members_has_a_shorter_exchange(first: int) -> None:
    """Members of several devices, whose rings want different orders; three members have one order only."""
    better = 0
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        problem = clustered(rng, kinds=3, counts=(1, 1, 1))
        types = rng.choice((2, 3, 4))
        kinds = [[rng.choice(problem.kinds).name for _ in range(rng.choice((1, 2, 3)))] for _ in range(types)]
        counts = rng.choices((1, 2, 3), (6, 3, 1), k=types)
        held = {
            tuple(rng.randrange(len(own)) for own in kinds): float(rng.choice((0, 50, 300)))
            for _ in range(rng.randint(1, 4))
        }
        given = [each for each, count in enumerate(counts) for _ in range(count)]
        rng.shuffle(given)
        rings = Rings(problem, kinds, held, counts)
        given_s = busiest(problem, kinds, held, given)
        assert rings.seconds(given) == pytest.approx(given_s)
        seconds, order = rings.shortest(given)
        assert sorted(order) == sorted(given)
        assert seconds == pytest.approx(busiest(problem, kinds, held, order))
        assert seconds == pytest.approx(min(busiest(problem, kinds, held, each) for each in orders(counts)))
        better += seconds < given_s * 0.999
    assert better > 2


def test_many_members_are_put_in_order() -> None:
    """Links inside a kind are slow, or those between two of three kinds; a thousand members, some kinds alternate."""
    problem = clustered(random.Random(1), kinds=3, counts=(1, 1, 1))
    slow, fast = Link(bytes_per_s=1.0), Link(bytes_per_s=100.0)
    names, held = [["k0"], ["k1"], ["k2"]], {(0, 0, 0): 1000.0}
    for slow_pairs, counts in (
        ([("k0", "k0"), ("k1", "k1")], (500, 500, 20)),
        ([("k0", "k1")], (600, 400, 2)),
        ([("k0", "k0"), ("k0", "k1")], (300, 20, 301)),
    ):
        own = replace(problem, links=dict.fromkeys(slow_pairs, slow), default_link=fast)
        given = [each for each, count in enumerate(counts) for _ in range(count)]
        seconds, order = Rings(own, names, held, counts).shortest(given)
        assert Counter(order) == Counter(given)
        assert seconds == pytest.approx(2 * (len(given) - 1) * fast.seconds(1000 / len(given)))


def least(problem: Problem) -> float:
    """Return the shortest step of whole models on single devices, over all members, shares and orders."""
    names, unit, best = [kind.name for kind in problem.kinds], problem.units[0], math.inf
    sample_s = [unit.seconds[name][0].forward_s + unit.seconds[name][0].backward_s for name in names]
    for counts in itertools.product(*(range(kind.count + 1) for kind in problem.kinds)):
        members = [each for each, count in enumerate(counts) for _ in range(count)]
        if not max(1, problem.least_members) <= len(members) <= problem.batch_samples:
            continue
        taken = [1] * len(members)
        for _ in range(problem.batch_samples - len(members)):
            soonest = min(range(len(members)), key=lambda i: (taken[i] + 1) * sample_s[members[i]])
            taken[soonest] += 1
        share_s = max(number * sample_s[each] for number, each in zip(taken, members, strict=True))
        if share_s < best:
            held = {(0,) * len(names): float(unit.parameter_bytes)}
            each_s = (busiest(problem, [[name] for name in names], held, order) for order in orders(counts))
            best = min(best, share_s + (min(each_s) if len(members) > 1 else 0.0))
    return best


@pytest.mark.parametrize("seed", range(times(gate=25, every=1000)))
def test_members_and_their_order_are_the_best_together(seed: int) -> None:
    """Up to six devices of up to three kinds; the planner's step, its bound, and the step of its plan in force."""
    rng = random.Random(seed)
    counts = next(c for _ in itertools.count() if 4 <= sum(c := rng.choices((0, 1, 2, 3), k=3)) <= 6)
    problem = clustered(rng, kinds=3, counts=counts)
    templates = template_table(problem)
    found = best_members(templates, problem)
    assert isinstance(found, Cover)
    assert isinstance(templates, TemplateTable)
    best_s = least(problem)
    assert found.step_s == pytest.approx(best_s)
    assert least_step(templates, counts, allowed_kinds(problem), known_s=2 * best_s) <= best_s * (1 + 1e-9)
    kinds = [layout.kinds for layout in found.layouts]
    assert known_step_seconds(problem, found.members, kinds) == (pytest.approx(best_s), found.exchange_s)


def test_the_plan_in_force_keeps_its_order() -> None:
    """Two fast and two slow devices, each pair with a slow link inside: what counts is how the ranks are numbered."""
    problem = clustered(random.Random(2), kinds=2, counts=(2, 2))
    slow, fast = Link(bytes_per_s=1.0), Link(bytes_per_s=1000.0)
    problem = replace(
        problem, links={("k0", "k0"): slow, ("k1", "k1"): slow}, default_link=fast, least_members=4, batch_samples=8
    )
    found = best_members(template_table(problem), problem)
    assert isinstance(found, Cover)
    size = problem.units[0].parameter_bytes / 4
    assert found.exchange_s == pytest.approx(6 * fast.seconds(size))
    kinds = [layout.kinds for layout in found.layouts]
    assert [own != other for own, other in itertools.pairwise(kinds)] == [True] * 3
    pairs = sorted(zip(kinds, found.members, strict=True), key=lambda pair: pair[0])
    by_kind = known_step_seconds(problem, [member for _, member in pairs], [own for own, _ in pairs])
    share_s = found.step_s - found.exchange_s
    assert by_kind == pytest.approx((share_s + 6 * slow.seconds(size), 6 * slow.seconds(size)))
