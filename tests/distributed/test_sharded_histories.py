"""Seeded histories of jobs whose members are sharded: pods of 1 to 4 ranks, losses, leaves and joins at every place.

Each history ends with the weights and the samples of one process. ``HETEROTRAIN_SHARDED_HISTORIES`` sets the number of
histories (``200``) or a range of seeds (``100:200``).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from distributed.fault_injectors import FORMING_PLACES, LAST_PLACE, PHASE_PLACES
from distributed.harness import LIMIT_S, Operator, Worker
from distributed.test_sharded_jobs import SCRIPT, plan_pods, reference
from heterotrain.data.order import permutation
from heterotrain.data.sample_log import lineage
from support.ports import free_ports

SEEDS = range(*map(int, os.environ.get("HETEROTRAIN_SHARDED_HISTORIES", "4").split(":")))
EPOCHS, SAMPLES, BATCH = 2, 96, 17
STEPS = EPOCHS * -(-SAMPLES // BATCH)
BY_STEP = ("step", "in forward", "backward", "reducing", "reduced", "applied", *PHASE_PLACES)
PLACES = (*BY_STEP, "in a hook", *FORMING_PLACES, LAST_PLACE)
MOST_RANKS = 7
"""Ranks at the same time, so that a history stays short."""
GRACE_S, LATE_S = 2.0, 0.5


@cache
def expected() -> dict[str, torch.Tensor]:
    return reference(epochs=EPOCHS, samples=SAMPLES, batch_samples=BATCH)


@dataclass(slots=True, eq=False)
class Pod:
    """A worker, whose ranks divide the model."""

    ranks: list[Worker]

    @property
    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    def end(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, as the launcher does."""
        for rank in self.ranks:
            rank.signal(number)


def fault_of(rng: random.Random, place: str) -> dict[str, object]:
    """Return a fault at a place, in any step or visit."""
    last = {"in a hook": EPOCHS - 1, LAST_PLACE: 0} | dict.fromkeys(FORMING_PLACES, 2)
    step = rng.randint(0, last.get(place, STEPS - 2))
    return {"place": place, "step": step, "do": rng.choice(["die", "die", "leave"])}


def start(operator: Operator, name: str, ranks: int, faults: dict[int, dict[str, Any]], *, script: str = SCRIPT) -> Pod:
    """Start a worker; ``faults`` are those of its ranks."""
    port = free_ports(ranks)
    return Pod([
        operator.start(
            name, script=script, local_rank=rank, ranks=ranks, metrics_port=port + rank, slow_s=0.01,
            fault=faults.get(rank),
        )
        for rank in range(ranks)
    ])  # fmt: skip


def plan(operator: Operator, rng: random.Random, pods: list[Pod]) -> None:
    """Give these workers random shares and micro-batches."""
    pods = rng.sample(pods, len(pods))
    edges = sorted(rng.sample(range(1, BATCH), len(pods) - 1))
    shares = [b - a for a, b in zip([0, *edges], [*edges, BATCH], strict=True)]
    plan_pods(operator, [pod.ranks for pod in pods], shares, micro=[rng.choice([0, 1, 3]) for _ in pods])


def steps_of(pods: list[Pod]) -> float:
    return max((pod.ranks[0].metric("heterotrain_step") or 0.0 for pod in pods), default=0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Up to three workers lose a rank or leave; others go on, join, and take their places."""
    rng = random.Random(seed)  # noqa: S311  # a seeded scenario, not a secret
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, parallelism="Sharded", peer_timeout_s=1.0, grace_s=GRACE_S)
    checkpoints = {"checkpoint_uri": f"file://{operator.folder}/checkpoints", "checkpoint_interval_s": 0.0}
    operator.config = replace(operator.config, **checkpoints)
    count = 0

    def another(*, most: int, place: str = "") -> Pod:
        nonlocal count
        size, faults = rng.randint(1, most), {}
        if place:
            faults = {rng.randrange(size): fault_of(rng, place) | {"reached": f"{operator.folder}/fault-w{count}"}}
        pod = start(operator, f"w{count}", size, faults)
        count += 1
        return pod

    places = [PLACES[(3 * seed + number) % len(PLACES)] for number in range(rng.randint(1, 3))]
    everyone = [another(most=4 if not number else 2, place=place) for number, place in enumerate(places)]
    if len(everyone) < 3:
        everyone.append(another(most=max(1, min(3, MOST_RANKS - sum(len(pod.ranks) for pod in everyone)))))
    operator.until_ready(*[rank for pod in everyone for rank in pod.ranks])
    living, end_s = list(everyone), time.monotonic() + LIMIT_S
    plan(operator, rng, living)
    while not any(has_finished(operator, pod) for pod in living):
        assert time.monotonic() < end_s, operator.evidence()
        for pod in living:
            if any(code == 0 for code in pod.codes):
                pod.end(signal.SIGTERM)  # one of its ranks was asked to leave
        lost = [pod for pod in living if any(code is not None for code in pod.codes)]
        joins = not lost and len(everyone) < 4 and rng.random() < 0.02
        if not lost and not joins:
            time.sleep(0.02)
            continue
        for pod in lost:
            pod.end(signal.SIGKILL)  # a worker ends with its first rank
        operator.finish([rank for pod in lost for rank in pod.ranks])
        if any(has_finished(operator, pod) for pod in lost):
            break
        living = [pod for pod in living if pod not in lost]
        before, late_s = steps_of(living), time.monotonic() + rng.choice([0.0, LATE_S])
        while lost and time.monotonic() < late_s and steps_of(living) <= before:
            time.sleep(0.02)
        if joins or not living or rng.random() < 0.5:
            new = another(most=max(1, min(4, MOST_RANKS - sum(len(pod.ranks) for pod in living))))
            everyone.append(new)
            operator.until_ready(*new.ranks)
            living.append(new)
        living = [pod for pod in living if all(code is None for code in pod.codes)] or living
        plan(operator, rng, living)
    for pod in living:
        pod.end(signal.SIGTERM)
    operator.finish([rank for pod in living for rank in pod.ranks])
    check_weights(operator, everyone)
    orders = {
        epoch: permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=True).tolist() for epoch in range(EPOCHS)
    }
    assert lineage(operator.folder / "samples") == orders


def has_finished(operator: Operator, pod: Pod) -> bool:
    """Return whether a rank of the worker has reached the end of the training."""
    return any(result(operator, rank, number).exists() for number, rank in enumerate(pod.ranks))


def result(operator: Operator, rank: Worker, number: int) -> Any:
    return operator.folder / f"{rank.name}-{number}.pt"


def check_weights(operator: Operator, pods: list[Pod]) -> None:
    """Check the parts of all ranks that have reached the end."""
    weights, checked = expected(), 0
    for pod in pods:
        for number, rank in enumerate(pod.ranks):
            path = result(operator, rank, number)
            if rank.poll() != 0 or not path.exists():
                continue
            checked += 1
            for name, (first, stop, part) in torch.load(path, weights_only=True)["parts"].items():
                torch.testing.assert_close(
                    part, weights[name].reshape(-1)[first:stop], rtol=1e-10, atol=1e-10, msg=f"{rank.name} {name}"
                )
    assert checked, operator.evidence()
