"""Two sides of a connection prove that they know the job's secret; nobody else gets past the first message."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from heterotrain.network.authentication import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    Credentials,
    NotAuthenticatedError,
    Refusals,
    authenticate,
)
from support.waiting import UNLIMITED_S

SECRET = b"s" * 32
NEVER_S = time.monotonic() + UNLIMITED_S


def run(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Run ``work`` in a thread; the list gets its error."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    return thread, errors


def both(
    listener: bytes = SECRET, caller: bytes = SECRET, *, called: str = "peer a/0", meant: str = "peer a/0"
) -> tuple[list[BaseException], list[BaseException]]:
    """Return the errors of the listener and of the caller."""
    left, right = socket.socketpair()
    end_s = NEVER_S

    def side(one: socket.socket, secret: bytes, role: str, *, listens: bool) -> Callable[[], None]:
        def work() -> None:
            with one:
                authenticate(one, Credentials(secret=secret), role=role, listens=listens, end_s=end_s)

        return work

    first, listener_errors = run(side(left, listener, called, listens=True))
    second, caller_errors = run(side(right, caller, meant, listens=False))
    first.join()
    second.join()
    return listener_errors, caller_errors


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_both_sides_with_the_same_secret_agree(secret: bytes) -> None:
    """Also without a secret, as in pods of an operator that makes none."""
    assert both(secret, secret) == ([], [])


@pytest.mark.parametrize(
    "other",
    [
        {"caller": b"t" * 32}, {"caller": b""}, {"listener": b""},
        {"meant": "peer b/0"}, {"meant": "peer a/1"}, {"called": "mesh a/0"},
    ],
)  # fmt: skip
def test_another_secret_process_or_purpose_is_refused_on_both_sides(other: dict[str, Any]) -> None:
    """A pod that got a lost worker's address cannot pass the connection on to another worker."""
    listener, caller = both(**other)
    assert [type(error) for error in listener] == [NotAuthenticatedError]
    assert [type(error) for error in caller] == [ConnectionResetError]


def greeted(one: socket.socket, secret: bytes = SECRET, *, within_s: float = UNLIMITED_S) -> list[BaseException]:
    """Start a listener on one end of a pair; the list gets its error."""
    return run(
        lambda: authenticate(one, Credentials(secret=secret), role="r", listens=True, end_s=time.monotonic() + within_s)
    )[1]  # fmt: skip


def test_a_recorded_conversation_is_useless() -> None:
    """What a true caller said once is refused the next time, because the listener's nonce is new."""
    left, middle = socket.socketpair()
    stranger, right = socket.socketpair()
    greeted(left)
    _, errors = run(lambda: authenticate(right, Credentials(secret=SECRET), role="r", listens=False, end_s=NEVER_S))
    stranger.sendall(middle.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL))
    said = stranger.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
    middle.sendall(said)
    answer = middle.recv(PROOF_BYTES, socket.MSG_WAITALL)
    assert len(answer) == PROOF_BYTES

    again, there = socket.socketpair()
    thread, refused = run(
        lambda: authenticate(again, Credentials(secret=SECRET), role="r", listens=True, end_s=NEVER_S)
    )
    there.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
    there.sendall(said)
    thread.join()
    assert isinstance(refused[0], NotAuthenticatedError)
    assert errors == []
    for one in (left, middle, stranger, right, again, there):
        one.close()


def test_a_proof_sent_back_to_its_author_is_refused() -> None:
    """A stranger that answers a caller with the caller's own proof and nonce learns nothing and is no listener."""
    here, stranger = socket.socketpair()
    thread, errors = run(lambda: authenticate(here, Credentials(secret=SECRET), role="r", listens=False, end_s=NEVER_S))
    stranger.sendall(GREETING + b"\0" * NONCE_BYTES)
    said = stranger.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
    stranger.sendall(said[NONCE_BYTES:])
    thread.join()
    assert isinstance(errors[0], NotAuthenticatedError)
    here.close()
    stranger.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * (NONCE_BYTES + PROOF_BYTES - 1)])
def test_an_unfinished_proof_ends_at_the_time_limit(sent: bytes) -> None:
    """The limit is for the whole exchange: a byte now and then does not extend it."""
    here, stranger = socket.socketpair()
    stranger.sendall(sent)
    with pytest.raises(TimeoutError):
        authenticate(here, Credentials(secret=SECRET), role="r", listens=True, end_s=time.monotonic() + 0.2)
    here.close()
    stranger.close()


def test_a_listener_of_another_kind_is_refused() -> None:
    """A caller that reaches some other server says nothing to it."""
    here, server = socket.socketpair()
    server.sendall(b"220 mail.example ready\r\n" + b" " * 60)
    with pytest.raises(NotAuthenticatedError, match="not a rank of this version"):
        authenticate(here, Credentials(secret=SECRET), role="r", listens=False, end_s=NEVER_S)
    server.setblocking(False)
    with pytest.raises(ConnectionResetError):  # closed, with what it did not read
        server.recv(1)
    here.close()
    server.close()


def test_refusals_are_counted_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Ten thousand strangers make one line."""
    refusals = Refusals()
    for port in range(10_000):
        refusals.add("the peer port", ("10.0.0.1", port), "it ended without a proof")
    assert refusals.count == 10_000
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "refused a connection from ('10.0.0.1', 0) to the peer port: it ended without a proof "
        "(1 refused so far; the next 60 s are not logged)"
    )
