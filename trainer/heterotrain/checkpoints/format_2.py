"""Checkpoints of format 2, which earlier versions wrote: all tensors as one sequence of bytes, cut into equal parts."""

from __future__ import annotations

from heterotrain.state.parts import cut, memory_of
from heterotrain.state.tensors import Flat, entries_of


def read_plan(flat: Flat, parts: int) -> list[list[tuple[int, memoryview]]]:
    """Return the memory to fill from each part, with the place of its first byte in the part's file, in order.

    Args:
        flat: what is to be read: all or some of the tensors, each whole.
        parts: number of parts.
    """
    entries = entries_of(flat.skeleton)
    plan = []
    for ranges in cut([entry.size_bytes for entry in entries], parts):
        wanted, at = [], 0
        for each in ranges:
            held = flat.by_name.get(entries[each.tensor].name)
            if held is not None:
                wanted.append((at, memory_of(held.values)[each.start : each.stop]))
            at += each.stop - each.start
        plan.append(wanted)
    return plan
