"""Checks between ranks: bandwidth and latency of every pair, and clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, cast

import torch
import torch.distributed as dist
from heterotrain_core.contract.choices import Backend

from heterotrain.membership.devices import DeviceIds, choose_backend, device_ids
from heterotrain.preflight.result import Check, Verdict

PAYLOAD_BYTES: Final = 16 << 20
ELEMENTS: Final = 16 << 20
"""FP32 numbers in the sum over all ranks."""
MOST_PAIRS: Final = 512
"""Beyond it, only neighbours in the ring are measured: a pair takes a moment, and one pair is measured at a time."""
SLOW_PART: Final = 0.5
"""Of the median bandwidth: a slower pair is named."""
MOST_SKEW_S: Final = 5.0
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two ranks, and what a message between them costs.

    Attributes:
        ranks: the two.
        bytes_per_s: of a large message, the best of some.
        latency_s: of a small message, one way, the best of some.
    """

    ranks: tuple[int, int]
    bytes_per_s: float
    latency_s: float


def pairs_of(world_size: int) -> list[tuple[int, int]]:
    """Return the pairs to measure."""
    every = list(combinations(range(world_size), 2))
    return every if len(every) <= MOST_PAIRS else [(rank, rank + 1) for rank in range(world_size - 1)]


def measure_pairs(device: torch.device, *, payload_bytes: int = PAYLOAD_BYTES) -> list[Pair]:
    """Return the measurements of all pairs on every rank; all ranks call it."""
    rank, found = dist.get_rank(), []
    large = torch.zeros(payload_bytes, dtype=torch.uint8, device=device)
    small = torch.zeros(1, dtype=torch.uint8, device=device)
    for pair in pairs_of(dist.get_world_size()):
        dist.barrier()
        if rank not in pair:
            continue
        latency_s = min(_round_trip(small, rank, pair) for _ in range(_ROUNDS + 1)) / 2
        large_s = min(_round_trip(large, rank, pair) for _ in range(_ROUNDS)) / 2
        if rank == pair[0]:
            found.append(Pair(ranks=pair, bytes_per_s=payload_bytes / max(large_s, 1e-9), latency_s=latency_s))
    gathered: list[list[Pair] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return sorted((pair for each in gathered for pair in each or ()), key=lambda pair: pair.ranks)


def judge_pairs(pairs: Sequence[Pair], names: Sequence[str]) -> Check:
    """Return whether all pairs are about equally fast, and which one is the slowest."""
    if not pairs:
        text = "there is one rank only: start it with several, or with a job, to measure the network"
        return Check(name="network", verdict=Verdict.SKIPPED, message=text)
    rates = sorted(pair.bytes_per_s for pair in pairs)
    median = rates[len(rates) // 2]
    slowest = min(pairs, key=lambda pair: pair.bytes_per_s)
    latency_ms = 1e3 * sorted(pair.latency_s for pair in pairs)[len(pairs) // 2]
    text = f"{len(pairs)} pairs: median {_gbit(median)}, {latency_ms:.2g} ms; slowest {_gbit(slowest.bytes_per_s)}"
    between = f"{names[slowest.ranks[0]]} and {names[slowest.ranks[1]]}"
    if slowest.bytes_per_s < SLOW_PART * median:
        text += f", between {between}: look at the network of these two machines"
        return Check(name="network", verdict=Verdict.WARNING, message=text)
    return Check(name="network", verdict=Verdict.OK, message=text)


def clock_offsets_s() -> list[float]:
    """Return each rank's clock minus that of rank 0, within the time of a message; all ranks call it."""
    own, offsets = dist.get_rank(), [0.0] * dist.get_world_size()
    for other in range(1, dist.get_world_size()):
        dist.barrier()
        if own == 0:
            sent_s = time.time()
            there = torch.zeros(1, dtype=torch.float64)
            dist.send(there, other)
            dist.recv(there, other)
            offsets[other] = float(there) - (sent_s + time.time()) / 2
        elif own == other:
            dist.recv(torch.zeros(1, dtype=torch.float64), 0)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    shared = torch.tensor(offsets, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return [float(each) for each in shared]


def judge_clocks(offsets_s: Sequence[float], names: Sequence[str]) -> Check:
    """Return whether the clocks of all ranks agree."""
    if len(offsets_s) < 2:  # noqa: PLR2004  # one clock agrees with itself
        return Check(name="clock", verdict=Verdict.SKIPPED, message="there is one rank only")
    worst = max(range(len(offsets_s)), key=lambda rank: abs(offsets_s[rank]))
    skew_s = offsets_s[worst]
    text = f"the clocks of {len(offsets_s)} ranks agree within {max(offsets_s) - min(offsets_s):.2g} s"
    if abs(skew_s) > MOST_SKEW_S:
        how = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} that of {names[0]}"
        text = f"the clock of {names[worst]} is {how}: correct it; logs and credentials depend on it"
        return Check(name="clock", verdict=Verdict.WARNING, message=text)
    return Check(name="clock", verdict=Verdict.OK, message=text)


def nccl_exchange(device: torch.device, names: Sequence[str], *, elements: int = ELEMENTS) -> Check:
    """Return whether NCCL sums over all ranks, right, and how fast; all ranks call it."""
    every: list[DeviceIds] = [()] * dist.get_world_size()
    dist.all_gather_object(every, device_ids(device))
    choice = choose_backend(Backend.AUTO, every, names)
    if choice.topology.backend != "nccl":
        verdict = Verdict.WARNING if choice.reason else Verdict.SKIPPED
        text = str(choice) if choice.reason else "gradients travel by gloo: there are no GPUs"
        return Check(name="NCCL exchange", verdict=verdict, message=text)
    try:
        group = cast("dist.ProcessGroup", dist.new_group(backend="nccl"))  # this rank is in it
        payload = torch.ones(elements, device=device)
        dist.all_reduce(payload, group=group)
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        dist.all_reduce(payload, group=group)
        torch.cuda.synchronize(device)
        took_s = time.perf_counter() - began_s
        is_right = bool((payload == dist.get_world_size() ** 2).all())
        dist.destroy_process_group(group)
    except RuntimeError as error:
        text = f"NCCL fails ({' '.join(str(error).split())[:200]}): set NCCL_DEBUG=INFO, or communication.backend: Gloo"
        return Check(name="NCCL exchange", verdict=Verdict.FAILED, message=text)
    if not is_right:
        text = "a sum over all ranks is wrong: do not train on these devices"
        return Check(name="NCCL exchange", verdict=Verdict.FAILED, message=text)
    size = dist.get_world_size()
    bus = 2 * (size - 1) / size * payload.numel() * payload.element_size() / took_s  # as nccl-tests defines it
    text = f"{size} ranks sum {payload.numel() * 4 >> 20} MiB at a bus bandwidth of {_gbit(bus)}"
    return Check(name="NCCL exchange", verdict=Verdict.OK, message=text)


def _round_trip(message: torch.Tensor, rank: int, pair: tuple[int, int]) -> float:
    """Send the message to the other rank and back; return the seconds."""
    began_s = time.perf_counter()
    if rank == pair[0]:
        dist.send(message, pair[1])
        dist.recv(message, pair[1])
    else:
        dist.recv(message, pair[0])
        dist.send(message, pair[0])
    if message.is_cuda:
        torch.cuda.synchronize(message.device)
    return time.perf_counter() - began_s


def _gbit(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e9:.3g} Gbit/s"
