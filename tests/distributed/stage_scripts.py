"""Ranks of pipeline members and of one that holds the whole model, with plain torch.distributed: no job, no plan."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from heterotrain.errors import PeerLost
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.parts.batches import run
from heterotrain.parts.stages.stage import Share, Stage
from heterotrain.parts.stages.trace import trace
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.initial_weights import built, fill
from heterotrain.parts.units.units import Units, units_of
from heterotrain.state.holdings import Extent, Piece, missing, pieces_of, whole
from torch.nn import functional as F  # noqa: N812  # the usual name

CPU = torch.device("cpu")
LETTERS, LENGTH, SEED = 13, 5, 3


class Block(torch.nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(width, width + 2), torch.nn.Linear(width + 2, width)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.drop(self.outer(torch.tanh(self.inner(x))))


class Decoder(torch.nn.Module):
    """An embedding of letters and places, blocks, and a head that is the embedding again."""

    def __init__(self, blocks: int, width: int = 6) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(LETTERS, width), torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        for block in self.blocks:
            x = block(x, scale=0.5)
        return F.linear(self.norm(x), self.letters.weight)


class Rotating(Block):
    """A block that gets positions and a mask besides its input, and returns a tuple, as in Hugging Face models."""

    def forward(  # type: ignore[override]  # a layer with more arguments
        self, x: torch.Tensor, mask: torch.Tensor, *, turns: tuple[torch.Tensor, torch.Tensor], cache: Any = None
    ) -> tuple[torch.Tensor, Any]:
        assert cache is None
        cos, sin = turns
        found = super().forward(x * cos + x.roll(1, -1) * sin)
        return torch.where(mask, found, x), cache


class Rotated(Decoder):
    """A decoder that computes positions and a mask once, for all blocks."""

    def __init__(self, blocks: int, width: int = 6) -> None:
        super().__init__(blocks, width)
        self.blocks = torch.nn.ModuleList(Rotating(width) for _ in range(blocks))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places(torch.arange(letters.shape[1], device=letters.device))
        angle = torch.arange(letters.shape[1], device=letters.device, dtype=x.dtype)[:, None] / 7
        turns, mask = (angle.cos(), angle.sin()), (letters % 5 != 0)[..., None]
        for block in self.blocks:
            x, _ = block(x, mask, turns=turns)
        return F.linear(self.norm(x), self.letters.weight)


def layers(blocks: int) -> torch.nn.Sequential:
    """Return a plain sequence whose last layer shares its weight with the first one, under a name of its own."""
    embedding, head = torch.nn.Embedding(LETTERS, 6), torch.nn.Linear(6, LETTERS)
    head.weight = embedding.weight
    return torch.nn.Sequential(embedding, *[Block(6) for _ in range(blocks)], head)


def model(kind: str, blocks: int) -> Units:
    """Return the units of a case, without values."""
    make: Any = {"decoder": Decoder, "rotated": Rotated, "layers": layers}[kind]
    return units_of(built(lambda: make(blocks).double()), None if kind == "layers" else "blocks")


def sample_text(samples: int) -> torch.Tensor:
    """Return the samples of a step: letters and their next ones."""
    return torch.randint(LETTERS, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the sum over all letters but every seventh kind, and their number."""
    counted = targets % 7 != 0
    return F.cross_entropy(scores[counted], targets[counted], reduction="sum"), float(counted.sum())


def steps(
    *, out: str, port: int, rank: int, kind: str, blocks: int, members: list[dict[str, Any]], count: int = 2,
    lost: int | None = None,
) -> None:  # fmt: skip
    """Take steps of Adam with clipping, exchange gradients by pieces, and write errors against one process.

    Args:
        out: folder for the result.
        port: of the store, which rank 0 hosts.
        rank: over all members.
        kind: ``decoder`` or ``layers``.
        blocks: of the model.
        members: ``cuts`` (empty for the whole model) and ``sizes`` of the micro-batches of each.
        count: number of steps.
        lost: rank that is killed in the first backward pass of the second step.
    """
    torch.set_num_threads(1)
    ranks = [max(1, len(member["cuts"]) - 1) for member in members]
    store = dist.TCPStore("127.0.0.1", port, sum(ranks), is_master=rank == 0)
    own = next(i for i in range(len(members)) if rank < sum(ranks[: i + 1]))
    member, local_rank = members[own], rank - sum(ranks[:own])
    dist.init_process_group("gloo", store=dist.PrefixStore("all", store), rank=rank, world_size=sum(ranks))
    batch = sum(sum(m["sizes"]) for m in members)
    start, text = sum(sum(m["sizes"]) for m in members[:own]), sample_text(batch)
    units, stage = model(kind, blocks), None
    if member["cuts"]:
        group = MemberGroup(rank=local_rank, world_size=ranks[own])
        group.connect(dist.PrefixStore(f"member-{own}", store), "pipe", check=lambda: None)
        stage = Stage(units, trace(units, text[:1, :-1]), member["cuts"], group, seed=SEED, device=CPU)
        named, shapes, held = list(stage.named_parameters()), stage.shapes, dict(stage.holding)
    else:
        fill(units, seed=SEED, device=CPU)
        named = list(units.model.named_parameters())
        shapes = {name: tuple(p.shape) for name, p in named}
        held = whole({name: p.numel() for name, p in named})
        draws = UnitDraws(units, seed=SEED, device=CPU)

    def fetch(index: int) -> Any:
        first = start + sum(member["sizes"][:index])
        rows = text[first : first + member["sizes"][index]]
        return rows[:, :-1], rows[:, 1:]

    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    holdings: list[Any] = [None] * sum(ranks)
    dist.all_gather_object(holdings, held)
    check_whole(sizes, holdings, ranks)
    pieces = pieces_of(sizes, holdings)
    groups = {owners: dist.new_group(list(owners)) for owners in sorted({piece.owners for piece in pieces})}
    optimizer = torch.optim.Adam([p for _, p in named], lr=0.01)
    for step in range(count):
        optimizer.zero_grad()
        share = Share(step=step, start=start, sizes=tuple(member["sizes"]), batch_samples=batch, fetch=fetch)
        if stage is None:
            weight = run_whole(units, draws, share)
        else:
            weight = run_stage(stage, share, Path(out, f"{rank}.json"), dies=lost == rank and step > 0)
            if lost is not None and step:
                os._exit(3)
        norm_found = exchange(pieces, groups, named, rank=rank, weight=weight, batch=batch)
        optimizer.step()
    expected, norm = one_process(kind, blocks, members, count)
    errors = [float((p.detach() - expected[name]).norm() / expected[name].norm()) for name, p in named]
    if stage is not None:
        stage.load_state_dict(expected)
        errors += [float((p.detach() - expected[name]).norm()) for name, p in named]
    result = {
        "error": max(errors),
        "norm": norm_found / norm - 1,
        "held": [list(e) for e in held],
        "all": len(sizes),
    }
    Path(out, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()


def check_whole(sizes: dict[str, int], holdings: list[Any], ranks: list[int]) -> None:
    """Fail unless each member holds the whole model."""
    first = 0
    for number in ranks:
        assert not missing(sizes, holdings[first : first + number])
        first += number


def run_stage(stage: Stage, share: Share, result: Path, *, dies: bool) -> float:
    """Return the weight of the stage's samples; end the process when a neighbour is lost, or this rank is to die."""
    if dies:
        _, first = next(iter(stage.named_parameters()))
        first.register_hook(lambda _gradient: os.kill(os.getpid(), signal.SIGKILL))
    try:
        return stage.run(share, loss_of).weight
    except PeerLost as error:
        result.write_text(json.dumps({"lost": str(error), "step": share.step}))
        os._exit(0)


def run_whole(units: Units, draws: UnitDraws, share: Share) -> float:
    """Compute the share of a member that is one rank; return its weight."""
    weight = 0.0
    for index in range(len(share.sizes)):
        inputs, targets = share.fetch(index)
        with draws.at(share.step, share.start + sum(share.sizes[:index])):
            loss, part = loss_of(run(units.model, inputs), targets)
        (loss / share.batch_samples).backward()
        weight += part
    return weight


def exchange(
    pieces: tuple[Piece, ...], groups: dict[tuple[int, ...], Any], named: list[tuple[str, torch.nn.Parameter]], *,
    rank: int, weight: float, batch: int,
) -> float:  # fmt: skip
    """Sum the gradients of all pieces over their owners and clip them; return the norm before."""
    by_name, whole_weight = dict(named), torch.tensor([weight])
    dist.all_reduce(whole_weight)
    squared = torch.zeros(1, dtype=torch.float64)
    for piece in pieces:
        if rank in piece.owners:
            gradient = by_name[piece.name].grad
            assert gradient is not None
            assert piece.extent == Extent(0, gradient.numel())
            dist.all_reduce(gradient, group=groups[piece.owners])
            gradient.mul_(batch / whole_weight.item())
            if rank == piece.owners[0]:
                squared += gradient.square().sum()
    dist.all_reduce(squared)
    for parameter in by_name.values():
        assert parameter.grad is not None
        parameter.grad.mul_(min(1.0, 0.5 / squared.sqrt().item()))
    return squared.sqrt().item()


def one_process(
    kind: str, blocks: int, members: list[dict[str, Any]], count: int
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights and the last gradient's norm of the same steps in plain torch."""
    units = model(kind, blocks)
    fill(units, seed=SEED, device=CPU)
    draws = UnitDraws(units, seed=SEED, device=CPU)
    optimizer, sizes = torch.optim.Adam(units.model.parameters(), lr=0.01), [n for m in members for n in m["sizes"]]
    text, norm = sample_text(sum(sizes)), 0.0
    for step in range(count):
        optimizer.zero_grad()
        weight = sum(
            loss_of(torch.zeros(n, LENGTH, LETTERS), rows[:, 1:])[1]
            for n, rows in zip(sizes, text.split(sizes), strict=True)
        )
        start = 0
        for rows in text.split(sizes):
            with draws.at(step, start):
                (loss_of(units.model(rows[:, :-1]), rows[:, 1:])[0] / weight).backward()
            start += len(rows)
        gradients = [p.grad for p in units.model.parameters() if p.grad is not None]
        norm = math.hypot(*(g.norm().item() for g in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.5 / norm))
        optimizer.step()
    return {name: p.detach() for name, p in units.model.named_parameters()}, norm
