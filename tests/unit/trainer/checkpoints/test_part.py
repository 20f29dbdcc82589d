"""Parts are safetensors files: written under any layout, and read under any other and by one process."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manifest import Label
from heterotrain.checkpoints.part import ROWS, Chosen, cut, packed, size_bytes, writers
from heterotrain.checkpoints.restore import restore_newest
from heterotrain.checkpoints.writer import CheckpointWriter, WriteRequest, WriteResult
from heterotrain.state.ranges import Holding, TensorRange
from heterotrain.state.tensors import Entry, flatten
from heterotrain.state.training import TrainState
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from support.divided_models import assert_state_is, full, layouts_of, training_of
from support.repeat import times
from support.waiting import UNLIMITED_S

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
]  # fmt: skip


def of_each_dtype() -> dict[str, Any]:
    """Return tensors of every format, with several shapes and layouts in memory."""
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        whole = torch.randint(0, 2**7, (5, 3), generator=generator).to(dtype)
        state[str(dtype)] = {"flat": whole.reshape(-1), "turned": whole.t(), "one": whole[0, 0], "none": whole[:0]}
    return state


def ranges_of(chosen: Chosen) -> list[tuple[Entry, TensorRange]]:
    """Return what a part contains."""
    return [(held.entry, own) for held, own in chosen]


def written(folder: CheckpointFolder, state: dict[str, Any], *, count: int, step: int = 4) -> None:
    """Write a state as ``count`` parts."""
    flat, label = flatten(state), Label(generation=1, step=step, mark=9)
    for index in range(count):
        part = cut(flat, index, count)
        folder.write_part(label, ranges_of(part), packed(part, None), index=index, count=count)
    parts = folder.parts_there(label, count) if count > 1 else None
    if parts is None:
        part = cut(flat, 0, 1)
        parts = [folder.write_part(label, ranges_of(part), packed(part, None), index=0, count=1)]
    folder.complete(label, flat.skeleton, parts, now_s=0.0)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_format_survives_in_any_number_of_parts(tmp_path: Path, count: int) -> None:
    """Bit by bit; the package of the format reads each file, and its metadata say which rows a tensor is."""
    folder, state = CheckpointFolder(tmp_path, max_to_keep=1), of_each_dtype()
    written(folder, state, count=count)
    found = folder.load_newest()
    assert found is not None
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            back = found[1][name][key]
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
            assert (
                back.contiguous().reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))
            )
    collected: dict[str, int] = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            rows = json.loads(file.metadata()[ROWS])
        for key, tensor in load_file(path).items():
            about = rows.get(key)
            name = key if about is None else about["of"]
            group, _, kind = name.rpartition(".")
            whole = state[group][kind].contiguous().reshape(-1)
            own_part = whole if about is None else whole[about["start"] : about["stop"]]
            assert tensor.reshape(-1).view(torch.uint8).equal(own_part.view(torch.uint8))
            collected[name] = collected.get(name, 0) + own_part.numel()
    assert collected == {f"{name}.{key}": t.numel() for name, tensors in state.items() for key, t in tensors.items()}


@given(rows=st.lists(st.integers(0, 40), min_size=1, max_size=8), parts=st.integers(1, 6))
def test_parts_are_cut_evenly_between_rows(rows: list[int], parts: int) -> None:
    """Every element is in one part; lengths differ by at most two rows."""
    flat = flatten({str(i): torch.zeros(count, 3) for i, count in enumerate(rows)})
    chosen = [cut(flat, index, parts) for index in range(parts)]
    sizes = [size_bytes(part) for part in chosen]
    assert sum(sizes) == sum(rows) * 12
    assert max(sizes) - min(sizes) <= 2 * 12
    for held in flat.held:
        parts_of_it = [own for part in chosen for other, own in part if other is held and own.elements]
        edges = [0, *(own.stop for own in parts_of_it)]
        assert [own.start for own in parts_of_it] == edges[:-1]
        assert edges[-1] == held.entry.elements
        assert all(edge % 3 == 0 for edge in edges)


@pytest.mark.parametrize("seed", range(times(gate=6, every=150)))
def test_written_under_one_layout_and_read_under_another(tmp_path: Path, seed: int) -> None:
    """Ranks write their own parts; ranks of other layouts, and one process with everything, read the same state."""
    rng = np.random.default_rng(seed)
    before = layouts_of(rng, int(rng.integers(1, 5)))
    holdings: list[Holding | None] = [None if holding == full() else holding for holding in before]
    done: list[WriteResult] = []
    label = Label(generation=1, step=3, mark=5)
    for rank in reversed(range(len(before))):
        training = training_of(before[rank], seed=seed, steps=3)
        holdings[rank] = training.needs
    for rank in reversed(range(len(before))):
        training = training_of(before[rank], seed=seed, steps=3)
        writer = CheckpointWriter(CheckpointFolder(tmp_path, max_to_keep=1), on_done=done.append)
        request = WriteRequest(
            label=label, index=rank, count=len(before), completes=rank == 0, holdings=tuple(holdings)
        )  # fmt: skip
        writer.start(training.capture(), request)
        assert writer.wait(UNLIMITED_S)
    assert done[-1].manifest is not None, done[-1].failure
    expected = training_of(full(), seed=seed, steps=3)
    wanted = {held.entry.name: held.entry.elements for held in expected.flat().held}
    stored: dict[str, int] = {}
    for own in (own for part in done[-1].manifest.parts for own in part.places):
        stored[own.name] = stored.get(own.name, 0) + own.elements
    assert stored == wanted, "each element once"
    for holding in [*layouts_of(rng, 3), full()]:
        training = training_of(holding, seed=seed + 50)
        restored = restore_newest(CheckpointFolder(tmp_path, max_to_keep=1), training)
        assert restored is not None
        assert restored.step == 3
        assert_state_is(training, expected)


def test_ranks_write_equal_amounts() -> None:
    """One rank with everything and three with a third each: the one writes a quarter, and so do the others."""
    rows = 12
    thirds = [{"w": TensorRange("w", rows * i, rows * (i + 1))} for i in range(3)]
    holdings: list[Holding | None] = [None, *thirds]
    writes = writers(holdings, {"w": (3 * rows, 1)})
    assert [sum(own.elements for own in writes(rank, "w")) for rank in range(4)] == [9, 9, 9, 9]
    found = sorted(own for rank in range(4) for own in writes(rank, "w"))
    assert [own.start for own in found] == [0, *(own.stop for own in found[:-1])]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_parts_of_one_checkpoint(tmp_path: Path) -> None:
    """Torch's distributed checkpoints find tensors that are cut over several parts, and load them by name."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 7), torch.nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 30)).sum().backward()
    optimizer.step()
    state = TrainState(model=model, optimizers=[optimizer]).capture()
    written(CheckpointFolder(tmp_path, max_to_keep=1), state, count=3)
    expected = {held.entry.name: held.values for held in flatten(state).held}
    found = {name: torch.full_like(values, -1) for name, values in expected.items()}
    torchs: Any = import_module("torch.distributed.checkpoint")  # takes seconds to load
    torchs.load(found, storage_reader=torchs.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
