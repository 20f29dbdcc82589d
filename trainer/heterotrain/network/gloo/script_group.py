"""torch's default group as a script sees it: the collectives of ``torch.distributed`` between a formation's ranks.

Each call is announced to all ranks before it starts. So ranks whose scripts differ get an error that names both calls,
and a rank that waits for another does so where the loss of a peer wakes it. The gloo group that carries the data is
made at the first call in a formation; scripts without collectives of their own have none. It is not the group of the
gradients, whose order of operations therefore does not depend on the script. Operations have ended when a call
returns, even with ``async_op=True``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from heterotrain.errors import PeerLost, UsageError
from heterotrain.network.connection_attempt import Attempt, short_message
from heterotrain.network.connection_setup import make_group
from heterotrain.network.connections import Connections
from heterotrain.network.gloo.abort import open_sockets
from heterotrain.network.gloo.bounded_wait import bounded
from heterotrain.network.mesh.exchange import Purpose

_Store: Any = getattr(dist, "Store")  # noqa: B009  # its type information lacks it

SHAPED = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "broadcast": "broadcast", "reduce": "reduce",
    "allgather": "all_gather", "allgather_coalesced": "all_gather", "all_gather_single": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor", "all_gather_single_coalesced": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor", "gather": "gather",
    "gather_single": "gather", "gather_into_tensor": "gather", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor", "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor",
}  # fmt: skip
"""Methods of a process group that need tensors of the same shape on every rank, with the names that scripts use."""
OTHERS = {
    "scatter": "scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single", "barrier": "barrier",
}  # fmt: skip
"""The other methods, likewise."""
REFUSED = {"send": "send", "recv": "recv", "recv_anysource": "recv"}
"""Messages between two ranks: ranks change with each loss, so a script cannot address a worker."""
NO_SUBGROUPS = (
    "torch.distributed.new_group is not available in a job, because such a group would not outlive the loss of a "
    "worker: use the default group"
)
NEWS_S = 2.0
"""Time until the loss of a peer shows after one of gloo's operations has failed with it; usually milliseconds."""
NOT_HERE = (
    "can be used inside `with step:` before step.apply, and in hooks such as those of job.on_epoch_end: elsewhere the "
    "loss of a worker would end the training, because nothing repeats the call"
)
CALL_BYTES = 160
"""Length of the announcement of a script's collective; a longer one is cut, the same on every rank."""


class Collectives(dist.ProcessGroup):
    """A process group in Python: every collective of torch arrives in one method."""

    def getBackendName(self) -> str:  # noqa: N802  # torch names it
        """Return the name of the backend."""
        return "heterotrain"

    def collective(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dist.Work:
        """Run one collective: a method of torch's process groups, with its arguments."""
        raise NotImplementedError


class ScriptGroup(Collectives):
    """The default group of one formation."""

    def __init__(self, carrier: ScriptCollectives, *, rank: int, world_size: int) -> None:
        """Make the group; nothing is exchanged.

        Args:
            carrier: runs the collectives; torch may keep this object longer than the formation's connections exist.
            rank: this rank in the formation.
            world_size: number of ranks.
        """
        super().__init__(rank, world_size)
        self._carrier = weakref.ref(carrier)

    @property
    def group_name(self) -> Any:
        """Name under which torch's functional collectives find the group."""
        return dist.distributed_c10d._world.pg_names[self]  # noqa: SLF001  # torch has no public way

    def collective(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dist.Work:
        """Run one collective with the connections of the formation; its work is complete.

        Raises:
            PeerLost: the formation has ended.
            UsageError: see ``ScriptCollectives.run``.
        """
        carrier = self._carrier()
        if carrier is None:
            raise PeerLost("the formation of this group has ended")

        def start(group: Any) -> dist.Work:
            work: dist.Work = getattr(group, method)(*arguments, **options)
            return work

        name = SHAPED.get(method) or OTHERS[method]
        return carrier.run(name, _details(method, (*arguments, *options.values())), start)


def carried_by(backend: Any, store: Any, *, rank: int, world_size: int) -> dist.ProcessGroup:
    """Return a process group of torch's own whose operations on any device use this gloo backend."""
    made = dist.ProcessGroup(store, rank, world_size)
    kind = dist.ProcessGroup.BackendType.GLOO
    made._set_default_backend(kind)  # noqa: SLF001  # torch has no public way
    for device in ("cpu", "cuda"):
        made._register_backend(torch.device(device), kind, backend)  # noqa: SLF001  # as above
    return made


def _details(method: str, arguments: tuple[Any, ...]) -> str:
    """Return what has to be the same on every rank: root, operation, and the input's type and shape."""
    words = []
    for argument in arguments:
        root = getattr(argument, "rootRank", None)
        operation = getattr(argument, "reduceOp", None)
        words += [] if root is None else [f"root {root}"]
        words += [] if operation is None else [str(getattr(operation, "op", operation)).rpartition(".")[2]]
    if method in SHAPED:
        # Outputs come first and exist on some ranks only; the last tensors are the input.
        tensors = [list(_tensors(argument)) for argument in arguments]
        inputs = next((found for found in reversed(tensors) if found), [])
        kinds = dict.fromkeys(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs)
        words = [*kinds, *words]
    return " ".join(words)


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)


def forwarded(name: str) -> Callable[..., dist.Work]:
    """Return a method of ``Collectives`` that hands this method of torch's process groups to ``collective``."""

    def run(self: Collectives, *arguments: Any, **options: Any) -> dist.Work:
        return self.collective(name, arguments, options)

    return run


def _refusal(name: str) -> Callable[..., dist.Work]:
    def refuse(_self: ScriptGroup, *_arguments: Any, **_options: Any) -> dist.Work:
        raise UsageError(
            f"torch.distributed.{name} is not available in a job, because ranks change when a worker is lost: "
            "use a collective, such as broadcast or all_gather"
        )

    return refuse


for _name in (*SHAPED, *OTHERS):
    if hasattr(dist.ProcessGroup, _name):
        setattr(Collectives, _name, forwarded(_name))
for _name, _called in REFUSED.items():
    setattr(ScriptGroup, _name, _refusal(_called))


class NoStore(_Store):  # type: ignore[misc]  # torch leaves it untyped
    """The store of the default group, which needs none: refuses the groups that a script tries to make from it."""

    def _refuse(self, *_arguments: Any) -> Any:
        raise UsageError(NO_SUBGROUPS)

    set = get = add = wait = check = delete_key = compare_set = append = multi_get = multi_set = _refuse


def announcement(call: str) -> bytes:
    """Return what a rank tells the others about a collective before it starts; of the same length for every call."""
    return call.encode()[:CALL_BYTES].ljust(CALL_BYTES)


def check_alike(rows: Sequence[bytes], *, rank: int, call: str) -> None:
    """Refuse a collective of the script that other ranks answer with another one.

    Args:
        rows: the announcements of all ranks, by rank.
        rank: this one.
        call: of this rank.

    Raises:
        UsageError: another rank makes another call.
    """
    for other, row in enumerate(rows):
        if row != rows[rank]:
            raise UsageError(
                f"rank {other} calls {row.decode(errors='replace').strip()} while rank {rank} calls {call}: "
                "every rank has to make the same calls, with tensors of the same shape, in the same order. "
                "step.all_gather joins tensors whose first dimension differs by rank."
            )


def breaks_soon(is_over: Callable[[], bool]) -> bool:
    """Return whether a group turns out to be cut, after one of gloo's operations has failed."""
    end_s = time.monotonic() + NEWS_S
    while not is_over() and time.monotonic() < end_s:
        time.sleep(0.005)
    return is_over()


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
                if not breaks_soon(connections.is_over):
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
