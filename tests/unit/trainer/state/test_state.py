"""State is taken apart and put together again without running foreign code."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.state.fingerprint import settings_checksum
from heterotrain.state.memory import byte_view, pack, sizes_bytes
from heterotrain.state.tensors import Flat, empty, flatten, unflatten
from heterotrain.state.training import TrainState
from heterotrain.state.transfer import StateSummary, assign_roles


def test_round_trip() -> None:
    """Nested containers, tensors of several kinds and plain values are restored unchanged."""
    state = {
        "a": {1: torch.arange(3), "b": [torch.ones(2, 2, dtype=torch.float64), (True, None, 2.5)]},
        "empty": torch.empty(0),
        "scalar": torch.tensor(7, dtype=torch.int16),
        "text": "x",
        "bytes": [b"y", b""],
    }
    back = unflatten(flatten(state))
    assert str(back) == str(state)
    assert back["a"]["b"][0].dtype == torch.float64


def test_numbers_of_other_libraries_become_plain() -> None:
    """A numpy float in an optimizer's settings is read back as a number."""
    back = unflatten(flatten({"lr": np.float64(0.5), "version": torch.__version__}))
    assert back == {"lr": 0.5, "version": str(torch.__version__)}
    assert type(back["lr"]) is float


def test_an_empty_copy_has_the_same_shapes() -> None:
    """A receiver can allocate from the skeleton alone."""
    flat = flatten({"x": [torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)]})
    found = empty(flat.skeleton).tensors
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in flat.tensors]


def test_other_objects_are_refused_by_name() -> None:
    """The message names the path of the object."""
    with pytest.raises(UsageError, match=r"state\.extras\.mine holds a set"):
        flatten({"extras": {"mine": {1, 2}}})


def test_optimizer_and_order_of_state_survive() -> None:
    """After a restore, the next update is bit-identical."""

    def made() -> TrainState:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        return TrainState(model=model, optimizers=[torch.optim.Adam(model.parameters(), lr=0.1)])

    def update(training: TrainState, seed: int) -> OrderedDict[str, Any]:
        assert training.model is not None
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        training.optimizers[0].zero_grad()
        training.model(x).square().mean().backward()
        training.optimizers[0].step()
        return OrderedDict((k, v.clone()) for k, v in training.model.state_dict().items())

    one, other = made(), made()
    update(one, 1)
    live = one.flat()
    other.restore_flat(Flat(live.skeleton, [replace(held, values=held.values.clone()) for held in live.held]))
    torch.testing.assert_close(update(other, 2), update(one, 2), rtol=0, atol=0)


def test_packed_tensors_are_the_state() -> None:
    """For any dtype, layout and shape, bit for bit; memory of the right length is used again."""
    tensors = [
        torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).t(),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.int64),
    ]
    length = sum(sizes_bytes(tensors))
    packed = pack(tensors, length, None, pin=False)
    assert packed.numpy().tobytes() == b"".join(byte_view(tensor).numpy().tobytes() for tensor in tensors)
    assert pack(tensors, length, packed, pin=False) is packed
    assert pack(tensors[1:], length - 60, packed, pin=False).numel() == length - 60


@pytest.mark.parametrize(
    ("summaries", "leader", "donors", "receivers", "cold_start"),
    [
        ([(-1, -1, -1, -1)] * 3, 0, (0,), (1, 2), True),
        ([(-1, -1, 1, 5), (-1, -1, 1, 9), (-1, -1, 2, 3)], 2, (2,), (0, 1), True),
        ([(-1, -1, 9, 9), (7, 1, -1, -1), (7, 1, -1, -1)], 1, (1, 2), (0,), False),
        ([(6, 1, -1, -1), (7, 1, -1, -1), (6, 1, -1, -1)], 1, (1,), (0, 2), False),
        ([(7, 0, -1, -1), (7, 1, -1, -1), (7, 1, -1, -1)], 1, (1, 2), (0,), False),
    ],
    ids=["all new", "best checkpoint", "a joiner", "one committed", "one ran its hooks"],
)
def test_donors_and_receivers(
    summaries: list[tuple[int, int, int, int]],
    leader: int,
    donors: tuple[int, ...],
    receivers: tuple[int, ...],
    cold_start: bool,
) -> None:
    """The newest state wins, which its hooks may have changed; then the best checkpoint, then the lowest rank."""
    roles = assign_roles(
        [StateSummary(steps=a, evaluated=b, checkpoint_generation=c, checkpoint_step=d) for a, b, c, d in summaries]
    )
    assert (roles.leader, roles.donors, roles.receivers, roles.cold_start) == (leader, donors, receivers, cold_start)


def training_of(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> TrainState:
    """Return a script's state."""
    return TrainState(model=model, optimizers=list(optimizers))


def test_a_state_of_another_script_is_refused() -> None:
    """Another model, kind of optimizer, grouping or registered object: each is reported, and no state is restored."""
    model = torch.nn.Linear(2, 1)
    kept = training_of(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)).capture()
    wide, parts = torch.nn.Linear(3, 1), [{"params": [p]} for p in model.parameters()]
    registered = training_of(model, torch.optim.SGD(model.parameters()))
    registered.extras["mine"] = torch.optim.lr_scheduler.ConstantLR(registered.optimizers[0])
    others = {
        r"another model \(size mismatch for weight": training_of(wide, torch.optim.SGD(wide.parameters())),
        "has SGD, and this script has AdamW": training_of(model, torch.optim.AdamW(model.parameters())),
        "groups parameters of SGD differently": training_of(model, torch.optim.SGD(parts)),
        r"registered objects \(mine\)": registered,
    }
    for message, other in others.items():
        with pytest.raises(UsageError, match=f"{message}.*the same script") as caught:
            other.restore(kept)
        assert "\n" not in str(caught.value)
        assert not other.has_state
    with pytest.raises(UsageError, match="lacks order, kinds, because an older version wrote it"):
        TrainState(model=model).restore({key: value for key, value in kept.items() if key not in ("order", "kinds")})


def a_thawing_script(*, thawed: bool) -> TrainState:
    """Return a script's state before or after it has thawed a layer with a parameter group of its own."""
    torch.manual_seed(int(thawed))
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].requires_grad_(requires_grad=thawed)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    if thawed:
        old = model[1]
        model[1] = torch.nn.Linear(3, 1)
        optimizer.add_param_group({"params": [*model[0].parameters(), *model[1].parameters()], "lr": 0.01})
        model(torch.ones(4, 2)).sum().backward()
        old(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    return training_of(model, optimizer)


def test_a_state_brings_its_parameter_groups_and_frozen_parameters() -> None:
    """A rank that joins has neither the groups that the script added nor the layers that it thawed."""
    trained, joins = a_thawing_script(thawed=True), a_thawing_script(thawed=False)
    told: list[int] = []
    joins.on_restore.append(told.append)
    trained.progress = replace(trained.progress, evaluated=2)
    joins.restore_flat(trained.flat())
    assert told == [2]
    assert joins.model is not None
    assert all(parameter.requires_grad for parameter in joins.model.parameters())
    assert [len(group["params"]) for group in joins.optimizers[0].param_groups] == [0, 4]
    assert joins.optimizers[0].param_groups[1]["lr"] == 0.01
    again, wanted = joins.flat(), trained.flat()
    assert again.skeleton == wanted.skeleton, "either can send the state to a third rank"
    assert all(torch.equal(a, b) for a, b in zip(again.tensors, wanted.tensors, strict=True))
    back = a_thawing_script(thawed=True)
    with pytest.raises(UsageError, match="groups parameters of AdamW differently"):
        back.restore_flat(a_thawing_script(thawed=False).flat())


@pytest.mark.parametrize("fused", [True, None])
def test_a_rank_keeps_its_own_kernels(fused: bool | None) -> None:
    """A rank on a GPU takes over the state of one on a CPU, and the other way round; other settings are compared."""
    giver, taker = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    of_giver = torch.optim.AdamW(giver.parameters(), lr=0.1, fused=None if fused else True)
    of_taker = torch.optim.AdamW(taker.parameters(), lr=0.2, fused=fused)
    giver(torch.ones(1, 2)).sum().backward()
    of_giver.step()
    training = training_of(taker, of_taker)
    training.restore(training_of(giver, of_giver).capture())
    assert (of_taker.param_groups[0]["fused"], of_taker.param_groups[0]["lr"]) == (fused, 0.1)
    assert settings_checksum([of_taker]) == settings_checksum([of_giver])
    for model, optimizer in ((giver, of_giver), (taker, of_taker)):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(taker.weight, giver.weight)
