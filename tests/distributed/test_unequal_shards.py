"""Jobs whose members hold unequal parts of every unit, through the whole trainer, against one process."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import Gate, Operator, Worker, assert_same_weights
from distributed.pipeline_job_scripts import Decoder
from distributed.test_pipeline_jobs import (
    BATCH,
    BLOCKS,
    at_gate,
    check_evaluations,
    reference,
    result_of,
    start,
    started,
)
from heterotrain_core.contract.plan import Layout, LayoutKind
from support.repeat import times


def shards(*state: int, samples: tuple[int, ...] = ()) -> Layout:
    return Layout(kind=LayoutKind.SHARDED, shards=len(state), state_weights=state, sample_weights=samples)


def check(operator: Operator, members: list[list[Worker]], *, epochs: int = 2, **options: Any) -> None:
    """Check that every rank has ended well, and each member's weights and evaluations are those of one process."""
    operator.finish([worker for member in members for worker in member])
    expected, evaluated = reference(epochs=epochs, **options)
    shapes = {name: p.shape for name, p in Decoder(BLOCKS, **options.get("kind", {})).named_parameters()}
    for member in members:
        whole = {name: torch.full(shape, torch.nan, dtype=torch.double) for name, shape in shapes.items()}
        for worker in member:
            assert worker.code == 0, operator.evidence()
            found = result_of(operator, worker)
            check_evaluations(found["found"], evaluated)
            for name, part in found["parts"].items():
                begin, end = found["places"][name]
                whole[name].view(-1)[begin:end] = part.reshape(-1)
        assert_same_weights(whole, expected)


@pytest.mark.parametrize("seed", range(times(gate=2, every=40)))
def test_any_parts_and_shares_give_the_weights_of_one_process(operate: Callable[..., Operator], seed: int) -> None:
    """Members of several unequal shards, beside whole models and pipelines."""
    rng = random.Random(seed)  # noqa: S311  # seeded chance
    sizes = [[3], [3, 1], [2, 2], [2, 3]][seed]
    edges = sorted(rng.sample(range(1, BATCH), len(sizes) - 1))
    shares = [b - a for a, b in zip([0, *edges], [*edges, BATCH], strict=True)]
    clip_norm = rng.choice([None, 0.5])
    operator = operate(batch_samples=BATCH, parallelism="Auto")
    workers = [
        [start(operator, f"w{number}{rank}", clip_norm=clip_norm) for rank in range(size)]
        for number, size in enumerate(sizes)
    ]
    operator.until_ready(*[worker for member in workers for worker in member])
    layouts: list[Any] = [
        shards(4, 2, 1)
        if seed == 0
        else ()
        if size == 1
        else (3,)
        if seed == 2 and number == 1
        else shards(
            *(rng.randint(1, 9) for _ in range(size)), samples=(0, *(rng.randint(1, 5) for _ in range(size - 1)))
        )
        for number, size in enumerate(sizes)
    ]
    micro = [rng.choice([0, 1, 2, 5]) for _ in sizes]
    operator.plan_members(list(zip(workers, layouts, shares, micro, strict=True)))
    check(operator, workers, clip_norm=clip_norm)


@pytest.mark.parametrize("other", [(3,), shards(1, 1)])
def test_layers_that_some_samples_use(operate: Callable[..., Operator], other: Any) -> None:
    """All ranks exchange all layers in the same order, and change the parameters that any of them has used."""
    operator = operate(batch_samples=BATCH, parallelism="Auto")
    kind = {"rare": True}
    a, b = started(operator, 3, prefix="a", kind=kind), started(operator, 2, prefix="b", kind=kind)
    operator.plan_members([(a, shards(4, 2, 1, samples=(2, 1, 3)), 10, 3), (b, other, 7, 2)])
    check(operator, [a, b], kind=kind)


@pytest.mark.parametrize("place", ["in loss", "backward", "applied"])
def test_a_shard_is_lost_and_the_member_is_formed_anew_without_a_checkpoint(
    operate: Callable[..., Operator], place: str
) -> None:
    """The whole member goes on; the other's ranks wait with their parts, and then divide the model by other weights."""
    operator = operate(batch_samples=BATCH, epochs=3, parallelism="Auto")
    gate = Gate(operator.folder, 8)
    a = started(operator, 1, prefix="a", faults={0: gate.fault})
    b = started(operator, 3, prefix="b", faults={2: {"place": place, "step": 3}})
    operator.plan_members([(a, (), 9, 3), (b, shards(4, 2, 1), 8, 3)])
    at_gate(operator, gate, lambda: operator.plan_members([(a, (), 9, 3), (b[:2], shards(1, 6), 8, 2)]))
    check(operator, [a, b[:2]], epochs=3)


def test_every_layout_follows_every_other_one(operate: Callable[..., Operator], tmp_path: Path) -> None:
    """Shards, other parts of them, stages, and a joiner; then shards from the checkpoint, and stages from theirs."""
    uri = f"file://{tmp_path}/checkpoints"
    operator = operate(batch_samples=BATCH, epochs=5, parallelism="Auto", checkpoint_uri=uri)
    gates = [Gate(operator.folder, step) for step in (2, 9, 5)]
    w = started(operator, 3, faults={number: gate.fault for number, gate in enumerate(gates)})
    operator.plan_members([(w[:2], shards(5, 1, samples=(1, 3)), 17, 4)], spares=w[2:])
    at_gate(operator, gates[0], lambda: operator.plan_members([(w, shards(1, 2, 4), 17, 4)]))
    at_gate(operator, gates[2], lambda: operator.plan_members([(w[:2], (3,), 11, 3), ([w[2]], (), 6, 0)]))
    at_gate(operator, gates[1], lambda: operator.plan_members([(w[::-1], shards(3, 1, 1), 17, 6)]))
    operator.suspend(w)
    later = Gate(operator.folder, 18)  # the job goes on from the checkpoint
    v = started(operator, 2, prefix="v", faults={0: later.fault})
    operator.plan_members([(v, shards(2, 7), 17, 0)])
    operator.suspend(v, later)
    rest = started(operator, 2, prefix="r")
    operator.plan_members([(rest, (2,), 17, 5)])
    check(operator, [rest], epochs=5)
    assert all(values["epoch"] > 2 for values in result_of(operator, rest[0])["found"]), "it begins with the checkpoint"


def test_a_shard_that_leaves_before_there_is_a_plan_hands_its_part_over(operate: Callable[..., Operator]) -> None:
    """The rest of the only member keeps the whole state until a plan names a replacement."""
    operator = operate(batch_samples=BATCH, epochs=4, parallelism="Auto", grace_s=1.0)
    gate = Gate(operator.folder, 3)
    a, b = start(operator, "a0", fault=gate.fault), start(operator, "a1")
    leaver = start(operator, "a2", slow_s=0.05)
    operator.until_ready(a, b, leaver)
    operator.plan_members([([a, b, leaver], shards(1, 2, 4), BATCH, 4)])
    operator.until(gate.reached, "three steps are committed")
    leaver.signal(signal.SIGTERM)
    gate.open()
    operator.finish([leaver])
    assert leaver.code == 0
    (new,) = started(operator, 1, prefix="n")
    operator.plan_members([([new, b, a], shards(3, 1, 2), BATCH, 3)])
    check(operator, [[new, b, a]], epochs=4)


def test_a_shard_out_of_memory_makes_its_member_use_smaller_micro_batches(operate: Callable[..., Operator]) -> None:
    operator = operate(batch_samples=BATCH, epochs=1, parallelism="Auto")
    fault = {"place": "in loss", "step": 2, "do": "exhaust", "every": 0, "times": 2}
    a = started(operator, 2, prefix="a", faults={1: fault})
    operator.plan_members([(a, shards(5, 2, samples=(1, 2)), BATCH, 6)])
    check(operator, [a], epochs=1)
    assert "out of memory with micro-batches of 4 samples: using 2 from now on" in a[1].log()
