"""Seeded histories of jobs in acts, each under another parallelism from the checkpoint of the act before.

In each act, workers are lost, leave and join at random places. An act ends when all workers are asked to leave, or are
killed at once. Each history ends with the weights, the evaluations and the samples of one process. See
``drawn_histories`` for its seeds.
"""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from distributed.drawn_histories import (
    END,
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
from distributed.fault_injectors import FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE, PHASE_PLACES, STAGE_PLACES
from distributed.harness import Operator, Worker
from distributed.test_divided_histories import LATE_S, members_of
from distributed.test_pipeline_jobs import BATCH, SAMPLES, SCRIPT, check_evaluations, reference
from distributed.test_sharded_histories import plan, start
from heterotrain_core.contract.outcome import Ending
from support.waiting import wait_until

EPOCHS = 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)
MODES = ("Data", "Sharded", "Pipeline")
PAIRS = [(one, other) for one, other in itertools.product(MODES, MODES) if one != other]
"""Every order of two modes: one writes the checkpoint that the other reads."""
BY_STEP = ("step", "in loss", "backward", "reducing", "reduced", "applied")
PLACES = {
    "Data": (*BY_STEP, "in a hook", *FORMING_PLACES, LAST_PLACE),
    "Sharded": (*BY_STEP, *PHASE_PLACES, "in a hook", *FORMING_PLACES, LAST_PLACE),
    "Pipeline": (*BY_STEP, *STAGE_PLACES, *PHASE_PLACES, "in a hook", *FORMING_PLACES, HAND_OVER_PLACE, LAST_PLACE),
}
LAST_VISITS = {"in a hook": EPOCHS - 1, LAST_PLACE: 0, HAND_OVER_PLACE: 0} | dict.fromkeys(FORMING_PLACES, 2)
MOST_RANKS = 6
GRACE_S = 2.0


@cache
def expected() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    return reference(epochs=EPOCHS)


def act(
    operator: Operator, draw: Draws, mode: str, *, number: int, everyone: list[Pod], begin: int, until: int | None
) -> History:
    """Return part of a job under one parallelism, with its first workers.

    Args:
        operator: of the job.
        draw: the decisions.
        mode: the parallelism.
        number: of the act.
        everyone: the workers of earlier acts; those of this act are added.
        begin: the step from which it goes on.
        until: the step at which it ends, ``None`` for the job's end.
    """
    rng, first = draw("act", number), len(everyone)
    last = STEPS - 2 if until is None else until - 1
    faults = rng.randint(0, 2)

    def another(count: int, gates: list[dict[str, Any]]) -> Pod:
        rng, name = draw("worker", count), f"w{count}"
        room = MOST_RANKS - sum(len(pod.ranks) for pod in history.living)
        size = rng.randint(1, max(1, min(3, room))) if mode == "Sharded" else 1
        given: dict[int, dict[str, Any]] = {rank: {"gates": gates} for rank in range(size)}
        if count - first < faults:
            place, kinds = rng.choice(PLACES[mode]), ["die", "die", "leave"]
            fault = drawn_fault(rng, operator, name, place, last=0, kinds=kinds, tells=size == 1)
            in_step = rng.randint(min(begin, last), last)
            fault["step"] = rng.randint(0, LAST_VISITS[place]) if place in LAST_VISITS else in_step
            given[rng.randrange(size)] |= fault
        return start(operator, name, size, given, script=SCRIPT)

    ends = {} if until is None else {until: END}
    joins = dict.fromkeys(draw("joins", number).sample(range(begin + 1, last), 1), JOIN) if last > begin + 1 else {}
    history = History(
        operator, draw, start=another, plan=lambda stream, pods: write_plan(operator, stream, mode, pods),
        late_s=LATE_S, prompt=draw.chance(0.7, "the operator answers to announced leaves", number), acts=joins | ends,
        name=f"{number}-", everyone=everyone,
    )  # fmt: skip
    for _ in range(max(faults, rng.randint(1, 3))):
        operator.until_ready(*history.add().ranks)
    return history


def write_plan(operator: Operator, rng: random.Random, mode: str, pods: list[Pod]) -> None:
    """Give the workers random members, shares and micro-batches."""
    if mode == "Sharded":
        plan(operator, rng, pods)
        return
    workers = [pod.ranks[0] for pod in pods]
    members, spares = members_of(rng, workers)
    if mode == "Data":
        members = [([worker], (), 1, rng.choice([0, 1, 3])) for worker in workers]
        edges = sorted(rng.sample(range(1, BATCH), len(workers) - 1))
        shares = [b - a for a, b in zip([0, *edges], [*edges, BATCH], strict=True)]
        members = [(own, cuts, share, micro) for (own, cuts, _, micro), share in zip(members, shares, strict=True)]
        spares = []
    operator.plan_members(members, spares=spares)


@pytest.mark.parametrize("seed", seeds(gate=2, every=200))
def test_history(operate: Callable[..., Operator], seed: int) -> None:
    """Two to four acts, the first two of which are a pair of modes by the seed."""
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
    draw = Draws(seed)
    rng = draw("acts")
    modes = [*PAIRS[seed % len(PAIRS)], *rng.choices(MODES, k=rng.randint(0, 2))]
    operator = in_own_folder(operate(batch_samples=BATCH, epochs=EPOCHS, peer_timeout_s=0.3, grace_s=GRACE_S), name)
    checkpoints = {"checkpoint_uri": f"file://{operator.folder}/checkpoints", "checkpoint_interval_s": 0.0}
    pods: list[Pod] = []
    begin = 0
    for number, mode in enumerate(modes, 1):
        operator.config = replace(operator.config, parallelism=mode, **checkpoints)
        until = None if number == len(modes) else STEPS * number // len(modes) - rng.randint(0, 2)
        part = act(operator, draw, mode, number=number, everyone=pods, begin=begin, until=until)
        if part.play():
            break
        begin = until or STEPS
    part.end(signal.SIGTERM)
    check(operator, pods)
    return faults_of(operator)


def check(operator: Operator, pods: list[Pod]) -> None:
    """Check what all ranks ended with."""
    (weights, evaluated), checked = expected(), 0
    for rank, number in [(rank, number) for pod in pods for number, rank in enumerate(pod.ranks)]:
        check_end(rank)
        path = result_of(operator, rank, number)
        if rank.poll() != 0 or not path.exists():
            continue
        checked += 1
        found = torch.load(path, weights_only=True)
        for name, part in found["parts"].items():
            first, stop = found["places"][name]
            torch.testing.assert_close(
                part.reshape(-1),
                weights[name].reshape(-1)[first:stop],
                rtol=1e-10,
                atol=1e-10,
                msg=f"{rank.uid} {name}",
            )
        check_evaluations(found["found"], evaluated)
    assert checked, operator.evidence()
    check_samples(operator, epochs=EPOCHS, samples=SAMPLES)


def check_end(rank: Worker) -> None:
    """No worker fails by itself; SIGTERM may come before its handler is set. A process may still be ending."""
    wait_until(lambda: rank.poll() is not None, f"{rank.name} ends", timeout_s=60)
    assert rank.poll() in (0, -signal.SIGKILL, -signal.SIGTERM), rank.log()
    assert rank.outcome is None or rank.outcome.ending is not Ending.FAILED, rank.log()
