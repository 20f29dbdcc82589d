"""Usable memory of a CPU rank, from files like the kernel's."""

from __future__ import annotations

import ctypes
import gc
import weakref
from pathlib import Path

import pytest
import torch
from heterotrain.parts import memory as usable_memory
from heterotrain.parts.memory import give_back, leave_out_what_is_loaded, usable_bytes
from support.zygote import Zygote

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


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not count its blocks")
@pytest.mark.parametrize("returned", [False, True])
def test_large_blocks_between_others_go_back_to_the_host_when_they_are_freed(
    zygote: Zygote, tmp_path: Path, returned: bool
) -> None:
    """By default glibc keeps the holes: the first freed block raises the size up to which it does.

    In a process of its own, because the setting would stay for other tests.
    """
    script = tmp_path / "holes.py"
    script.write_text(HOLES)
    done = zygote.run(tmp_path, str(script), str(returned))
    assert done.code == 0, done.text
    assert [int(count) for count in done.stdout.split()] == ([32, 16] if returned else [0, 0])


HOLES = """
import ctypes, sys
import torch
from heterotrain.parts import memory as usable_memory

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info

def own_pages():
    return mallinfo2().hblks  # blocks that glibc gave pages of their own, which go back to the host

def blocks(count):
    return [torch.ones(1 << 20) for _ in range(count)]

if sys.argv[1] == "True":
    usable_memory.return_large_blocks()
del blocks(1)[:]
before = own_pages()
held = blocks(32)
full = own_pages()
del held[::2]
print(full - before, full - own_pages())
"""
