"""Loader processes: quick to start, and gone when their rank is gone, not before.

SIGTERM and SIGINT are for the rank, which still needs its loaders until its step ends. Shells, ``timeout`` and batch
systems send them to all processes of a group. So the server from which loaders are forked starts with both blocked, and
loaders ignore them; a rank ends its loaders by SIGKILL.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import popen_forkserver, resource_tracker
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

import torch
from torch.utils.data import get_worker_info

from heterotrain.data.shared_copy import SharedCopy
from heterotrain.errors import UsageError

PRELOADED = ("torch", "heterotrain.session", "heterotrain.data.prefetch", "heterotrain.data.loader_server")
"""Imported once, by the server from which all loader processes of a rank are forked, instead of once in each."""
STOP = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a rank."""
WorkerInit = Callable[[int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The loader processes of one rank.

    Attributes:
        count: number of processes; 0 loads samples in the training process.
        prefetch_factor: micro-batches that each process has loaded or is loading, at least 1.
        init_fn: called in each process with its number, before its first sample; ``None`` for no call.
    """

    count: int = 0
    prefetch_factor: int = 2
    init_fn: WorkerInit | None = None


class ProcessInit:
    """What each loader process does before its first sample."""

    def __init__(self, script: WorkerInit | None, shared: SharedCopy, *, is_source: bool) -> None:
        """``script`` is the script's own function, which expects its data set in the worker's info.

        ``shared`` is the data set, or with ``is_source`` the source that has it.
        """
        self._script = script
        self._shared = shared
        self._is_source = is_source

    def __call__(self, worker: int) -> None:
        """Prepare the process with this number."""
        torch.set_num_threads(1)
        for number in STOP:  # a handler: programs that the data set starts would inherit SIG_IGN
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        threading.Thread(target=_end_with_rank, name="heterotrain-end-with-rank", daemon=True).start()
        if self._script is not None:
            info = get_worker_info()
            if info is not None:  # torch put the loader's own data set there and made the object constant
                whole = self._shared.load()
                object.__setattr__(info, "dataset", whole.dataset if self._is_source else whole)
            self._script(worker)


class _Popen(popen_forkserver.Popen):
    """Starts a process from a server that no signal to the group ends."""

    def _launch(self, process_obj: Any) -> None:
        resource_tracker.ensure_running()  # it unblocks both signals, so not inside
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # the server inherits it, if this is its first process
        try:
            super()._launch(process_obj)  # type: ignore[misc]  # typeshed leaves it out
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def terminate(self) -> None:
        """End the process, which ignores SIGTERM."""
        self.kill()


class LoaderProcess(ForkServerProcess):
    """A process that ends with its rank only."""

    _Popen = staticmethod(_Popen)


class _LoaderContext(ForkServerContext):
    Process = LoaderProcess


def loader_context(*things: Any) -> BaseContext:
    """Return the context that starts loader processes; installed libraries that define ``things`` are loaded once."""
    context = _LoaderContext()
    modules = {getattr(thing, "__module__", None) or type(thing).__module__ for thing in things if thing is not None}
    modules |= {type(thing).__module__ for thing in things if thing is not None}
    context.set_forkserver_preload([*PRELOADED, *sorted(filter(_is_installed, modules - set(PRELOADED)))])
    return context


def sendable(whole: Any, *, collate: Any, init_fn: Any) -> SharedCopy:
    """Return what all loader processes get, as one copy.

    Args:
        whole: the data set, or what contains data set and ``collate``.
        collate: makes batches; ``None`` for none.
        init_fn: what each process calls first, which it gets by itself.

    Raises:
        UsageError: something cannot be sent; the message names it.
    """
    what = "collate"
    try:
        pickle.dumps(collate)
        what = "worker_init_fn"
        pickle.dumps(init_fn)
        what = "the data set"
        return SharedCopy(whole)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{what} cannot be sent to loader processes ({error}): define it at the top level of a module, neither "
            "as a lambda nor inside a function, or use workers=0"
        ) from error


@contextmanager
def starting() -> Iterator[None]:
    """Explain the end of a loader process that could not even start.

    Raises:
        UsageError: a process ended while it started.
    """
    try:
        yield
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):  # the words of torch's loader
            raise
        raise UsageError(
            f"a loader process ended while it started ({str(error).splitlines()[0]}): its own message is above. If "
            "there is none, it was killed, for example for lack of memory"
        ) from error


def _is_installed(module: str) -> bool:
    """Return whether a module comes from an installed library; scripts' own modules may have other names there."""
    path = getattr(sys.modules.get(module), "__file__", None) or ""
    return module != "__main__" and path.startswith(
        tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
    )


def _end_with_rank() -> None:
    """Wait for the end of the rank, however it ends, and end this process.

    torch's own watchdog looks at the parent process, which is the fork server here. The server, in turn, lives as long
    as its children.
    """
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)
