"""Settings for tests whose ranks are threads of one process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from heterotrain import error_output
from heterotrain.membership import peer_service
from heterotrain.network import connection_setup, heartbeat
from heterotrain.telemetry import serving, tensorboard
from heterotrain.torchrun import peers
from support.waiting import UNLIMITED_S
from support.zygote import Zygote

LIMITS = (
    (connection_setup, "SETUP_S"), (connection_setup, "CONNECT_S"), (heartbeat, "CONNECT_S"),
    (heartbeat, "RECONNECT_S"), (peer_service, "CLOSE_S"), (peers, "_CLOSE_S"), (peers, "_QUESTION_S"),
    (error_output, "JOIN_S"), (tensorboard, "CLOSE_S"), (serving, "SIBLING_S"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the limits in real time away: a busy machine may hold up any thread for as long as it likes.

    A test of what happens after one of these limits sets the limit itself.
    """
    for module, limit in LIMITS:
        assert hasattr(module, limit), limit
        monkeypatch.setattr(module, limit, UNLIMITED_S)
    monkeypatch.setattr(heartbeat, "FROZEN_FACTOR", UNLIMITED_S)  # of a second, the services' limit in these tests


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the changes of ``init`` to the process after a test that trains in it."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("heterotrain.termination_message.TerminationMessage.install", lambda _self: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Yield the process that runs scripts in forks, with torch loaded."""
    process = Zygote()
    yield process
    process.close()
