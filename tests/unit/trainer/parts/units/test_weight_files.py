"""Pretrained weights out of files: the same values whatever part of the model a rank holds, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from heterotrain.errors import UsageError
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.sharded.sharded import shard
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from heterotrain.parts.units.weight_files import PretrainedWeights
from heterotrain.state import local
from safetensors.torch import save_file

CPU = torch.device("cpu")
BLOCKS = 3


class Net(torch.nn.Module):
    """Blocks between an embedding and a head that is the embedding again; a buffer is not part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(7, 4)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(BLOCKS))
        self.norm = torch.nn.BatchNorm1d(4, affine=False)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.letters(x)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def plain() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(BLOCKS)))


def state(make: Callable[[], torch.nn.Module] = Net) -> dict[str, torch.Tensor]:
    """Return weights that no layer draws; a tied one only under the name that comes last."""
    generator = torch.Generator().manual_seed(5)
    found = {
        name: torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor + 3
        for name, tensor in make().state_dict().items()
    }
    found.pop("letters.weight", None)
    return found


def one_file(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file(dict(tensors), folder / "net.safetensors")
    return folder / "net.safetensors"


def several_files(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    names = list(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for part, chosen in parts.items():
        save_file({name: tensors[name] for name in chosen}, folder / part)
    index = {"weight_map": {name: part for part, chosen in parts.items() for name in chosen}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def pickled(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    torch.save(dict(tensors), folder / "net.pt")
    return folder / "net.pt"


@pytest.mark.parametrize("write", [one_file, several_files, pickled])
def test_a_whole_model_gets_the_values_of_the_files_in_its_own_format(tmp_path: Path, write: Any) -> None:
    tensors = state()
    model = built(lambda: Net().double())
    weights = PretrainedWeights(str(write(tmp_path, tensors)), model)
    InitialValues(seed=0, device=CPU, weights=weights).fill(units_of(model, "blocks"))
    assert model.letters.weight is model.head.weight
    for name, tensor in model.state_dict().items():
        expected = tensors[name if name != "letters.weight" else "head.weight"]
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=0, atol=0)


def test_a_rank_of_a_sharded_member_holds_its_rows_and_never_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three; a process can be in one sharded member only."""
    tensors = state(plain)
    whole = sum(tensor.numel() for tensor in tensors.values())
    model = built(plain)
    weights = PretrainedWeights(str(one_file(tmp_path, tensors)), model)
    units = units_of(model, None)
    values = InitialValues(seed=0, device=CPU, weights=weights)
    most, fill = 0, InitialValues.fill

    def watched(*arguments: Any, **options: Any) -> None:
        nonlocal most
        fill(*arguments, **options)
        most = max(most, sum(local.local(p).numel() for p in model.parameters() if not p.is_meta))

    monkeypatch.setattr(InitialValues, "fill", watched)
    shard(model, MemberGroup(rank=1, world_size=3), units.layers, device=CPU, fill=partial(values.fill_unit, units))
    for name, parameter in model.named_parameters():
        own = local.range_of(name, parameter)
        torch.testing.assert_close(
            local.local(parameter).reshape(-1), tensors[name].reshape(-1)[own.start : own.stop], rtol=0, atol=0
        )
    assert 0 < most < 0.75 * whole, "a unit, and a third of those before it"


@pytest.mark.parametrize(("stage", "units"), [(0, (0, 1)), (1, (1, 3))])
def test_a_stage_reads_its_own_units_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, units: tuple[int, int]
) -> None:
    tensors = state(plain)
    model = built(plain)
    weights = PretrainedWeights(str(one_file(tmp_path, tensors)), model)
    cuttable = CuttableModel(model, None, InitialValues(seed=0, device=CPU, weights=weights))
    cuttable.look(torch.zeros(1, 4))
    read = 0
    cat_file = LocalFileSystem.cat_file

    def counted(*arguments: Any, **options: Any) -> bytes:
        nonlocal read
        found: bytes = cat_file(*arguments, **options)
        read += len(found)
        return found

    monkeypatch.setattr(LocalFileSystem, "cat_file", counted)
    part = cuttable.stage((0, 1, 3), MemberGroup(rank=stage, world_size=2))
    cuttable.begin(part)
    found = dict(part.named_parameters())
    names = [f"{unit}.{what}" for unit in range(*units) for what in ("weight", "bias")]
    assert list(found) == names
    assert read == sum(tensors[name].nbytes for name in names)
    for name in names:
        torch.testing.assert_close(found[name].detach(), tensors[name], rtol=0, atol=0)


def without(tensors: dict[str, torch.Tensor]) -> None:
    for block in range(BLOCKS):
        del tensors[f"blocks.{block}.bias"]
    del tensors["head.weight"]


def with_others(tensors: dict[str, torch.Tensor]) -> None:
    tensors["block.0.weight"] = torch.zeros(1)


def misshapen(tensors: dict[str, torch.Tensor]) -> None:
    tensors["blocks.1.weight"] = torch.zeros(4, 5)


@pytest.mark.parametrize(
    ("change", "clause"),
    [
        (without, "they lack 'letters.weight', 'blocks.0.bias', 'blocks.1.bias' and 1 more"),
        (with_others, "the model has no 'block.0.weight'"),
        (misshapen, r"'blocks.1.weight' has the shape \[4, 5\] in place of \[4, 4\]"),
    ],
)
def test_files_that_do_not_fit_the_model_are_refused_in_one_sentence(tmp_path: Path, change: Any, clause: str) -> None:
    tensors = state()
    change(tensors)
    with pytest.raises(UsageError, match=f"net.safetensors do not fit the model: {clause}$"):
        PretrainedWeights(str(one_file(tmp_path, tensors)), built(Net))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def another_kind(path: Path) -> None:
    path.write_text("not weights")


def missing(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (cut_off, "is damaged: the file has been cut off or changed"),
        (another_kind, "is not a safetensors file"),
        (missing, "cannot be read: FileNotFoundError"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    path = one_file(tmp_path, state())
    change(path)
    with pytest.raises(UsageError, match=sentence):
        PretrainedWeights(str(path), built(Net))


def test_an_index_leads_to_files_beside_it_only(tmp_path: Path) -> None:
    several_files(tmp_path, state())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-1", "../model-1"))
    with pytest.raises(UsageError, match="which is not a file beside it"):
        PretrainedWeights(str(index), built(Net))
