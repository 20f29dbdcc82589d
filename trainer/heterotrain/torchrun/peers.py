"""Questions between the launchers of a job after a failure: was a worker lost, or did the script fail by itself?

A lost or leaving worker breaks the connections of all others, so their processes fail, too. Such a failure ends with
the next plan. Where every other launcher is there, no plan will come, and the script's own failure is the reason.

Both sides prove first that they belong to the job, as ranks do (``network.authentication``). Then one byte goes each
way, so there is nothing to parse.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from heterotrain_core.contract.plan import Rank

from heterotrain.errors import UsageError
from heterotrain.identity import Identity
from heterotrain.network.authentication import Credentials, authenticate, receive, seconds_left
from heterotrain.network.callers import Callers

_log = logging.getLogger(__name__)

_TELLS = 3
_MOST_QUESTIONS_AT_ONCE = 32
_QUESTION_S = 5.0
"""Limit for a caller's question once it has proved itself."""
_CLOSE_S = 2.0


class LauncherState(Enum):
    """What a launcher answers."""

    THERE = b"T"
    """It runs its processes, or waits for a plan, or one of its processes has failed."""
    LEAVING = b"L"
    """Its pod was asked to end, so that a plan without it follows."""


class Question(Enum):
    """What a launcher asks or says; either is answered by the state."""

    STATE = b"?"
    FINISHED = b"F"
    """The script has ended with exit code 0 on the caller's worker."""


class StateServer:
    """Answers the other launchers of the job, in a thread of its own.

    Args:
        identity: of this launcher; its peer port is where it listens.
        state: returns the answer.
        on_finished: called when the script has ended with exit code 0 on another worker.

    Raises:
        UsageError: the port cannot be used.
    """

    def __init__(
        self, identity: Identity, state: Callable[[], LauncherState], *, on_finished: Callable[[], None]
    ) -> None:
        self._state = state
        self._on_finished = on_finished
        role = _role(identity.worker_uid)
        self._callers = Callers(Credentials(secret=identity.secret), role=role, where="the launcher's port")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="heterotrain-launcher", daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        port = identity.peer_port
        try:
            asyncio.run_coroutine_threadsafe(self._listen(port), self._loop).result()
        except OSError as error:
            self.shutdown()
            raise UsageError(
                f"the port {port} cannot be used ({error}): stop the process that listens there"
            ) from error

    def shutdown(self) -> None:
        """Stop listening."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(timeout=_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _listen(self, port: int | None) -> None:
        self._server = await asyncio.start_server(self._serve, host=None, port=port)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not await self._callers.authenticate(reader, writer):
                return
            async with asyncio.timeout(_QUESTION_S):
                question = Question(await reader.readexactly(1))
                if question is Question.FINISHED:
                    self._on_finished()
                writer.write(self._state().value)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the caller is gone
        except ValueError as error:
            _log.warning("another launcher asked something that this version does not understand: %s", error)
        except asyncio.CancelledError:
            pass  # closing
        finally:
            writer.close()


def _role(worker_uid: str) -> str:
    """Return the role of a launcher's port, for ``network.authentication``."""
    return f"launcher {worker_uid}"


def absent(others: Sequence[Rank], secret: bytes, *, timeout_s: float) -> tuple[str, ...]:
    """Return the workers whose launcher is leaving or does not answer in time."""
    there = _asked(others, Question.STATE, secret, timeout_s)
    return tuple(rank.worker for rank, answer in zip(others, there, strict=True) if not answer)


def tell_finished(others: Sequence[Rank], secret: bytes, *, timeout_s: float) -> None:
    """Tell the other launchers that the script has ended with exit code 0 here.

    This launcher is about to end. Its silence must not look like the loss of a worker, so a busy one is told again.
    """
    left = list(others)
    for _ in range(_TELLS):
        answers = _asked(left, Question.FINISHED, secret, timeout_s)
        left = [rank for rank, answer in zip(left, answers, strict=True) if not answer]


def _asked(others: Sequence[Rank], question: Question, secret: bytes, timeout_s: float) -> list[bool]:
    """Return for each launcher whether it answers that it is there."""
    if not others:
        return []
    with ThreadPoolExecutor(max_workers=min(len(others), _MOST_QUESTIONS_AT_ONCE)) as pool:
        return list(pool.map(lambda rank: _is_there(rank, question, secret, timeout_s), others))


def _is_there(rank: Rank, question: Question, secret: bytes, timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    with (
        contextlib.suppress(OSError),
        socket.create_connection((rank.address, rank.peer_port), timeout_s) as connection,
    ):
        authenticate(connection, Credentials(secret=secret), role=_role(rank.worker_uid), listens=False, end_s=end_s)
        connection.settimeout(seconds_left(end_s))
        connection.sendall(question.value)
        return receive(connection, 1, end_s=end_s) == LauncherState.THERE.value
    return False
