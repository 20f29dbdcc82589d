"""How groups of NCCL are connected, aborted and released, with stand-ins: NCCL itself needs a GPU for each rank."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.errors import PeerLost
from heterotrain.network import nccl
from heterotrain.network.abort_flag import AbortFlag
from heterotrain.network.nccl import SETTINGS, abort, join_nccl, length_s, nccl_group, release
from heterotrain.network.sums import NcclSum
from support.waiting import wait_until


class Communicator:
    """Records the calls; those named in ``hangs`` return when the test lets them."""

    def __init__(self, *hangs: str) -> None:
        self.calls: list[str] = []
        self.reached, self.let_go = threading.Event(), threading.Event()
        self._hangs = hangs

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self._hangs:
            self.reached.set()
            self.let_go.wait()

    def eager_connect_single_device(self, _device: torch.device) -> None:
        """Connect."""
        self._call("connect")

    def abort(self) -> None:
        """Abort."""
        self._call("abort")

    def shutdown(self) -> None:
        """Shut down."""
        self._call("shutdown")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let CUDA have a current device, and let nobody wait long for a communicator that hangs."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nccl, "END_S", 0.05)


def lose() -> None:
    """Behave like the check of a group that has been cut."""
    raise PeerLost("a peer is lost")


def test_a_connect_that_was_left_behind_is_aborted_when_it_returns() -> None:
    """The communicator that it made after all would keep its device memory as long as the process lives."""
    group = Communicator("connect")
    with pytest.raises(PeerLost):
        join_nccl(group, lose)
    group.reached.wait()
    assert group.calls == ["connect"]
    group.let_go.set()
    wait_until(
        lambda: group.calls == ["connect", "abort"], "it is aborted", timeout_s=60, evidence=lambda: str(group.calls)
    )


def test_a_connect_that_succeeds_is_left_alone() -> None:
    """Nothing of it is aborted."""
    group = Communicator()
    join_nccl(group, lambda: None)
    assert group.calls == ["connect"]


def test_an_abort_that_hangs_holds_nobody() -> None:
    """Neither the caller, who answers heartbeats, nor the aborts of other groups."""
    stuck, free = Communicator("abort"), Communicator()
    threads = abort([stuck, free], AbortFlag())
    stuck.reached.wait()
    threads[1].join()
    assert free.calls == ["abort"]
    assert threads[0].is_alive()
    stuck.let_go.set()
    threads[0].join()


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_released_group_is_freed_even_if_its_end_hangs(is_cut: bool) -> None:
    """The training thread goes on; the group goes when its end has come."""
    hangs = "abort" if is_cut else "shutdown"
    group: Any = Communicator(hangs)
    reached, let_go, there = group.reached, group.let_go, weakref.ref(group)
    groups = [group]
    aborts = abort(groups, AbortFlag()) if is_cut else []
    release(groups, aborts)
    reached.wait()
    assert group.calls == [hangs]
    del group
    assert there() is not None
    let_go.set()
    for thread in aborts:
        thread.join()
    aborts.clear()

    def is_gone() -> bool:
        gc.collect()
        return there() is None

    wait_until(is_gone, "it is freed", timeout_s=60)


def test_operations_of_an_aborted_group_are_waited_for_by_the_stream_only() -> None:
    """With a time-out, torch's work would abort the communicator on its own and keep the host."""

    class Work:
        def __init__(self) -> None:
            self.waits: list[tuple[Any, ...]] = []

        def wait(self, *arguments: Any) -> None:
            self.waits.append(arguments)
            raise RuntimeError("NCCL communicator was aborted")

    work: Any = Work()
    NcclSum(work).settle()
    assert work.waits == [()]


def test_torch_neither_ends_the_process_nor_delays_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables are set before the group is made, for groups of members as well; a user's own values stay."""
    seen: dict[str, str | None] = {}

    class Groups:
        class Options:
            _timeout: Any = None

        def __new__(cls, *_arguments: Any) -> Any:
            seen.update({variable: os.environ.get(variable) for variable in SETTINGS})
            return object()

    for variable in SETTINGS:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.setattr(nccl, "_c10d", type("C10d", (), {"ProcessGroupNCCL": Groups, "PrefixStore": lambda *_: None}))
    nccl_group(None, "gradients", rank=0, world_size=2)
    assert seen == SETTINGS | {"TORCH_NCCL_ENABLE_MONITORING": "1"}


def test_the_length_of_an_operation_is_known_only_where_torch_has_timed_it() -> None:
    def untimed() -> float:
        raise RuntimeError("getDuration only works if timing was enabled")

    assert length_s(SimpleNamespace(_get_duration=lambda: 1.5)) == pytest.approx(0.0015)
    assert length_s(SimpleNamespace(_get_duration=untimed)) is None
