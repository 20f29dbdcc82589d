"""A script's own collectives between a formation's ranks: announced, the same on all, and repeated after a loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from heterotrain.errors import PeerLost, UsageError
from heterotrain.network.connection_attempt import Attempt, short_message
from heterotrain.network.connection_setup import make_group
from heterotrain.network.connections import Connections
from heterotrain.network.gloo.abort import open_sockets
from heterotrain.network.gloo.bounded_wait import bounded
from heterotrain.network.gloo.script_group import announcement, carried_by, check_alike
from heterotrain.network.mesh.exchange import Purpose

NEWS_S = 2.0
"""Time until the loss of a peer shows after one of gloo's operations has failed with it; usually milliseconds."""
NOT_HERE = (
    "can be used inside `with step:` before step.apply, and in hooks such as those of job.on_epoch_end: elsewhere the "
    "loss of a worker would end the training, because nothing repeats the call"
)


class ScriptCollectives:
    """Runs a script's collectives over connections of their own, made at the first one.

    Attributes:
        is_open: whether the script may exchange data now, because the loss of a peer would repeat what it does.
        started: number of exchanges that the script has started in this formation.
    """

    def __init__(self, connections: Connections) -> None:
        """Make nothing yet; ``connections`` are those of the formation."""
        self.is_open = False
        self.started = 0
        self._connections = connections
        self._group: Any = None

    def begin(self, name: str) -> None:
        """Note that the script is about to exchange data with the other ranks.

        Raises:
            PeerLost: the group is broken.
            UsageError: nothing would repeat the exchange here if a peer was lost.
        """
        if not self.is_open:
            raise UsageError(f"{name} {NOT_HERE}")
        self._connections.check()
        self.started += 1

    def run(self, name: str, details: str, start: Callable[[Any], dist.Work]) -> dist.Work:
        """Run one collective of the script on all ranks and return its work, which is complete.

        Args:
            name: function of ``torch.distributed``.
            details: what has to be the same on every rank, such as shapes.
            start: starts it in a process group.

        Raises:
            PeerLost: the group is broken; the step or hook is repeated.
            UsageError: nothing would repeat the call here, or another rank calls something else.
        """
        connections = self._connections
        call = f"torch.distributed.{name}" + (f" ({details})" if details else "")
        self.begin(f"torch.distributed.{name}")
        gathering = connections.gather(announcement(call), Purpose.SCRIPT)
        connections.wait(gathering, call)
        check_alike(gathering.rows, rank=connections.rank, call=call)
        group = self._require_group()
        with connections.named_wait(call):
            try:
                work = start(group)
                bounded(name, work, is_over=connections.is_over, belongs_to=group).wait()
            except RuntimeError as error:
                if not self._breaks_soon():
                    raise  # the script's own mistake
                raise PeerLost(connections.why_cut or short_message(error)) from error
        return work

    def close(self) -> None:
        """Drop the connections."""
        self._group = None

    def _require_group(self) -> Any:
        """Return the gloo group of the script's collectives; every rank makes it at the same call."""
        if self._group is None:
            connections = self._connections
            rank, world_size = connections.rank, connections.world_size
            store, before = connections.store, open_sockets()
            make = make_group("gloo", connections.gloo_address)
            attempt = Attempt(lambda: make(store, "script", rank=rank, world_size=world_size))
            self._group = carried_by(attempt.result(connections.check), store, rank=rank, world_size=world_size)
            connections.own_sockets(before)
            connections.check()
        return self._group

    def _breaks_soon(self) -> bool:
        """Return whether the group turns out to be broken, after one of gloo's operations has failed."""
        end_s = self._connections.clock() + NEWS_S
        while not self._connections.is_over() and self._connections.clock() < end_s:
            time.sleep(0.005)
        return self._connections.is_cut
