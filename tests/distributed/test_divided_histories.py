"""Seeded histories of jobs whose members are pipelines: random cuts, losses at every place, and other cuts afterwards.

Each history ends with the weights and the samples of one process. ``HETEROTRAIN_DIVIDED_HISTORIES`` sets the number of
histories (``200``) or a range of seeds (``100:200``).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from distributed.fault_injectors import FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE, PHASE_PLACES, STAGE_PLACES
from distributed.harness import LIMIT_S, Operator, Worker
from distributed.test_pipeline_jobs import (
    BATCH,
    SAMPLES,
    UNITS,
    Cut,
    check_evaluations,
    plan_members,
    reference,
    result_of,
    start,
)
from heterotrain.data.order import permutation
from heterotrain.data.sample_log import lineage
from heterotrain_core.contract.plan import Layout, LayoutKind

SEEDS = range(*map(int, os.environ.get("HETEROTRAIN_DIVIDED_HISTORIES", "8").split(":")))
EPOCHS = 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)
BY_STEP = ("step", "in loss", "backward", "reducing", "reduced", "applied", *STAGE_PLACES, *PHASE_PLACES)
PLACES = (*BY_STEP, "in a hook", *FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE)
GRACE_S = 2.0
LATE_S = 1.0
"""Longest time after which the operator names new members, if the survivors do not go on before."""


@cache
def expected() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    return reference(epochs=EPOCHS)


def fault_of(rng: random.Random, place: str) -> dict[str, object]:
    """Return a fault at a place, in any step or visit."""
    last = {"in a hook": EPOCHS - 1, LAST_PLACE: 0, HAND_OVER_PLACE: 0} | dict.fromkeys(FORMING_PLACES, 2)
    return {
        "place": place,
        "step": rng.randint(0, last.get(place, STEPS - 2)),
        "do": rng.choice(["die", "die", "leave", "leave"]),
    }


def at(operator: Operator, number: int, faults: list[dict[str, object]]) -> dict[str, object] | None:
    """Return a worker's fault; where it is asked to leave, a file tells the operator."""
    if number >= len(faults):
        return None
    fault = faults[number]
    return fault | ({"reached": f"{operator.folder}/asked-w{number}"} if fault["do"] == "leave" else {})


def members_of(rng: random.Random, workers: list[Worker], *, shards: bool = False) -> tuple[list[Cut], list[Worker]]:
    """Return random members of these workers, and the spare ones; ``shards``: most hold unequal parts of each unit."""
    order = rng.sample(workers, len(workers))
    spares = [order.pop()] if len(order) > 2 and rng.random() < 0.2 else []
    groups: list[list[Worker]] = []
    while order:
        size = min(len(order), rng.choice([1, 2, 2, 3]))
        groups.append([order.pop() for _ in range(size)])
    edges = sorted(rng.sample(range(1, BATCH), len(groups) - 1))
    shares = [b - a for a, b in zip([0, *edges], [*edges, BATCH], strict=True)]
    cuts: list[tuple[int, ...] | Layout] = [
        tuple(sorted(rng.sample(range(1, UNITS), len(group) - 1))) for group in groups
    ]
    for index, group in enumerate(groups):
        if shards and len(group) > 1 and rng.random() < 0.8:
            cuts[index] = Layout(
                kind=LayoutKind.SHARDED, shards=len(group), state_weights=tuple(rng.randint(1, 9) for _ in group),
                sample_weights=(*(rng.randint(0, 5) for _ in group[1:]), rng.randint(1, 5)),
            )  # fmt: skip
    return [
        (group, cut, share, rng.choice([0, 1, 2, 3]))
        for group, cut, share in zip(groups, cuts, shares, strict=True)
    ], spares  # fmt: skip


def steps_of(workers: list[Worker]) -> float:
    return max((worker.metric("heterotrain_step") or 0.0 for worker in workers), default=0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Up to three workers fail; the operator names new members of those that are left, and of new ones."""
    history(operate, seed, PLACES)


def history(operate: Callable[..., Operator], seed: int, places: Sequence[str], *, shards: bool = False) -> None:
    """Play a history; ``shards``: most members hold unequal parts of each unit."""
    rng = random.Random(seed)  # noqa: S311  # a seeded scenario, not a secret
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, parallelism="Auto", peer_timeout_s=0.3, grace_s=GRACE_S)
    checkpoints = {"checkpoint_uri": f"file://{operator.folder}/checkpoints", "checkpoint_interval_s": 0.0}
    operator.config = replace(operator.config, **checkpoints)
    faults = [fault_of(rng, places[(3 * seed + number) % len(places)]) for number in range(rng.randint(1, 3))]
    if any(fault["place"] == HAND_OVER_PLACE for fault in faults):
        faults.append({"place": "step", "step": rng.randint(0, STEPS - 4), "do": "leave"})
    everyone = [
        start(operator, f"w{number}", slow_s=0.01, fault=at(operator, number, faults))
        for number in range(max(len(faults) + 1, rng.randint(3, 5)))
    ]
    operator.until_ready(*everyone)
    living, end_s, recuts = list(everyone), time.monotonic() + LIMIT_S, rng.randint(0, 2)
    prompt = rng.random() < 0.7  # whether the operator answers to announced leaves, or to ends only
    members, spares = members_of(rng, living, shards=shards)
    plan_members(operator, members, spares=spares)
    while not any(worker.poll() == 0 and worker not in leaving(everyone) for worker in living):
        assert time.monotonic() < end_s, operator.evidence()
        lost = [worker for worker in living if worker.poll() is not None]
        asked = [worker for worker in living if (operator.folder / f"asked-{worker.name}").exists()]
        asked = [] if not prompt else [worker for worker in asked if worker not in lost]
        again = not lost and recuts and rng.random() < 0.05
        if not lost and not again and not asked:
            time.sleep(0.02)
            continue
        recuts -= again
        living = [worker for worker in living if worker not in (*lost, *asked)]
        before, late_s = steps_of(living), time.monotonic() + rng.choice([0.0, LATE_S])
        while lost and time.monotonic() < late_s and steps_of(living) <= before:
            time.sleep(0.02)
        if not living or (len(living) < 4 and rng.random() < 0.7):
            new = start(operator, f"w{len(everyone)}")
            everyone.append(new)
            operator.until_ready(new)
            living.append(new)
        living = [worker for worker in living if worker.poll() is None]
        if living:
            members, spares = members_of(rng, living, shards=shards)
            plan_members(operator, members, spares=spares)
    for worker in living:
        worker.signal(signal.SIGTERM)
    operator.finish(living)
    finished = [worker for worker in everyone if (operator.folder / f"{worker.name}-0.pt").exists()]
    assert finished, operator.evidence()
    weights, evaluated = expected()
    for worker in finished:
        found = result_of(operator, worker)
        for name, part in found["parts"].items():
            own = weights[name].reshape(-1)[slice(*found["places"][name])]
            torch.testing.assert_close(part.reshape(-1), own, rtol=1e-10, atol=1e-10, msg=f"{worker.name} {name}")
        check_evaluations(found["found"], evaluated)
    orders = {
        epoch: permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=True).tolist() for epoch in range(EPOCHS)
    }
    assert lineage(operator.folder / "samples") == orders


def leaving(workers: list[Worker]) -> list[Worker]:
    """Return the workers that have left as they were asked to."""
    return [w for w in workers if w.poll() == 0 and not (w.folder.parent / f"{w.name}-0.pt").exists()]
