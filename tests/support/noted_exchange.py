"""An exchange that says when a bucket leaves."""

from __future__ import annotations

from collections.abc import Callable

from heterotrain.exchange.flat.exchange import FlatExchange
from heterotrain.exchange.interface import Transfer


class NotedExchange(FlatExchange):
    """Calls ``note`` before each bucket leaves."""

    def __init__(self, note: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.note = note

    def _launch(self, transfer: Transfer) -> None:
        self.note()
        super()._launch(transfer)
