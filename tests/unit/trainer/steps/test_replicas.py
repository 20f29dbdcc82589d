"""When copies have to have the same bits, and what is compared."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from heterotrain.identity import Identity, Mode
from heterotrain.network.group import Group
from heterotrain.numerics.method import Numerics
from heterotrain.state.comparison import Difference
from heterotrain.state.training import TrainState
from heterotrain.steps import replicas
from heterotrain.steps.replicas import Replicas
from heterotrain.telemetry.report import RankMetrics
from heterotrain_core.contract.choices import OnDivergence
from heterotrain_core.contract.config import TrainingConfig

CPU = torch.device("cpu")


class Rows:
    """A group with one other rank, which sends a fixed row, or what this rank sends."""

    def __init__(self, other: list[float] | None = None) -> None:
        self._other = other

    def gather_now(self, values: list[float]) -> list[list[float]]:
        """Return this rank's row and the other's."""
        return [values, values if self._other is None else self._other]


class Altered:
    """A group with one other rank, whose row differs from this rank's in one place."""

    def __init__(self, place: int) -> None:
        self._place = place

    def gather_now(self, values: list[float]) -> list[list[float]]:
        """Return this rank's row and the other's."""
        return [values, [value + (place == self._place) for place, value in enumerate(values)]]


def some_replicas() -> tuple[Replicas, torch.nn.Module]:
    """Return the comparison of a small model's state."""
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 3)
    training = TrainState(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    numerics = Numerics(TrainingConfig(), CPU, training)
    return Replicas(training, numerics, RankMetrics(Identity(mode=Mode.ALONE)), OnDivergence.FAIL), model


def rounded(found: Replicas, model: torch.nn.Module) -> bool:
    """Return whether one rounding leaves the fingerprint within what is tolerated."""
    found.forget()
    found.measure()
    before = found.fingerprint
    with torch.no_grad():
        model.weight[1, 1] *= 1 + 2**-23
    found.forget()
    found.measure()
    return abs(found.fingerprint - before) <= found._tolerance


def test_equal_devices_have_equal_bits() -> None:
    """One rounding is a difference."""
    found, model = some_replicas()
    found.form(cast("Group", Rows()), CPU)
    assert not rounded(found, model)


def test_another_kind_of_device_leaves_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that were ever on different kinds may differ by roundings later, too, also for a rank that came later."""
    found, model = some_replicas()
    found.form(cast("Group", Rows([1.0, 0.0, 0.0])), CPU)
    assert rounded(found, model)
    found.form(cast("Group", Rows()), CPU)
    assert rounded(found, model)
    late, model = some_replicas()
    monkeypatch.setattr(replicas, "kind_of", lambda _device: "any")
    kind = float(replicas.zlib.crc32(b"any"))
    late.form(cast("Group", Rows([kind, 1.0, 0.0])), CPU)
    assert rounded(late, model)


def test_a_fingerprint_is_sent_once() -> None:
    """A step that was not measured sends none."""
    found, _ = some_replicas()
    assert math.isnan(found.fingerprint)
    found.measure()
    assert math.isfinite(found.fingerprint)
    found.clear()
    assert math.isnan(found.fingerprint)


def test_the_kind_of_a_cpu_has_its_vector_units_and_threads() -> None:
    """Both change the bits of an update or of a norm."""
    threads = torch.get_num_threads()
    assert f"{torch.backends.cpu.get_cpu_capability()} {threads} {torch.__version__}" in replicas.kind_of(CPU)


@pytest.mark.parametrize(
    ("place", "name"), [(0, "settings of the optimizer (such as its learning rate)"), (1, "weight"), (2, "bias")]
)
def test_what_differs_is_named_and_nothing_else(place: int, name: str) -> None:
    """A rank sends a checksum of its settings, then one of each tensor."""
    found, _ = some_replicas()
    whole, difference = found._begin(), Difference(donor=0, others=(1,))
    (index,) = range(len(whole.slices))
    assert found._differing(whole, index, difference, cast("Group", Altered(place))) == [name]
