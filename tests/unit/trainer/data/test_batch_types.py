"""Batches keep their type on the way to a device; the meta device stands for a GPU."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from heterotrain.data.batches import emptied, to_device

META = torch.device("meta")


class Encoding(UserDict[str, Any]):
    """With a method ``to`` that takes a device only."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Graph:
    """Neither a mapping nor a sequence."""

    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Graph:
        assert non_blocking
        self.x = self.x.to(device)
        return self


@dataclass(frozen=True)
class Pair:
    """As a batch."""

    x: torch.Tensor
    names: tuple[str, ...]


class Named(NamedTuple):
    """As a batch."""

    x: torch.Tensor


class Mine(dict[str, Any]):
    """A dictionary with a type of its own."""


def test_objects_move_themselves() -> None:
    encoding = to_device(Encoding(x=torch.ones(2)), META)
    assert (type(encoding), encoding["x"].device) == (Encoding, META)
    assert to_device([Graph()], META)[0].x.device == META
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    moved = to_device({"p": packed}, META)["p"]
    assert (moved.data.device, moved.batch_sizes.device.type) == (META, "cpu")


@pytest.mark.parametrize("batch", [Pair(torch.ones(2), ("a",)), Named(torch.ones(2)), Mine(x=torch.ones(2))])
def test_containers_keep_their_type(batch: Any) -> None:
    moved, empty = to_device(batch, META), emptied(batch)
    x = moved["x"] if isinstance(moved, dict) else moved.x
    assert (type(moved), type(empty), x.device) == (type(batch), type(batch), META)
    assert len(empty["x"] if isinstance(empty, dict) else empty.x) == 0
    assert (batch["x"] if isinstance(batch, dict) else batch.x).device.type == "cpu"
