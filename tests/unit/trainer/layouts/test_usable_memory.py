"""Usable memory of a CPU rank, from files like the kernel's."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from heterotrain.layouts import usable_memory
from heterotrain.layouts.usable_memory import give_back, leave_out_what_is_loaded, usable_bytes

CPU = torch.device("cpu")


def test_the_containers_limit_counts_and_is_divided_among_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usable_memory, "_own_bytes", lambda: 1000)
    limit = tmp_path / "memory.max"
    limit.write_text("100000\n")
    assert usable_bytes(CPU, ranks=1, limits=[limit]) == 42_000
    assert usable_bytes(CPU, ranks=2, limits=[tmp_path / "missing", limit]) == 20_750


@pytest.mark.parametrize("text", ["max\n", "", "9" * 30])
def test_without_a_limit_the_hosts_memory_counts(tmp_path: Path, text: str) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(text)
    assert usable_bytes(CPU, ranks=1, limits=[limit]) == pytest.approx(usable_bytes(CPU, ranks=1, limits=[]), rel=0.1)


def test_a_process_that_uses_everything_has_a_byte_left(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("4096")
    assert usable_bytes(CPU, ranks=1, limits=[limit]) == 1


class _Circle:
    """An object that only a collection ends."""

    def __init__(self) -> None:
        self.itself = self


def test_what_is_loaded_costs_later_collections_nothing_and_later_parts_are_given_back() -> None:
    before, after = _Circle(), None
    try:
        leave_out_what_is_loaded()
        assert not any(found is before for found in gc.get_objects())
        after = _Circle()
        ended = weakref.ref(after)
        del after
        give_back(CPU)
        assert ended() is None
    finally:
        gc.unfreeze()
    assert any(found is before for found in gc.get_objects())


@pytest.mark.parametrize("returned", [False, True])
def test_large_blocks_between_others_go_back_to_the_host_when_they_are_freed(returned: bool) -> None:
    """By default glibc keeps the holes: the first freed block raises the size up to which it does.

    A process of its own: the blocks of a worn heap may fall into holes, and the setting would stay for other tests.
    """
    measured = subprocess.run(
        [sys.executable, "-c", HOLES, str(returned)], capture_output=True, text=True, check=True, timeout=300
    )
    freed_blocks = int(measured.stdout) / (4 << 20)
    assert freed_blocks == pytest.approx(16 if returned else 0, abs=2)


HOLES = """
import sys
import torch
from heterotrain.layouts import usable_memory

def blocks(count):
    return [torch.ones(1 << 20) for _ in range(count)]

if sys.argv[1] == "True":
    usable_memory.return_large_blocks()
del blocks(1)[:]
held = blocks(32)
full = usable_memory._own_bytes()
del held[::2]
print(full - usable_memory._own_bytes())
"""
