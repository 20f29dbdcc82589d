"""Garbage collection in short pieces: what lives long is left out, and garbage is found all the same."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from contextlib import suppress

import pytest
from heterotrain_operator.engine.responsiveness import SWITCH_S, THRESHOLDS, collect_all, collect_new, keep_responsive


class Node:
    """An object that can be part of a cycle."""

    other: Node


def a_cycle() -> weakref.ref[Node]:
    """Return a reference to garbage that only a collection frees."""
    node = Node()
    node.other = node
    return weakref.ref(node)


@pytest.fixture(autouse=True)
def restored() -> None:
    """Begin without objects that are left out."""
    gc.unfreeze()


def test_what_survived_is_left_out_of_the_next_collection() -> None:
    kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]  # the lists stay empty
    collect_new()
    assert gc.get_freeze_count() > len(kept)
    assert len(gc.get_objects()) < len(kept), "little is visited the next time"
    gc.unfreeze()


def test_new_garbage_is_freed_at_once_and_old_garbage_by_a_collection_of_everything() -> None:
    new = a_cycle()
    collect_new()
    assert new() is None
    node = Node()
    old = weakref.ref(node)
    collect_new()  # it lives, so it is left out
    node.other = node
    del node
    collect_new()
    assert old() is not None, "this is the price"
    collect_all()
    assert old() is None
    gc.unfreeze()


async def test_settings_of_the_interpreter_are_restored() -> None:
    before = sys.getswitchinterval(), gc.get_threshold()
    task = asyncio.create_task(keep_responsive())
    await asyncio.sleep(0)
    assert (sys.getswitchinterval(), gc.get_threshold()) == (pytest.approx(SWITCH_S), THRESHOLDS)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert (sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()) == (*before, 0)
