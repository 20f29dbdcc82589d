"""The limit of a test, on the clock of patience: a pytest plugin over ``pytest-timeout``.

A timer rings after the limit in real time. If the clock of patience has gone less far, it is set again for the rest.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest
import pytest_timeout

from support import patience

SHORTEST_S = 0.1
"""The clock may nearly stand still, so a rest of no length at all would ring again at once."""


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
    """Set a timer that counts patience; leave those that cannot use signals to the plugin itself."""
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None
    end_s = patience.now_s() + settings.timeout

    def ring(_number: int, _frame: FrameType | None) -> None:
        __tracebackhide__ = True
        left_s = end_s - patience.now_s()
        if left_s <= 0:
            pytest_timeout.timeout_sigalrm(item, settings)
        else:
            signal.setitimer(signal.ITIMER_REAL, max(left_s, SHORTEST_S))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # where the plugin looks for it
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True
