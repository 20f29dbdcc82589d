"""Gradients of divided models: each element is the sum over its owners, whatever the division."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.parts.pieces.division import PieceDivision
from heterotrain.parts.pieces.piece_reducer import PieceReducer
from heterotrain.state.ranges import Holding, TensorRange, pieces_of
from support.repeat import times

SHAPES = {"first": (3, 4), "second": (7,), "number": (), "third": (5, 2, 2), "last": (1,)}
SIZES = {name: math.prod(shape) for name, shape in SHAPES.items()}


class Part:
    """A layout whose parameters are flat parts of the whole ones."""

    uses = None

    def __init__(self, holding: Holding) -> None:
        self.shapes = SHAPES
        self.holding = holding
        self.parameters = {
            name: torch.nn.Parameter(torch.zeros(extent.elements, dtype=torch.float64))
            for name, extent in holding.items()
        }

    def named_parameters(self) -> Iterable[tuple[str, torch.nn.Parameter]]:
        return self.parameters.items()

    def backward(self, gradients: Mapping[str, torch.Tensor], used: Iterable[str]) -> None:
        """Run a backward pass whose gradient of each used parameter is the part of a whole one."""
        loss = torch.zeros((), dtype=torch.float64)
        for name in used:
            if name in self.parameters:
                extent = self.holding[name]
                loss = loss + (self.parameters[name] * gradients[name][extent.start : extent.stop]).sum()
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch


class Groups:
    """Sums buffers of all ranks in one process: the n-th reduction of each set of owners."""

    def __init__(self) -> None:
        self.sent: dict[tuple[tuple[int, ...], int], dict[int, torch.Tensor]] = defaultdict(dict)
        self.counts: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)

    def of(self, rank: int, ranks: int) -> Any:
        groups = self

        class OneRank:
            world_size = ranks

            def all_reduce(self, flat: torch.Tensor, owners: tuple[int, ...]) -> object:
                groups.counts[rank, owners] += 1
                groups.sent[owners, groups.counts[rank, owners]][rank] = flat
                return SimpleNamespace(settle=lambda: None, is_timed=True)

            def wait(self, work: object, what: str) -> None:
                pass

        return OneRank()

    def add_up(self) -> None:
        for (owners, _), flats in self.sent.items():
            assert sorted(flats) == sorted(owners), "an owner does not take part"
            total = torch.stack(list(flats.values())).sum(0)  # fails when the lengths differ
            for flat in flats.values():
                flat.copy_(total)
        self.sent.clear()


def divided(rng: random.Random, ranks: int) -> list[dict[str, TensorRange]]:
    """Draw a member: its ranks hold consecutive parts of some parameters and the whole of others."""
    held: list[dict[str, TensorRange]] = [{} for _ in range(ranks)]
    for name, size in SIZES.items():
        if rng.random() < 0.3:  # as in a stage of a pipeline, or tied weights on two of them
            for rank in rng.sample(range(ranks), rng.choice([1, min(2, ranks)])):
                held[rank][name] = TensorRange(name, 0, size)
            continue
        edges = sorted(rng.randint(0, size) for _ in range(ranks - 1))
        for rank, (start, stop) in enumerate(zip([0, *edges], [*edges, size], strict=True)):
            held[rank][name] = TensorRange(name, start, stop)
    return held


def reducers(holdings: list[dict[str, TensorRange]], *, bucket_bytes: int) -> list[PieceReducer]:
    pieces = pieces_of(SIZES, holdings)
    return [
        PieceReducer(
            Part(holding),  # type: ignore[arg-type]  # the members used
            PieceDivision(names=tuple(SIZES), pieces=pieces, holding=holding),
            rank=rank,
            bucket_bytes=bucket_bytes,
        )
        for rank, holding in enumerate(holdings)
    ]


@pytest.mark.parametrize("seed", range(times(gate=20, every=600)))
def test_each_element_is_the_sum_over_its_owners(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311  # seeded chance
    members = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    holdings = [holding for ranks in members for holding in divided(rng, ranks)]
    found = reducers(holdings, bucket_bytes=rng.choice([1, 40, 10_000]))
    groups, generator = Groups(), torch.Generator().manual_seed(seed)
    formation = [groups.of(rank, len(holdings)) for rank in range(len(holdings))]
    gradients = [
        {n: torch.randn(size, dtype=torch.float64, generator=generator) for n, size in SIZES.items()} for _ in holdings
    ]
    unused = {name for name in SIZES if rng.random() < 0.3}
    for step in range(2):  # the first reductions of a formation are held
        for rank, reducer in enumerate(found):
            micro_batches = rng.randint(1, 3)
            reducer.begin(micro_batches=micro_batches)
            uses = {name: rng.sample(range(micro_batches), rng.randint(1, micro_batches)) for name in SIZES}
            parts = {name: gradient / len(uses[name]) for name, gradient in gradients[rank].items()}
            for number in range(micro_batches):
                if number:
                    reducer.check_untouched()
                if number == micro_batches - 1:
                    reducer.arm(formation[rank])
                part: Any = reducer.layout
                part.backward(parts, {name for name, numbers in uses.items() if number in numbers} - unused)
                reducer.flush() if number == micro_batches - 1 else reducer.remember()
            assert reducer.exchange.is_held is (step == 0 and len(holdings) > 1)
            if reducer.exchange.is_held:
                reducer.exchange.release()
        groups.add_up()
        bits = -1
        for reducer in found:
            bits &= reducer.unused
        squared = 0.0
        for rank, reducer in enumerate(found):
            reducer.wait()
            reducer.drop_unused(bits)
            squared += reducer.owned_squared()
            for name, parameter in reducer.layout.named_parameters():
                extent = holdings[rank][name]
                if name in unused or not extent.elements:
                    assert parameter.grad is None or not parameter.grad.any()
                    assert name not in unused or parameter.grad is None
                    continue
                expected = torch.zeros(SIZES[name], dtype=torch.float64)
                for other, holding in enumerate(holdings):
                    held = holding.get(name, TensorRange(name, 0, 0))
                    expected[held.start : held.stop] += gradients[other][name][held.start : held.stop]
                torch.testing.assert_close(parameter.grad, expected[extent.start : extent.stop], rtol=1e-13, atol=1e-13)
        whole = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items() if name not in unused}
        for other, holding in enumerate(holdings):
            for name, total in whole.items():
                held = holding.get(name, TensorRange(name, 0, 0))
                total[held.start : held.stop] += gradients[other][name][held.start : held.stop]
        assert squared == pytest.approx(sum(float(g.square().sum()) for g in whole.values()), rel=1e-12)


def test_ranks_with_the_same_owners_make_the_same_buckets() -> None:
    rng = random.Random(3)  # noqa: S311  # seeded chance
    holdings = [holding for ranks in (3, 2, 1) for holding in divided(rng, ranks)]
    found = reducers(holdings, bucket_bytes=64)
    lists: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
    for reducer in found:
        own: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for bucket in reducer._buckets:
            own[bucket.owners].append(bucket.flat.numel())
        for owners, sizes in own.items():
            lists[owners].add(tuple(sizes))
    assert lists
    assert all(len(sizes) == 1 for sizes in lists.values())


def test_freezing_after_the_formation_began_is_refused() -> None:
    (reducer,) = reducers([{name: TensorRange(name, 0, size) for name, size in SIZES.items()}], bucket_bytes=64)
    reducer.begin()
    dict(reducer.layout.named_parameters())["first"].requires_grad_(False)
    with pytest.raises(UsageError, match="frozen, unfrozen or replaced"):
        reducer.begin()


def test_changes_between_micro_batches_are_refused() -> None:
    (reducer,) = reducers([{name: TensorRange(name, 0, size) for name, size in SIZES.items()}], bucket_bytes=64)
    reducer.begin(micro_batches=2)
    part: Any = reducer.layout
    part.backward({n: torch.ones(size, dtype=torch.float64) for n, size in SIZES.items()}, SIZES)
    reducer.remember()
    reducer.check_untouched()
    part.parameters["first"].grad.mul_(2)
    with pytest.raises(UsageError, match="gradients were changed"):
        reducer.check_untouched()


def test_only_gradients_that_travel_have_a_buffer() -> None:
    """A member alone has none: its gradients are complete where they are."""
    half = {name: TensorRange(name, 0, size // 2) for name, size in SIZES.items()}
    rest = {name: TensorRange(name, size // 2, size) for name, size in SIZES.items()}
    for alone in reducers([half, rest], bucket_bytes=1):
        assert alone._buckets == []
    every = {name: TensorRange(name, 0, size) for name, size in SIZES.items()}
    one, other, whole = reducers([half, {"last": TensorRange("last", 0, 1)}, every], bucket_bytes=1)
    for reducer, elements in ((one, sum(e.elements for e in half.values())), (other, 1)):
        assert sum(bucket.flat.numel() for bucket in reducer._buckets) == elements
    assert sum(bucket.flat.numel() for bucket in whole._buckets) < sum(SIZES.values())


def test_a_sum_lies_in_memory_as_its_parameter_does() -> None:
    """Pieces count elements row by row, and a fused optimizer walks the gradient as the parameter lies in memory."""
    both = {name: TensorRange(name, 0, size) for name, size in SIZES.items()}
    reducer, _ = reducers([both, both], bucket_bytes=64)
    for name, shape in SHAPES.items():
        whole = torch.zeros(shape, dtype=torch.float64)
        back = tuple(range(len(shape)))[::-1]
        reducer._parameters[name].data = whole.permute(back).contiguous().permute(back)
    reducer.begin()
    reducer.arm(None)
    expected = {name: torch.arange(float(size)).double().view(SHAPES[name]) for name, size in SIZES.items()}
    torch.stack([(reducer._parameters[name] * value).sum() for name, value in expected.items()]).sum().backward()
    reducer.flush()
    reducer.wait()
    for name, parameter in reducer._parameters.items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name])
        assert parameter.grad.stride() == parameter.stride()
