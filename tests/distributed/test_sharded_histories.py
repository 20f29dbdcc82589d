"""Seeded histories of jobs whose members are sharded: pods of 1 to 4 ranks, losses, leaves and joins at every place.

Each history ends with the weights and the samples of one process. See ``drawn_histories`` for its seeds.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from distributed.drawn_histories import (
    JOIN,
    Draws,
    History,
    Pod,
    check_samples,
    drawn_fault,
    faults_of,
    in_own_folder,
    result_of,
    seeds,
)
from distributed.fault_injectors import FORMING_PLACES, LAST_PLACE, PHASE_PLACES
from distributed.harness import Operator
from distributed.test_sharded_jobs import SCRIPT, plan_pods, reference

EPOCHS, SAMPLES, BATCH = 2, 96, 17
STEPS = EPOCHS * -(-SAMPLES // BATCH)
BY_STEP = ("step", "in forward", "backward", "reducing", "reduced", "applied", *PHASE_PLACES)
PLACES = (*BY_STEP, "in a hook", *FORMING_PLACES, LAST_PLACE)
LAST_VISITS = {"in a hook": EPOCHS - 1, LAST_PLACE: 0} | dict.fromkeys(FORMING_PLACES, 2)
MOST_RANKS = 7
"""Ranks at the same time, so that a history stays short."""
GRACE_S, LATE_S = 2.0, 0.5


@cache
def expected() -> dict[str, torch.Tensor]:
    return reference(epochs=EPOCHS, samples=SAMPLES, batch_samples=BATCH)


def start(operator: Operator, name: str, ranks: int, faults: dict[int, dict[str, Any]], *, script: str = SCRIPT) -> Pod:
    """Start a worker; ``faults`` are those of its ranks."""
    return Pod(operator.start_pod(name, ranks, script=script, faults=faults))


def plan(operator: Operator, rng: random.Random, pods: list[Pod]) -> None:
    """Give these workers random shares and micro-batches."""
    pods = rng.sample(pods, len(pods))
    edges = sorted(rng.sample(range(1, BATCH), len(pods) - 1))
    shares = [b - a for a, b in zip([0, *edges], [*edges, BATCH], strict=True)]
    plan_pods(operator, [pod.ranks for pod in pods], shares, micro=[rng.choice([0, 1, 3]) for _ in pods])


@pytest.mark.parametrize("seed", seeds(gate=2, every=200))
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Up to three workers lose a rank or leave; others go on, join, and take their places."""
    play(operate, seed, "once")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_a_seed_repeats_its_history(operate: Callable[..., Operator], seed: int) -> None:
    """The same faults happen to the same victims at the same places."""
    found = play(operate, seed, "first")
    assert found, "the seed has no faults"
    assert play(operate, seed, "second") == found


def play(operate: Callable[..., Operator], seed: int, name: str) -> list[dict[str, Any]]:
    """Play a history; return the faults that happened."""
    draw, settings = Draws(seed), {"epochs": EPOCHS, "peer_timeout_s": 0.3, "grace_s": GRACE_S}
    operator = in_own_folder(operate(batch_samples=BATCH, parallelism="Sharded", **settings), name)
    checkpoints = {"checkpoint_uri": f"file://{operator.folder}/checkpoints", "checkpoint_interval_s": 0.0}
    operator.config = replace(operator.config, **checkpoints)
    places = [PLACES[(3 * seed + number) % len(PLACES)] for number in range(draw("faults").randint(1, 3))]

    def another(number: int, gates: list[dict[str, Any]]) -> Pod:
        rng, name = draw("worker", number), f"w{number}"
        room = MOST_RANKS - sum(len(pod.ranks) for pod in history.living)
        size = rng.randint(1, max(1, min(2 if 0 < number < len(places) else 4, room)))
        faults: dict[int, dict[str, Any]] = {rank: {"gates": gates} for rank in range(size)}
        if number < len(places):
            place, kinds = places[number], ["die", "die", "leave"]
            last = LAST_VISITS.get(place, STEPS - 2)
            faults[rng.randrange(size)] |= drawn_fault(rng, operator, name, place, last=last, kinds=kinds)
        return start(operator, name, size, faults)

    history = History(
        operator, draw, start=another, plan=lambda rng, pods: plan(operator, rng, pods), late_s=LATE_S, most=4,
        acts=dict.fromkeys(draw("joins").sample(range(1, STEPS - 1), 1), JOIN),
    )  # fmt: skip
    for _ in range(max(len(places), min(3, len(places) + 1))):
        history.add()
    operator.until_ready(*[rank for pod in history.living for rank in pod.ranks])
    history.play()
    history.end(signal.SIGTERM)
    check_weights(operator, history.everyone)
    check_samples(operator, epochs=EPOCHS, samples=SAMPLES)
    return faults_of(operator)


def check_weights(operator: Operator, pods: list[Pod]) -> None:
    """Check the parts of all ranks that have reached the end."""
    weights, checked = expected(), 0
    for pod in pods:
        for number, rank in enumerate(pod.ranks):
            path = result_of(operator, rank, number)
            if rank.poll() != 0 or not path.exists():
                continue
            checked += 1
            for name, (first, stop, part) in torch.load(path, weights_only=True)["parts"].items():
                torch.testing.assert_close(
                    part, weights[name].reshape(-1)[first:stop], rtol=1e-10, atol=1e-10, msg=f"{rank.name} {name}"
                )
    assert checked, operator.evidence()
