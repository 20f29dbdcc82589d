"""What is sent between ranks: nobody sends what it lacks, everything arrives once, and no link carries too much."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from heterotrain.state.balance import PRECISION, Supply, shared
from heterotrain.state.loads import Holdings, Load, loads_of, range_in
from heterotrain.state.ranges import Holding, TensorRange, covering, missing, whole
from heterotrain.state.routes import rounds
from heterotrain.state.tensors import Entry
from heterotrain.state.transfer import StateSummary, assign_roles
from hypothesis import given
from hypothesis import strategies as st
from support.repeat import times


@given(total=st.integers(1, 60), donors=st.integers(1, 5), receivers=st.integers(1, 6), seed=st.integers(0, 9))
def test_every_byte_reaches_every_receiver_without_overloading_a_link(
    total: int, donors: int, receivers: int, seed: int
) -> None:
    """Simulated with sets of bytes: no rank sends bytes it lacks or receives bytes it has; no link is overloaded."""
    ranks = list(np.random.default_rng(seed).permutation(donors + receivers).tolist())
    giving, taking = tuple(ranks[:donors]), tuple(ranks[donors:])
    holds = {rank: set(range(total)) if rank in giving else set() for rank in ranks}
    sent, got = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    for routes in rounds([Load((TensorRange("a", 0, total),), giving, taking)]):
        before = {rank: set(held) for rank, held in holds.items()}
        assert len({(route.source, route.to) for route in routes}) == len(routes)
        for route in routes:
            load = {byte for part in route.ranges for byte in range(part.start, part.stop)}
            assert load
            assert load <= before[route.source]
            assert not load & holds[route.to]
            holds[route.to] |= load
            sent[route.source] += len(load)
            got[route.to] += len(load)
    assert all(held == set(range(total)) for held in holds.values())
    assert all(got[rank] == total for rank in taking)
    slack = max(1, receivers)  # bytes cannot be divided
    assert all(sent[rank] <= total * max(1, min(1.0, receivers / donors)) + slack for rank in ranks)
    if receivers > donors:
        assert all(sent[rank] <= total / donors + slack for rank in giving)


SUPPLIES = st.lists(
    st.tuples(st.integers(0, 40), st.lists(st.integers(0, 5), min_size=1, unique=True).map(tuple)),
    min_size=1, max_size=6,
)  # fmt: skip


@given(supplies=SUPPLIES)
def test_the_busiest_source_gives_as_little_as_possible(supplies: list[Supply]) -> None:
    """Everything is given, by those who have it; the maximum is that of the densest set of ranks (Hall's condition)."""
    amounts = shared(supplies)
    for (size, sources), given_by in zip(supplies, amounts, strict=True):
        assert sum(given_by.values()) == size
        assert set(given_by) <= set(sources)
        assert all(amount > 0 for amount in given_by.values())
    given_in_all: Counter[int] = Counter()
    for given_by in amounts:
        given_in_all.update(given_by)
    ranks = sorted({rank for _, sources in supplies for rank in sources})
    bound = 0
    for bits in product((False, True), repeat=len(ranks)):
        among = {rank for rank, bit in zip(ranks, bits, strict=True) if bit}
        only_there = sum(size for size, sources in supplies if set(sources) <= among)
        bound = max(bound, -(-only_there // max(1, len(among))))
    assert max(given_in_all.values(), default=0) <= bound + -(-bound // PRECISION)


def a_range(rng: np.random.Generator, name: str, size: int) -> TensorRange:
    """Return some elements; now and then all of them, or none."""
    start, stop = sorted(rng.integers(0, size + 1, 2).tolist())
    return TensorRange(name, *[(start, stop), (0, size), (0, 0)][int(rng.integers(0, 3))])


def holdings(rng: np.random.Generator, sizes: dict[str, int], ranks: int) -> list[Holding | None]:
    """Return random holdings that are whole together; now and then, a rank holds everything."""
    found: list[Holding | None] = []
    for _ in range(ranks):
        some = {name: a_range(rng, name, size) for name, size in sizes.items() if rng.random() < 0.8}
        found.append(None if rng.random() < 0.2 else some)
    partial = [holding for holding in found if holding is not None]
    if None not in found and missing(sizes, partial):
        found[int(rng.integers(ranks))] = whole(sizes)
    return found


@pytest.mark.parametrize("seed", range(times(gate=30, every=600)))
def test_transfers_between_random_layouts(seed: int) -> None:
    """Every rank ends with exactly what it needs, each element received once and from a rank that has it."""
    rng = np.random.default_rng(seed)
    sizes = {f"p{i}": int(rng.integers(0, 12)) for i in range(int(rng.integers(1, 5)))}
    ranks = int(rng.integers(2, 7))
    entries = [Entry(f"model.{name}", name, (size,), torch.float32, divided=True) for name, size in sizes.items()]
    entries += [Entry(f"exp_avg.{name}", name, (size,), torch.float64, divided=True) for name, size in sizes.items()]
    entries += [Entry(f"step.{name}", name, (), torch.float32) for name in sizes]
    entries.append(Entry("extras.average", "", (5,), torch.float16))
    newest = [bool(rng.random() < 0.7) for _ in range(ranks)]
    newest[0] = True
    has = iter(holdings(rng, sizes, sum(newest)))
    needs = holdings(rng, sizes, ranks)
    summaries = [
        StateSummary(steps=7 if new else 6, evaluated=0, has=next(has) if new else None, needs=need)
        for new, need in zip(newest, needs, strict=True)
    ]
    roles = assign_roles(summaries, sizes)
    places = roles.places
    assert roles.donors == tuple(rank for rank in range(ranks) if newest[rank])
    assert not roles.cold_start
    assert not roles.lost

    def bytes_in(entry: Entry, holding: Holding | None) -> set[tuple[str, int]]:
        own = range_in(entry, holding)
        if own is None or (entry.of and not entry.divided and not sizes[entry.of]):
            return set()
        size = entry.dtype.itemsize
        return {(entry.name, byte) for byte in range(own.start * size, own.stop * size)}

    holds: list[set[tuple[str, int]]] = [
        set().union(*(bytes_in(entry, place.has) for entry in entries)) if place.is_donor else set() for place in places
    ]
    wanted = [set().union(*(bytes_in(entry, place.needs) for entry in entries)) for place in places]
    loads = loads_of([entry for entry in entries if entry.divided or not entry.of or sizes[entry.of]], places)
    for routes in rounds(loads):
        before = [set(held) for held in holds]
        for route in routes:
            sent = {(part.name, byte) for part in route.ranges for byte in range(part.start, part.stop)}
            assert sent <= before[route.source]
            assert not sent & holds[route.to]
            assert sent <= wanted[route.to]
            assert route.to in roles.receivers
            holds[route.to] |= sent
    assert all(held >= want for held, want in zip(holds, wanted, strict=True))


@pytest.mark.parametrize("seed", range(times(gate=20, every=400)))
def test_ranks_that_hold_everything_together(seed: int) -> None:
    """The chosen ranks leave nothing out, and without any of them the ones before it would not do."""
    rng = np.random.default_rng(seed)
    sizes = {f"p{i}": int(rng.integers(0, 9)) for i in range(4)}
    held = {
        rank: {name: a_range(rng, name, size) for name, size in sizes.items() if rng.random() < 0.9}
        for rank in range(int(rng.integers(1, 6)))
    }
    found = covering(sizes, held)
    assert (found is None) == bool(missing(sizes, held.values()))
    if found is not None:
        assert not missing(sizes, [held[rank] for rank in found])
        if len(found) > 1:
            assert missing(sizes, [held[rank] for rank in found[:-1]])


HALF: dict[str, TensorRange] = {"w": TensorRange("w", 0, 4)}
OTHER_HALF: dict[str, TensorRange] = {"w": TensorRange("w", 4, 8)}


@pytest.mark.parametrize(
    ("steps", "has", "donors", "receivers", "lost"),
    [
        ([7, 7, 7], [HALF, OTHER_HALF, None], (0, 1, 2), (), False),
        ([7, 6, 6], [HALF, OTHER_HALF, HALF], (1, 2), (0,), False),
        ([7, 6, -1], [HALF, HALF, None], (0, 2), (1,), True),
        ([7, 7, -1], [HALF, OTHER_HALF, None], (0, 1), (2,), False),
    ],
    ids=["nothing to send", "half of the newest step is lost", "half of everything is lost", "a joiner"],
)
def test_a_step_of_which_a_part_is_lost_is_passed_over(
    steps: list[int], has: list[Holding | None], donors: tuple[int, ...], receivers: tuple[int, ...], lost: bool
) -> None:
    """The newest step that living ranks hold together counts."""
    roles = assign_roles(
        [StateSummary(steps=s, evaluated=0, has=h, needs=h) for s, h in zip(steps, has, strict=True)], {"w": 8}
    )
    assert (roles.donors, roles.receivers, roles.lost, roles.cold_start) == (donors, receivers, lost, False)


def test_only_what_changed_place_is_sent() -> None:
    """Two stages of eight layers are cut anew: one layer moves, with its optimizer state, and nothing else."""
    sizes = {f"{i}.weight": 100 for i in range(8)}
    entries = [Entry(f"model.{name}", name, (10, 10), torch.float32, divided=True) for name in sizes]
    entries += [Entry(f"exp_avg.{name}", name, (10, 10), torch.float32, divided=True) for name in sizes]
    full = whole(sizes)

    def layers(start: int, stop: int) -> Holding:
        return {name: full[name] for name in list(sizes)[start:stop]}

    places = [Holdings(has=layers(0, 4), needs=layers(0, 5)), Holdings(has=layers(4, 8), needs=layers(5, 8))]
    (load,) = loads_of(entries, places)
    assert (load.size_bytes, load.donors, load.receivers) == (2 * 400, (1,), (0,))
    assert [part.name for part in load.ranges] == ["model.4.weight", "exp_avg.4.weight"]
