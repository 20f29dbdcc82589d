"""Loaded by the server from which loader processes are forked, and nowhere else.

The server has SIGTERM and SIGINT blocked, and what is forked from it as well. A script's own processes, which Python
forks from the same server, get them back before they begin.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import util

from heterotrain.data.loader_process import STOP, LoaderProcess


class _Forked:
    """Names the function below among those that Python calls in each forked process."""


def _unblock(_forked: _Forked) -> None:
    if not isinstance(multiprocessing.current_process(), LoaderProcess):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)


_forked = _Forked()  # Python forgets the function with its last reference
util.register_after_fork(_forked, _unblock)
