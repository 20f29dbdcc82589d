"""Activations that are computed again once memory has run out, in one process."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import heterotrain
import pytest
import torch
from heterotrain.errors import OutOfMemory
from heterotrain_core.contract import metrics
from heterotrain_core.contract.outcome import Cause
from torch.nn.utils.parametrizations import spectral_norm

ROWS = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(8, 3)
DATA = torch.utils.data.TensorDataset(ROWS, ROWS.sum(1, keepdim=True) ** 2)


class Kept(torch.autograd.Function):
    """Keeps a tensor for the backward pass; with more than ``most`` of them alive, memory runs out."""

    alive: ClassVar[weakref.WeakSet[torch.Tensor]] = weakref.WeakSet()
    most = 1 << 30

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        kept = x.clone()
        Kept.alive.add(kept)
        if sum(1 for _ in Kept.alive) > Kept.most:
            raise torch.OutOfMemoryError("too many activations")
        ctx.save_for_backward(kept)
        return kept * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        assert ctx.saved_tensors[0] is not None
        return gradients[0]


class Block(torch.nn.Module):
    """A residual block with dropout, which keeps one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values after the block."""
        kept: torch.Tensor = Kept.apply(torch.tanh(self.layer(x)))
        return x + self.drop(kept)


class Net(torch.nn.Module):
    """Blocks in a list, and a head."""

    def __init__(self, *, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one value a row."""
        for block in self.blocks:
            x = block(x)
        values: torch.Tensor = self.head(x)
        return values


def trained(model: torch.nn.Module, *, most: int = 1 << 30, micro: int = 1, **options: Any) -> tuple[Any, list[int]]:
    """Train with room for so many kept tensors; return the job, and the sizes of all micro-batches."""
    Kept.alive.clear()
    Kept.most = most
    job = heterotrain.init(epochs=2, batch_samples=4, micro_batch_samples=micro)
    model = job.wrap(model, **options)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = []
    for step in job.steps(DATA):
        with step:
            for x, y in step.micro_batches():
                sizes.append(len(x))
                step.backward(((model(x) - y) ** 2).mean())
            step.apply(optimizer)
    return job, sizes


def a_net(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def test_a_whole_model_with_units_computes_activations_again_and_its_weights_stay_exact() -> None:
    """Memory holds two of the four blocks' activations, so no micro-batch fits that keeps all of them."""
    plain, spared = a_net(), a_net()
    trained(plain)
    job, sizes = trained(spared, most=2, micro=2, units="blocks")
    assert sizes[:3] == [2, 1, 1], "the size is halved, then the step is repeated with less to keep"
    assert job._report.current()[metrics.CHECKPOINTED_UNITS] == 1.0
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(spared.state_dict()[name], value, rtol=1e-10, atol=0)


def test_a_sequence_of_layers_needs_no_name_for_its_units() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Linear(3, 1)).double()
    job, _ = trained(model, most=2)
    assert job._report.current()[metrics.CHECKPOINTED_UNITS] == 1.0


def test_where_nothing_is_left_to_spare_the_sentence_has_a_cause_for_the_operator() -> None:
    with pytest.raises(OutOfMemory, match="a single sample does not fit into memory") as found:
        trained(a_net(), most=2)
    assert found.value.cause is Cause.OUT_OF_DEVICE_MEMORY
    with pytest.raises(OutOfMemory, match=r"units=…, checkpoint_units=True"):
        trained(a_net(), most=0, units="blocks")


@pytest.mark.parametrize("kind", ["running statistics", "computed weights"])
def test_a_layer_that_a_second_pass_would_change_keeps_its_activations(kind: str) -> None:
    """Its gradient would be another one; the other blocks suffice here."""
    torch.manual_seed(1)
    model = Net()
    own = torch.nn.InstanceNorm1d(3, track_running_stats=True) if kind == "running statistics" else None
    model.blocks[0].drop = own or spectral_norm(torch.nn.Linear(3, 3))  # type: ignore[union-attr]  # torch's list
    before = [type(block) for block in model.blocks]
    if own is None:
        trained(model.double(), most=3, units="blocks")
    else:
        with pytest.raises(OutOfMemory):
            trained(model.double(), most=0, units="blocks")
    assert [type(block) is kind for block, kind in zip(model.blocks, before, strict=True)] == [True, *[False] * 3]
