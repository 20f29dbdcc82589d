"""Parts of tensors: the same rows as torch's."""

from __future__ import annotations

import torch
from heterotrain.parts.units.wrappers import checkpointed, compiled
from heterotrain.state.local import gradient, local, range_of, set_gradient, shard_of
from heterotrain.state.ranges import TensorRange
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(1, 9))
def test_ranks_hold_the_rows_of_torch_chunk(shape: list[int], ranks: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    chunks = [chunk.reshape(-1).tolist() for chunk in torch.chunk(whole, ranks)]
    chunks += [[]] * (ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        assert list(range(*shard_of(whole.shape, rank=rank, ranks=ranks))) == chunk


def test_a_whole_tensor_is_its_own_part() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    assert range_of("w", parameter) == TensorRange("w", 0, 6)
    assert local(parameter).data_ptr() == parameter.data_ptr()
    assert gradient(parameter) is None
    part = torch.ones(2, 3)
    set_gradient(parameter, part)
    assert gradient(parameter) is part
    assert range_of("s", torch.tensor(1.0)) == TensorRange("s", 0, 1)


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
