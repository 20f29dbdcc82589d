"""The order of parameters in the buckets follows that in which gradients arrive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.exchange.flat.bucket_order import KEEP, arrange, leave_in_order, share_order
from heterotrain.exchange.flat.reducer import Reducer
from support.noted_exchange import NotedExchange

LAYER_BYTES = (8 * 8 + 8) * 4


class HeadFirst(torch.nn.Module):
    """Computes its layers in another order than that of registration: gradients arrive in the order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.stem = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer registered last first."""
        return torch.as_tensor(self.head(torch.tanh(self.middle(torch.tanh(self.stem(x))))))


def step(reducer: Reducer, group: Any) -> list[int]:
    """Run a backward pass and return for each bucket how many parameters had a gradient when it left."""
    left: list[int] = []
    reducer.begin()
    exchange: Any = reducer.exchange
    exchange.note = lambda: left.append(sum(parameter.grad is not None for parameter in reducer.model.parameters()))
    reducer.arm(group)
    reducer.model(torch.ones(2, 8)).sum().backward()
    reducer.flush()
    reducer.wait()
    return left


class Ranks:
    """Ranks in which the lowest one speaks: answers of a group's exchanges."""

    def __init__(self, rank: int, rows: list[list[float]], data: bytes = b"") -> None:
        self.rank, self.world_size = rank, 1
        self._rows, self.data = rows, data

    def gather_now(self, values: list[float]) -> list[list[float]]:
        """Return all rows, with this rank's own one."""
        return [values if rank == self.rank else row for rank, row in enumerate(self._rows)]

    def broadcast_bytes(self, data: bytes | None, *, size_bytes: int, source: int) -> bytes:
        """Return the source's bytes, and keep them."""
        if source == self.rank:
            assert data is not None
            self.data = data
        assert len(self.data) == size_bytes
        return self.data


def test_buckets_leave_during_backward_once_the_order_is_known() -> None:
    """In the first step all leave at its end; afterwards the head's bucket leaves first, without waiting for others."""
    reducer, group = Reducer(HeadFirst(), bucket_bytes=LAYER_BYTES, exchange=NotedExchange()), Ranks(0, [[0.0]])
    reducer.form(group)  # type: ignore[arg-type]  # the part of a group that is used
    assert reducer.wants_order
    late = step(reducer, None)
    assert late == [6, 6, 6]
    reducer.agree_on_order(group)  # type: ignore[arg-type]  # as above
    assert not reducer.wants_order
    assert step(reducer, None) == [2, 4, 6]
    first = reducer.buckets[0].parameters
    assert {id(parameter) for parameter in first} == {id(p) for p in reducer.model.head.parameters()}


def test_a_model_whose_buckets_leave_in_order_keeps_them() -> None:
    """No buffer is allocated again for a model that computes its layers as it registers them."""
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    reducer, group = (
        Reducer(torch.nn.Sequential(*layers), bucket_bytes=LAYER_BYTES, exchange=NotedExchange()),
        Ranks(0, [[0.0]]),
    )
    reducer.form(group)  # type: ignore[arg-type]  # as above
    step(reducer, None)
    before = reducer.flats
    reducer.agree_on_order(group)  # type: ignore[arg-type]  # as above
    assert step(reducer, None) == [2, 4, 6]
    assert all(one is other for one, other in zip(reducer.flats, before, strict=True))
    assert not reducer._order.positions


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize(("compiled", "left"), [("blocks", [1, 2, 3]), ("model", [1, 1, 1])])
def test_compiled_blocks_send_while_others_compute_and_a_compiled_model_at_its_end(
    compiled: str, left: list[int]
) -> None:
    """Of three blocks, one backward graph has run before the first bucket leaves; of a whole model, the only one."""
    torch.manual_seed(3)
    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]
    model, x, ran, seen = torch.nn.Sequential(*blocks), torch.randn(4, 8), list[int](), list[int]()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    parts = blocks if compiled == "blocks" else [model]
    exchange = NotedExchange(lambda: seen.append(len(ran)))
    reducer = Reducer(model, bucket_bytes=LAYER_BYTES, exchange=exchange)
    reducer.begin()
    reducer.arm(None)
    for part in parts:
        part.compile(backend="aot_eager")
        x = part(x)
        assert x.grad_fn is not None
        x.grad_fn.register_hook(lambda *_gradients: ran.append(1))
    x.sum().backward()
    reducer.flush()
    reducer.wait()
    assert seen == left
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_joiner_takes_over_the_order_before_its_first_step() -> None:
    """Its buckets are those of the others, although it has seen no gradient."""
    teacher, group = Reducer(HeadFirst(), bucket_bytes=LAYER_BYTES, exchange=NotedExchange()), Ranks(0, [[0.0]])
    teacher.form(group)  # type: ignore[arg-type]  # as above
    step(teacher, None)
    teacher.agree_on_order(group)  # type: ignore[arg-type]  # as above
    step(teacher, None)
    joiner = Reducer(HeadFirst(), bucket_bytes=LAYER_BYTES, exchange=NotedExchange())
    rows = [[float(len(teacher._order.positions))], [0.0]]
    joiner.form(Ranks(1, rows, group.data))  # type: ignore[arg-type]  # as above
    joiner.begin()
    assert joiner._order.positions == teacher._order.positions
    assert joiner.signature == teacher.signature
    assert joiner.wants_order, "as on the others, which do not know what it has tried"


@pytest.mark.parametrize(
    ("rows", "own", "expected"),
    [
        ([[0.0], [3.0]], (2, 0, 1), (2, 0, 1)),
        ([[0.0], [0.0]], (), None),
        ([[0.0], [KEEP]], None, None),
    ],
)
def test_the_lowest_rank_that_has_an_order_decides(
    rows: list[list[float]], own: tuple[int, ...] | None, expected: tuple[int, ...] | None
) -> None:
    """A rank without a share has seen no gradient; one may also find that nothing has to change."""
    assert share_order(Ranks(1, rows), own) == expected  # type: ignore[arg-type]  # as above


def test_parameters_of_unknown_place_come_last() -> None:
    """In the order of DistributedDataParallel: from the last registered one."""
    parts = [SimpleNamespace(name=name) for name in "abcd"]
    assert [p.name for p in arrange(parts, {id(parts[0]): 0, id(parts[2]): 1})] == ["a", "c", "d", "b"]
    assert leave_in_order([[3, 2], [1], [0]], [3, 2, 1, 0])
    assert leave_in_order([[3, 2], [1], [0]], [2, 3, 1]), "parameter 0 has no gradient: its bucket is the last one"
    assert not leave_in_order([[3, 2], [1], [0]], [2, 3, 0])
    assert not leave_in_order([[3], [2], [1]], [1, 2, 3])
