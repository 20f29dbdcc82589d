"""Ranks of sharded members with plain torch.distributed: no job, no plan, no formation."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.sharded.sharded import REDUCE_SCATTER, forget_pass, shard
from heterotrain.parts.units.wrappers import WrapOptions
from heterotrain.state import local
from heterotrain.state.ranges import TensorRange, pieces_of

FEATURES = 6
LIMIT = timedelta(seconds=120)


class Block(torch.nn.Module):
    """A residual block with dropout-free layers, a buffer, and a number without a dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width + 3)
        self.outer = torch.nn.Linear(width + 3, width)
        self.scale = torch.nn.Parameter(torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.scale * self.outer(torch.tanh(self.inner(x)))


class Net(torch.nn.Module):
    """A model with blocks, tied weights between two of them if asked for, and one frozen layer if asked for."""

    def __init__(self, *, width: int, blocks: int, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = torch.nn.Linear(width, 1)
        if tied:
            self.blocks[-1].inner.weight = self.blocks[0].inner.weight
        if frozen:
            self.blocks[1].outer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class CountingGroup(MemberGroup):
    """Counts how often gradients are added up over the member."""

    reductions = 0

    def collective(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> dist.Work:
        """Run one collective."""
        self.reductions += method == REDUCE_SCATTER
        return super().collective(method, arguments, options)


def net(spec: dict[str, Any]) -> Net:
    """Return the model of a case in fp64, the same on every rank."""
    torch.manual_seed(1)
    return Net(**spec).double()


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return x, x.square().sum(1, keepdim=True)


def steps(
    *, out: str, port: int, rank: int, members: list[int], cuts: list[list[list[int]]], model: dict[str, Any],
    options: dict[str, Any], interrupt: dict[str, Any] | None = None, backward: int = 3,
) -> None:  # fmt: skip
    """Take steps of Adam with sharded members, and write errors against one process.

    Args:
        out: folder for the result.
        port: of the store, which rank 0 hosts.
        rank: among all ranks.
        members: ranks of each member.
        cuts: by rank and micro-batch: the pieces of the batch; the same number of micro-batches within a member.
        model: of ``Net``.
        options: of ``job.wrap``.
        interrupt: ``{"rank", "operation"}``: this rank leaves the first attempt before that operation of its member.
        backward: number of steps.
    """
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, timeout=LIMIT, wait_for_workers=False)
    firsts = [sum(members[:index]) for index in range(len(members))]
    member = max(index for index, first in enumerate(firsts) if first <= rank)
    group = CountingGroup(rank=rank - firsts[member], world_size=members[member])
    connections = 0

    def connect() -> None:
        nonlocal connections
        connections += 1
        if group.size() > 1:
            group.connect(store, f"member-{member}-{connections}", check=lambda: None)

    connect()
    sharded = net(model)
    shard(sharded, group, list(sharded.blocks), device=torch.device("cpu"), options=WrapOptions(**options))
    named = dict(sharded.named_parameters())
    exchange = _Exchange(store, rank, sum(members), named)
    arrived: list[str] = []
    for name, parameter in named.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)
    alone = net(model)
    reference = torch.optim.Adam(alone.parameters(), lr=0.01)
    whole = sum(stop - start for own in cuts for start, stop in own)
    x, y = batch(whole)
    if interrupt is not None:
        _interrupted(sharded, group, x, y, cuts[rank], mine=interrupt["rank"] == rank, at=interrupt["operation"])
        forget_pass(sharded)
        connect()
    errors = []
    for _ in range(backward):
        arrived.clear()
        optimizer.zero_grad()
        for pieces in cuts[rank]:
            _backward(sharded, x, y, pieces, whole)
        assert sorted(set(arrived)) == sorted(name for name, p in named.items() if p.requires_grad), arrived
        exchange.run()
        reference.zero_grad()
        (((alone(x) - y) ** 2).sum() / whole).backward()
        expected = dict(alone.named_parameters())
        errors += [
            _error(local.gradient(p), expected[name].grad, local.range_of(name, p))
            for name, p in named.items()
            if p.requires_grad
        ]
        optimizer.step()
        reference.step()
        errors += [_error(local.local(p), expected[name], local.range_of(name, p)) for name, p in named.items()]
    for name, parameter in named.items():  # the optimizer's state has the same extents
        for what, value in optimizer.state.get(parameter, {}).items():
            expected_value = reference.state[dict(alone.named_parameters())[name]][what]
            errors.append(_error(local.local(value), expected_value, local.range_of(name, value)))
    result = {
        "error": max(errors),
        "holding": {name: [e.start, e.stop] for name, e in local.holding(named.items()).items()},
        "sizes": {name: p.numel() for name, p in named.items()},
        "reductions": group.reductions,
        "divided": [name for name, p in named.items() if local.is_divided(p)],
    }
    Path(out, f"{rank}.json").write_text(json.dumps(result))
    store.set(f"done-{rank}", b"")
    if rank == 0:  # it hosts the store
        for other in range(sum(members)):
            store.get(f"done-{other}")


def lost(*, out: str, port: int, rank: int) -> None:
    """Wait in an operation of a member of two for a rank that ends, or is stopped, before it."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == 0, timeout=LIMIT, wait_for_workers=False)
    group = MemberGroup(rank=rank, world_size=2)
    group.connect(store, "member", check=lambda: None)
    model = torch.nn.Linear(4, 4)
    shard(model, group, [], device=torch.device("cpu"))
    model(torch.ones(1, 4))
    if rank == 1:
        Path(out, "ready").touch()
        store.get("never")
    while not Path(out, "gone").exists():
        time.sleep(0.01)
    if Path(out, "cut").exists():
        threading.Timer(1.0, lambda: group.cut("a heartbeat is missing")).start()
    try:
        model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4))
    except Exception as error:  # noqa: BLE001  # its name is the result
        Path(out, "result").write_text(f"{type(error).__name__}: {error}")


class _Exchange:
    """The exchange between members: one sum for each piece among its owners."""

    def __init__(self, store: Any, rank: int, ranks: int, named: dict[str, torch.nn.Parameter]) -> None:
        self._named = {name: p for name, p in named.items() if p.requires_grad}
        own = {name: [e.start, e.stop] for name, e in local.holding(self._named.items()).items()}
        store.set(f"holding-{rank}", json.dumps(own))
        raw = [json.loads(store.get(f"holding-{other}")) for other in range(ranks)]
        holdings = [{name: TensorRange(name, *pair) for name, pair in found.items()} for found in raw]
        self._pieces = pieces_of({name: p.numel() for name, p in self._named.items()}, holdings)
        self._rank = rank
        self._groups: dict[tuple[int, ...], Any] = {}
        for owners in sorted({piece.owners for piece in self._pieces if len(piece.owners) > 1}):
            if rank in owners:
                name = "-".join(map(str, owners))
                self._groups[owners] = dist.ProcessGroupGloo(
                    dist.PrefixStore(name, store), owners.index(rank), len(owners), LIMIT
                )

    def run(self) -> None:
        for piece in self._pieces:
            if piece.owners in self._groups:
                parameter = self._named[piece.name]
                first, part = local.range_of(piece.name, parameter).start, local.gradient(parameter)
                assert part is not None
                view = part.view(-1)[piece.start - first : piece.stop - first]
                self._groups[piece.owners].allreduce([view]).wait()


def _backward(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, pieces: Sequence[int], whole: int) -> None:
    start, stop = pieces
    weight = 1.0 if stop > start else 0.0  # a rank without a sample left runs one that does not count
    part = slice(start, max(stop, start + 1))
    ((((model(x[part]) - y[part]) ** 2).sum() * weight) / whole).backward()


class LeavesError(Exception):
    """Raised in place of an operation of the member."""


def _interrupted(
    model: torch.nn.Module, group: MemberGroup, x: torch.Tensor, y: torch.Tensor, pieces: Sequence[Sequence[int]], *,
    mine: bool, at: int,
) -> None:  # fmt: skip
    """Run an attempt that one rank leaves before its ``at``-th operation; the others notice because it cuts."""
    count, run = 0, group.collective

    def collective(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if mine and count == at:
            raise LeavesError
        return run(*arguments)

    group.collective = collective  # type: ignore[method-assign]  # the fault
    try:
        for cut in pieces:
            _backward(model, x, y, cut, 1)
    except Exception as error:
        if type(error).__name__ not in ("LeavesError", "PeerLost"):
            raise
    group.cut("left in the middle")
    group.collective = run  # type: ignore[method-assign]  # the fault is over


def _error(found: torch.Tensor | None, expected: torch.Tensor | None, place: TensorRange) -> float:
    assert found is not None
    assert expected is not None
    part = expected.detach().reshape(-1)[place.start : place.stop]
    if not part.numel():
        assert not found.numel()
        return 0.0
    return float((found.reshape(-1) - part).norm() / expected.detach().norm().clamp_min(1e-30))
