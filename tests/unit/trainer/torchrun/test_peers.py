"""What launchers of a Torchrun job ask each other: only those of the job, and only of the process that is meant."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.network.authentication import REFUSALS
from heterotrain.torchrun.peers import LauncherState, StateServer, absent, tell_finished
from heterotrain_core.contract.plan import Rank
from support.ports import free_port
from support.waiting import wait_until

SECRET = b"s" * 32
LIMIT_S = 60.0


class Launcher:
    """One launcher, whose state a test sets."""

    def __init__(self) -> None:
        self.identity = Identity(
            mode=Mode.OPERATED, worker="a", worker_uid="u-a", peer_port=free_port(), secret=SECRET
        )  # fmt: skip
        self.state = LauncherState.THERE
        self.others_finished = threading.Event()
        self.server = StateServer(self.identity, lambda: self.state, on_finished=self.others_finished.set)

    @property
    def rank(self) -> Rank:
        """Its first rank, as a plan names it."""
        return Rank(
            rank=0, member=0, worker="a", worker_uid="u-a", address="127.0.0.1",
            peer_port=self.identity.peer_port or 0, on_demand=True,
        )  # fmt: skip


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """A launcher that is there."""
    made = Launcher()
    yield made
    made.server.shutdown()


def test_launchers_of_the_job_get_answers_and_are_believed(launcher: Launcher) -> None:
    assert absent([launcher.rank], SECRET, timeout_s=LIMIT_S) == ()
    assert not launcher.others_finished.is_set()
    tell_finished([launcher.rank], SECRET, timeout_s=LIMIT_S)
    assert launcher.others_finished.is_set()
    launcher.state = LauncherState.LEAVING
    assert absent([launcher.rank], SECRET, timeout_s=LIMIT_S) == ("a",)


@pytest.mark.parametrize("secret", [b"t" * 32, b""])
def test_whoever_lacks_the_secret_is_neither_answered_nor_believed(launcher: Launcher, secret: bytes) -> None:
    before = REFUSALS.count
    assert absent([launcher.rank], secret, timeout_s=LIMIT_S) == ("a",)
    tell_finished([launcher.rank], secret, timeout_s=LIMIT_S)
    wait_until(lambda: REFUSALS.count >= before + 4, "all are counted", timeout_s=LIMIT_S)
    assert not launcher.others_finished.is_set()


@pytest.mark.parametrize("sent", [b"", b"F", b"GET /launcher/finished HTTP/1.0\r\n\r\n", b"F" * 1000])
def test_garbage_is_counted_and_changes_nothing(launcher: Launcher, sent: bytes) -> None:
    before = REFUSALS.count
    with socket.create_connection(("127.0.0.1", launcher.rank.peer_port), LIMIT_S) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    wait_until(lambda: REFUSALS.count > before, "it is counted", timeout_s=LIMIT_S)
    assert not launcher.others_finished.is_set()
    assert absent([launcher.rank], SECRET, timeout_s=LIMIT_S) == ()


def test_another_worker_at_the_address_of_a_lost_one_is_not_taken_for_it(launcher: Launcher) -> None:
    lost = replace(launcher.rank, worker="b", worker_uid="u-b")
    assert absent([lost], SECRET, timeout_s=LIMIT_S) == ("b",)


def test_a_port_in_use_is_one_sentence(launcher: Launcher) -> None:
    with pytest.raises(UsageError, match=r"cannot be used .*: stop the process that listens there"):
        StateServer(launcher.identity, lambda: LauncherState.THERE, on_finished=lambda: None)
