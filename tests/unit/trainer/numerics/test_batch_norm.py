"""BatchNorm over the global batch; in a single process it equals torch's own."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.numerics.batch_norm import BatchNormContext, GlobalBatchNorm, synchronise
from hypothesis import given, settings
from hypothesis import strategies as st
from support.repeat import times
from torch import nn


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        (nn.BatchNorm1d, (7, 3), {}),
        (nn.BatchNorm1d, (5, 3, 4), {"momentum": None}),
        (nn.BatchNorm2d, (4, 3, 2, 5), {"affine": False}),
        (nn.BatchNorm2d, (4, 3, 2, 5), {"track_running_stats": False}),
        (nn.BatchNorm3d, (2, 3, 2, 2, 2), {"eps": 0.1}),
    ],
)
def test_alone_it_equals_torchs_own(kind: Any, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Outputs, all gradients and running statistics agree over several batches, in training and in evaluation."""
    torch.manual_seed(0)
    plain = kind(3, **options).double()
    converted = copy.deepcopy(plain)
    assert synchronise(nn.Sequential(nn.Identity(), converted), BatchNormContext()) == [converted]
    assert isinstance(converted, GlobalBatchNorm)
    assert isinstance(converted, kind)
    for _ in range(3):
        x = (5 + 3 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
        y = x.detach().clone().requires_grad_()
        weights = torch.randn(*shape, dtype=torch.float64)
        (plain(x) * weights).sum().backward()
        (converted(y) * weights).sum().backward()
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(dict(converted.state_dict()), dict(plain.state_dict()), rtol=1e-12, atol=0)
    for own, other in zip(converted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(converted.eval()(x), plain.eval()(x), rtol=1e-12, atol=0)


def test_alone_nothing_is_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU would be waited for in each layer and pass; a group of one rank is the same as none."""
    monkeypatch.setattr(BatchNormContext, "gather", lambda *_: pytest.fail("statistics were exchanged"))
    for group in (None, SimpleNamespace(world_size=1)):
        model = nn.Sequential(nn.BatchNorm2d(3))
        synchronise(model, BatchNormContext(group=group))  # type: ignore[arg-type]  # of which it asks the size only
        model(torch.randn(4, 3, 2, 2)).sum().backward()


class Threads:
    """Ranks as threads: a gather or a sum ends when all ranks have added their rows."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._rows: list[Any] = [b""] * ranks

    def of(self, rank: int) -> Any:
        """Return the group of one rank."""
        return SimpleNamespace(
            gather=lambda row, _purpose: SimpleNamespace(rows=self._all(rank, row)),
            all_reduce=lambda flat: flat.copy_(sum(self._all(rank, flat.clone()))),
            wait=lambda *_: None, rank=rank, world_size=len(self._rows),
        )  # fmt: skip

    def _all(self, rank: int, row: Any) -> list[Any]:
        self._rows[rank] = row
        self._barrier.wait()
        rows = list(self._rows)
        self._barrier.wait()
        return rows


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(lambda shares: sum(shares) > 1),
    st.integers(0, 99),
    st.booleans(),
)
@settings(max_examples=times(gate=12, every=250), deadline=None)
def test_any_division_gives_the_whole_batchs_statistics_and_gradients(
    shares: list[int], seed: int, on_device: bool
) -> None:
    """Two layers on several ranks, some with empty shares, match torch's own layers on the whole batch."""
    torch.manual_seed(seed)
    make = partial(nn.BatchNorm1d, 3, affine=seed % 2 == 0, momentum=None if seed % 3 == 0 else 0.1)
    plain = nn.Sequential(make(), nn.Linear(3, 3), make()).double()
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    threads, models = Threads(len(shares)), [copy.deepcopy(plain) for _ in shares]
    x = 2 + torch.randn(sum(shares), 3, dtype=torch.float64)
    weights = torch.randn(sum(shares), 3, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    (plain(whole) * weights).sum().backward()
    parts = [part.clone().requires_grad_() for part in x.split(shares)]

    def train(rank: int) -> None:
        context = BatchNormContext(group=threads.of(rank), counts=shares[rank] > 0, on_device=on_device)
        synchronise(models[rank], context)
        if shares[rank]:
            (models[rank](parts[rank]) * weights.split(shares)[rank]).sum().backward()
        else:  # one sample that does not count, with a gradient that must not reach the other ranks
            (models[rank](x[:1].clone().requires_grad_()) * 1e9).sum().backward()

    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(train, range(len(shares))))
    assert whole.grad is not None
    torch.testing.assert_close(
        torch.cat([p.grad for p in parts if p.grad is not None]), whole.grad, rtol=1e-8, atol=1e-10
    )
    for name, value in plain.named_buffers():
        for model in models:
            torch.testing.assert_close(dict(model.named_buffers())[name], value, rtol=1e-12, atol=0)
    for index, parameter in enumerate(plain.parameters()):
        mine = [list(m.parameters())[index].grad for m, share in zip(models, shares, strict=True) if share]
        torch.testing.assert_close(sum(g for g in mine if g is not None), parameter.grad, rtol=1e-8, atol=1e-10)


def test_sums_on_the_device_equal_rows_through_the_host_bit_by_bit() -> None:
    """Both combine the same numbers in the same order; what does not count is zero for all, whatever it is."""
    x = torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def found(*, on_device: bool) -> list[Any]:
        threads, shares = Threads(3), (4, 0, 5)

        def run(rank: int) -> list[torch.Tensor]:
            context = BatchNormContext(group=threads.of(rank), counts=shares[rank] > 0, on_device=on_device)
            layer = nn.BatchNorm1d(3).double()
            synchronise(layer, context)
            own = (x.split(shares)[rank] if shares[rank] else torch.full((1, 3, 4), torch.nan)).clone().requires_grad_()
            output = layer(own)
            (output * output.detach().cos()).sum().backward()
            return [output, *([own.grad, layer.weight.grad] if shares[rank] else []), *layer.buffers()]  # type: ignore[list-item]  # there are gradients

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(run, range(3)))

    for own, other in zip(found(on_device=True), found(on_device=False), strict=True):
        assert all(torch.equal(one, same) or one.isnan().all() for one, same in zip(own, other, strict=True))


@pytest.mark.parametrize("peers", [False, True])
def test_half_inputs_are_summed_wide(peers: bool) -> None:
    """The result has the input's dtype, and so has the gradient; statistics are computed in fp32."""
    twice = SimpleNamespace(
        world_size=2, wait=lambda *_: None, gather=lambda row, _purpose: SimpleNamespace(rows=[row, row])
    )
    layer: Any = nn.BatchNorm1d(2)
    plain = copy.deepcopy(layer)
    synchronise(layer, BatchNormContext(group=twice if peers else None))  # type: ignore[arg-type]  # what it asks
    x = (100 + torch.randn(64, 2, generator=torch.Generator().manual_seed(1))).bfloat16()
    own, other = x.clone().requires_grad_(), x.float().requires_grad_()
    output = layer(own)
    output.float().pow(3).sum().backward()
    plain(other).pow(3).sum().backward()
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(layer.running_mean, 0.1 * x.float().mean(0))
    torch.testing.assert_close(own.grad.float(), other.grad, rtol=0.05, atol=0.05)


def test_a_single_value_is_refused() -> None:
    """Torch refuses it too; the message adds a remedy."""
    layer = nn.BatchNorm1d(2)
    synchronise(layer, BatchNormContext())
    with pytest.raises(UsageError, match=r"more than one value per channel.*larger global batch"):
        layer(torch.ones(1, 2))


def test_an_epoch_s_last_step_of_one_sample_is_normalised_by_the_running_statistics() -> None:
    """The script did not choose its size. The statistics stay, and gradients are those of eval mode."""
    layer = nn.BatchNorm1d(2).double()
    plain = copy.deepcopy(layer).eval()
    context = BatchNormContext()
    synchronise(layer, context)
    context.enter(None, micro_batches=1, is_short=True)
    x = torch.tensor([[3.0, -1.0]], dtype=torch.float64)
    layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(dict(layer.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad, rtol=1e-12, atol=0)
    without = nn.BatchNorm1d(2, track_running_stats=False)
    synchronise(without, context)
    assert without(x.float()).tolist() == [[0.0, 0.0]]


def test_a_part_of_a_share_is_refused_by_name() -> None:
    """Its statistics would be wrong; in eval mode none are taken."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    synchronise(model, BatchNormContext(micro_batches=2))
    with pytest.raises(UsageError, match=r"layer '1' is a BatchNorm.*GroupNorm.*eval mode"):
        model(torch.ones(4, 2))
    model[1].eval()
    assert model(torch.ones(4, 2)).shape == (4, 2)


def test_models_can_be_copied_and_kept() -> None:
    """A copy takes part in the same steps; a model from a file has no peers."""
    context = BatchNormContext()
    model = nn.Sequential(nn.BatchNorm1d(2))
    synchronise(model, context)
    assert copy.deepcopy(model)[0].heterotrain_context is context
    assert pickle.loads(pickle.dumps(model))[0].heterotrain_context.group is None  # noqa: S301  # made in this test


@pytest.mark.parametrize("layer", [nn.LazyBatchNorm1d(), nn.SyncBatchNorm(2)])
def test_other_kinds_are_refused(layer: nn.Module) -> None:
    """The message names the layer's kind."""
    with pytest.raises(UsageError, match=type(layer).__name__):
        synchronise(nn.Sequential(layer), BatchNormContext())
