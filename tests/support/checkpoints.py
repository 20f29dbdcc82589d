"""Checkpoints that a test leaves in a folder."""

from __future__ import annotations

from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.manifest import Label, Manifest, new_mark
from heterotrain.checkpoints.part import cut, packed
from heterotrain.state.tensors import Flat


def write(folder: CheckpointFolder, state: Flat, *, step: int, generation: int = 1, now_s: float = 0.0) -> Manifest:
    """Write a state as one part."""
    label, chosen = Label(generation=generation, step=step, mark=new_mark()), cut(state, 0, 1)
    ranges = [(held.entry, own) for held, own in chosen]
    part = folder.write_part(label, ranges, packed(chosen, None), index=0, count=1)
    return folder.complete(label, state.skeleton, [part], now_s=now_s)
