"""Allows a script to exchange data with other ranks only while the loss of a worker would repeat what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from heterotrain.errors import PeerLost, UsageError
from heterotrain.network.gloo.script_group import NOT_HERE
from heterotrain.network.group import Group
from heterotrain.steps.formations import Formations


class ScriptExchanges:
    """Allows and refuses exchanges of the script."""

    def __init__(self, formations: Formations) -> None:
        self._formations = formations
        self._are_open = False

    def open(self, *, are_open: bool) -> None:
        """Allow the script to exchange data with other ranks while a loss repeats what it does; refuse it otherwise."""
        self._are_open = are_open
        active_group = self._formations.active_group
        if active_group is not None and active_group.group is not None:
            active_group.group.script.is_open = are_open

    def check_open(self) -> None:
        """Refuse a pass over a divided model where the loss of a worker would not repeat it.

        Raises:
            UsageError: this is neither inside ``with step:`` nor in a hook.
        """
        if not self._are_open:
            raise UsageError(f"a model that is divided among the ranks of a worker {NOT_HERE}")

    @contextlib.contextmanager
    def repeated_on_loss(self) -> Iterator[None]:
        """Allow exchanges in hooks, which are called again after a loss.

        Raises:
            PeerLost: instead of an error of a collective that failed with the formation.
        """
        self.open(are_open=True)
        try:
            yield
        except RuntimeError as error:
            if self._formations.is_broken:
                raise PeerLost(str(error)) from error
            raise
        finally:
            self.open(are_open=False)

    def begin(self, name: str) -> Group | None:
        """Return the connections for an exchange of the script; ``None`` for a process without peers.

        Raises:
            PeerLost: the formation is broken.
            UsageError: nothing would repeat the exchange here.
        """
        if not self._are_open:
            raise UsageError(f"{name} {NOT_HERE}")
        group = self._formations.require().group
        if group is not None:
            group.script.begin(name)
        return group
