"""Seeded histories of jobs whose members are pipelines: random cuts, losses at every place, and other cuts afterwards.

Each history ends with the weights and the samples of one process. See ``drawn_histories`` for its seeds.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from distributed.drawn_histories import (
    PLAN,
    Draws,
    History,
    Pod,
    check_samples,
    drawn_fault,
    faults_of,
    in_own_folder,
    seeds,
)
from distributed.fault_injectors import FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE, PHASE_PLACES, STAGE_PLACES
from distributed.harness import Operator, PlannedMember, Worker
from distributed.test_pipeline_jobs import (
    BATCH,
    SAMPLES,
    UNITS,
    check_evaluations,
    reference,
    result_of,
    start,
)
from heterotrain_core.contract.plan import Layout, LayoutKind

EPOCHS = 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)
BY_STEP = ("step", "in loss", "backward", "reducing", "reduced", "applied", *STAGE_PLACES, *PHASE_PLACES)
PLACES = (*BY_STEP, "in a hook", *FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE)
LAST_VISITS = {"in a hook": EPOCHS - 1, LAST_PLACE: 0, HAND_OVER_PLACE: 0} | dict.fromkeys(FORMING_PLACES, 2)
GRACE_S = 2.0
LATE_S = 1.0
"""Longest time after which the operator names new members, if the survivors do not go on before."""


@cache
def expected() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    return reference(epochs=EPOCHS)


def members_of(
    rng: random.Random, workers: list[Worker], *, shards: bool = False
) -> tuple[list[PlannedMember], list[Worker]]:
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


@pytest.mark.parametrize("seed", seeds(gate=3, every=200))
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Up to three workers fail; the operator names new members of those that are left, and of new ones."""
    history(operate, seed, PLACES)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_a_seed_repeats_its_history(operate: Callable[..., Operator], seed: int) -> None:
    """The same faults happen to the same victims at the same places."""
    found = history(operate, seed, PLACES, name="first")
    assert found, "the seed has no faults"
    assert history(operate, seed, PLACES, name="second") == found


def history(
    operate: Callable[..., Operator], seed: int, places: Sequence[str], *, shards: bool = False, name: str = "once"
) -> list[dict[str, Any]]:
    """Play a history; return the faults that happened. ``shards``: most members hold unequal parts of each unit."""
    draw, settings = Draws(seed), {"epochs": EPOCHS, "peer_timeout_s": 0.3, "grace_s": GRACE_S}
    operator = in_own_folder(operate(batch_samples=BATCH, parallelism="Auto", **settings), name)
    checkpoints = {"checkpoint_uri": f"file://{operator.folder}/checkpoints", "checkpoint_interval_s": 0.0}
    operator.config = replace(operator.config, **checkpoints)
    rng, kinds = draw("faults"), ["die", "die", "leave", "leave"]
    chosen = [places[(3 * seed + number) % len(places)] for number in range(rng.randint(1, 3))]
    faults = [
        drawn_fault(
            rng, operator, f"w{number}", place, last=LAST_VISITS.get(place, STEPS - 2), kinds=kinds, tells=True
        )
        for number, place in enumerate(chosen)
    ]  # fmt: skip
    if HAND_OVER_PLACE in chosen:
        name_of_leaver = f"w{len(faults)}"
        faults.append(
            drawn_fault(rng, operator, name_of_leaver, "step", last=STEPS - 4, kinds=["leave"], tells=True)
        )  # fmt: skip

    def another(number: int, gates: list[dict[str, Any]]) -> Pod:
        fault = faults[number] if number < len(faults) else {}
        return Pod([start(operator, f"w{number}", fault=fault | {"gates": gates})])

    def plan(stream: random.Random, pods: list[Pod]) -> None:
        members, spares = members_of(stream, [pod.ranks[0] for pod in pods], shards=shards)
        operator.plan_members(members, spares=spares)

    first = max(len(faults) + 1, rng.randint(3, 5))
    played = History(
        operator, draw, start=another, plan=plan, late_s=LATE_S, replaces=0.7, most=first + 4,
        prompt=draw.chance(0.7, "the operator answers to announced leaves"),
        acts=dict.fromkeys(draw("plans").sample(range(1, STEPS - 1), draw("plans too").randint(0, 2)), PLAN),
    )  # fmt: skip
    for _ in range(first):
        played.add()
    operator.until_ready(*[pod.ranks[0] for pod in played.living])
    played.play()
    played.end(signal.SIGTERM)
    check(operator, [pod.ranks[0] for pod in played.everyone])
    return faults_of(operator)


def check(operator: Operator, everyone: list[Worker]) -> None:
    """Check what the workers ended with that have reached the end."""
    finished = [worker for worker in everyone if (operator.folder / f"{worker.name}-0.pt").exists()]
    assert finished, operator.evidence()
    weights, evaluated = expected()
    for worker in finished:
        found = result_of(operator, worker)
        for name, part in found["parts"].items():
            own = weights[name].reshape(-1)[slice(*found["places"][name])]
            torch.testing.assert_close(part.reshape(-1), own, rtol=1e-10, atol=1e-10, msg=f"{worker.name} {name}")
        check_evaluations(found["found"], evaluated)
    check_samples(operator, epochs=EPOCHS, samples=SAMPLES)
