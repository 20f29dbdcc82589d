"""Parts of tensors: the same rows as torch's, and copies from any division into any other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from heterotrain.parts.units.wrappers import checkpointed, compiled
from heterotrain.state.holdings import Extent
from heterotrain.state.local import extent, fill, gradient, local, set_gradient, shard_extent
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 9))
def test_ranks_hold_the_rows_of_torch_chunk(shape: list[int], ranks: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = [chunk.reshape(-1).tolist() for chunk in torch.chunk(whole, ranks)]
    chunks += [[]] * (ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        place = shard_extent(whole.shape, rank=rank, ranks=ranks)
        assert list(range(place.start, place.stop)) == chunk


@given(st.lists(st.integers(0, 12), max_size=4))
def test_a_part_is_filled_from_any_stretches(edges: list[int]) -> None:
    whole = torch.arange(12.0)
    borders = sorted({0, 12, *edges})
    stretches = {Extent(a, b): whole[a:b].clone() for a, b in pairwise(borders)}
    target = torch.full((3, 4), -1.0)
    fill(target, stretches)
    assert target.view(-1).equal(whole)


def test_a_part_with_a_gap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4, 12\) are missing"):
        fill(torch.zeros(12), {Extent(0, 4): torch.ones(4), Extent(5, 12): torch.ones(7)})


def test_a_whole_tensor_is_its_own_part() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    assert extent(parameter) == Extent(0, 6)
    assert local(parameter).data_ptr() == parameter.data_ptr()
    assert gradient(parameter) is None
    part = torch.ones(2, 3)
    set_gradient(parameter, part)
    assert gradient(parameter) is part
    assert extent(torch.tensor(1.0)) == Extent(0, 1)


class Layer(torch.nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return torch.tanh(self.linear(x))


def test_a_checkpointed_unit_runs_twice_with_the_same_names_and_gradients() -> None:
    torch.manual_seed(0)
    plain, twice = Layer(), Layer()
    twice.load_state_dict(plain.state_dict())
    assert checkpointed(twice) is twice
    x = torch.ones(2, 3)
    for layer in (plain, twice):
        layer(x).sum().backward()
    assert (plain.runs, twice.runs) == (1, 2)
    assert isinstance(twice, Layer)
    for (name, p), (other, q) in zip(plain.named_parameters(), twice.named_parameters(), strict=True):
        assert name == other
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.equal(q.grad)


def test_units_of_one_class_share_a_compiled_function() -> None:
    first, second = (compiled(torch.nn.Linear(3, 2), backend="eager") for _ in range(2))
    assert type(first) is type(second)
    assert first(torch.ones(1, 3)).shape == second(torch.ones(1, 3)).shape
    assert [name for name, _ in first.named_parameters()] == ["weight", "bias"]
