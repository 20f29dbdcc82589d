"""Jobs whose members hold a model in stages, through the whole trainer, against one process."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.harness import Gate, Operator, Worker, assert_same_weights
from distributed.pipeline_job_scripts import Decoder, loss_of, measure, text
from heterotrain.data.order import permutation
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from heterotrain_core.contract.outcome import Cause, Ending
from heterotrain_core.contract.plan import Layout, LayoutKind, Plan

SCRIPT = "distributed.pipeline_job_scripts:train"
BLOCKS, SAMPLES, BATCH = 5, 96, 17
UNITS = BLOCKS + 2


def start(operator: Operator, name: str, **arguments: Any) -> Worker:
    return operator.start(name, script=SCRIPT, **arguments)


def started(operator: Operator, count: int, **arguments: Any) -> list[Worker]:
    """Start so many workers, and wait until they are ready."""
    return operator.start_workers(count, script=SCRIPT, **arguments)


def result_of(operator: Operator, worker: Worker) -> dict[str, Any]:
    path = operator.folder / f"{worker.name}-0.pt"
    assert path.exists(), worker.log()
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def weights_of(operator: Operator, workers: Sequence[Worker]) -> dict[str, torch.Tensor]:
    """Put a member's final weights together; a tied parameter has the same values on all stages that hold it."""
    whole: dict[str, torch.Tensor] = {}
    for worker in workers:
        for name, part in result_of(operator, worker)["parts"].items():
            torch.testing.assert_close(part, whole.setdefault(name, part), rtol=0, atol=0)
    order = dict(Decoder(BLOCKS).named_parameters())
    assert set(whole) == set(order)
    return {name: whole[name] for name in order}


def reference(
    *,
    epochs: int = 2,
    clip_norm: float | None = None,
    samples: int = SAMPLES,
    state: Mapping[str, torch.Tensor] | None = None,
    kind: Mapping[str, bool] = {},
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Train in this process with plain torch; return the final weights, and results on the test set by epoch.

    ``state`` takes the place of the weights that layers draw; ``kind`` is of the ``Decoder``.
    """
    found = []
    units = units_of(built(lambda: Decoder(BLOCKS, **kind).double()), "blocks")
    InitialValues(seed=0, device=torch.device("cpu")).fill(units)
    model, (x, y) = units.model, text(samples).tensors
    if state is not None:
        model.load_state_dict(state)
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if not name.endswith("weight")]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, eps=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for epoch in range(epochs):
        order = permutation(seed=0, epoch=epoch, epoch_samples=samples, shuffle=True).tolist()
        for cursor in range(0, samples, BATCH):
            chosen = order[cursor : cursor + BATCH]
            optimizer.zero_grad()
            total, weight = loss_of(model(x[chosen]), y[chosen])
            (total / weight).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([(gradient**2).sum() for gradient in gradients]).sum().sqrt()
            if clip_norm is not None and norm > clip_norm:
                for gradient in gradients:
                    gradient.mul_(clip_norm / norm)
            optimizer.step()
            scheduler.step()
        test_x, test_y = text(13).tensors
        with torch.no_grad():
            values = {name: float(value) for name, value in measure(model(test_x), test_y).items()}
        found.append({"epoch": epoch, **values})
    return {name: p.detach() for name, p in named.items()}, found


def check_evaluations(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Check what a rank found after each epoch in which it took part; a repeated hook finds the same."""
    for values in found:
        assert values == pytest.approx(expected[int(values["epoch"])], rel=1e-9)


def check(
    operator: Operator, members: Sequence[Sequence[Worker]], *, epochs: int = 2, clip_norm: float | None = None,
    samples: int = SAMPLES, kind: Mapping[str, bool] = {},
) -> None:  # fmt: skip
    """Check that every rank has ended well, with the weights and the evaluation of one process."""
    operator.finish([worker for member in members for worker in member])
    expected, evaluated = reference(epochs=epochs, clip_norm=clip_norm, samples=samples, kind=kind)
    for member in members:
        for worker in member:
            assert worker.code == 0, operator.evidence()
            check_evaluations(result_of(operator, worker)["found"], evaluated)
        assert_same_weights(weights_of(operator, member), expected)


def at_gate(operator: Operator, gate: Gate, change: Callable[[], Plan]) -> None:
    """Write a plan while a rank waits at a gate, and open it when all members have read the plan."""
    operator.until(gate.reached, "the gate is reached")
    told = {rank.worker_uid for rank in change().ranks}
    operator.until_read(worker for worker in operator.workers.values() if worker.uid in told)
    gate.open()


@pytest.mark.parametrize("seed", range(4))
def test_any_cuts_and_shares_give_the_weights_of_one_process(operate: Callable[..., Operator], seed: int) -> None:
    """Members of 1, 2 and 3 stages, with different cuts, side by side; blocks that share tensors, or do not."""
    rng = random.Random(seed)  # noqa: S311  # seeded chance
    kind = {"rotated": bool(seed % 2)}
    sizes = [[2, 1], [3], [3, 2], [2, 2, 1]][seed]
    edges = sorted(rng.sample(range(1, BATCH), len(sizes) - 1))
    shares = [b - a for a, b in zip([0, *edges], [*edges, BATCH], strict=True)]
    clip_norm = rng.choice([None, 0.5])
    operator = operate(batch_samples=BATCH, parallelism="Pipeline")
    workers = [
        [start(operator, f"w{number}{stage}", clip_norm=clip_norm, kind=kind) for stage in range(size)]
        for number, size in enumerate(sizes)
    ]
    operator.until_ready(*[worker for member in workers for worker in member])
    cuts = [tuple(sorted(rng.sample(range(1, UNITS), size - 1))) for size in sizes]
    micro = [rng.choice([0, 1, 2, 3]) for _ in sizes]
    operator.plan_members(list(zip(workers, cuts, shares, micro, strict=True)))
    check(operator, workers, clip_norm=clip_norm, kind=kind)


@pytest.mark.parametrize("place", ["in loss", "backward", "applied", "in a hook"])
def test_a_stage_is_lost_and_the_other_member_goes_on(operate: Callable[..., Operator], place: str) -> None:
    """The rest of the broken member waits as a spare with its state, and is cut anew without a checkpoint."""
    operator = operate(batch_samples=BATCH, epochs=3, parallelism="Pipeline")
    fault = {"place": place, "step": 0 if place == "in a hook" else 3}
    gate = Gate(operator.folder, 8)
    a = started(operator, 2, prefix="a", faults={0: gate.fault})
    b = started(operator, 3, prefix="b", faults={2: fault})
    operator.plan_members([(a, (3,), 9, 3), (b, (2, 5), 8, 2)])
    at_gate(operator, gate, lambda: operator.plan_members([(a, (3,), 9, 3), (b[:2], (4,), 8, 2)]))
    check(operator, [a, b[:2]], epochs=3)


def test_a_job_is_cut_anew_and_goes_on_from_a_checkpoint_under_other_cuts(
    operate: Callable[..., Operator], tmp_path: Path
) -> None:
    """Two stages; three with a joiner; a whole model and a pipeline; then, from the checkpoint, two other ranks."""
    uri = f"file://{tmp_path}/checkpoints"
    operator = operate(batch_samples=BATCH, epochs=5, parallelism="Pipeline", checkpoint_uri=uri)
    gates = [Gate(operator.folder, step) for step in (2, 9, 5)]
    w = started(operator, 3, faults={number: gate.fault for number, gate in enumerate(gates)})
    first, second, third = gates[0], gates[2], gates[1]
    operator.plan_members([(w[:2], (4,), 17, 4)], spares=w[2:])
    at_gate(operator, first, lambda: operator.plan_members([(w, (1, 5), 17, 4)]))
    at_gate(operator, second, lambda: operator.plan_members([([w[1]], (), 6, 2), ([w[2], w[0]], (3,), 11, 3)]))
    operator.suspend(w, third)
    rest = started(operator, 2, prefix="r")
    operator.plan_members([(rest, (2,), 17, 0)])
    check(operator, [rest], epochs=5)


def test_a_plan_may_change_nothing_but_the_cut_or_who_is_in_which_member(operate: Callable[..., Operator]) -> None:
    """The same ranks in the same order, first with another cut, then in other members."""
    operator = operate(batch_samples=BATCH, epochs=3, parallelism="Pipeline")
    gates = [Gate(operator.folder, step) for step in (3, 8)]
    w = started(operator, 3, faults={number: gate.fault for number, gate in enumerate(gates)})
    operator.plan_members([(w[:2], (4,), 9, 3), ([w[2]], (), 8, 2)])
    at_gate(operator, gates[0], lambda: operator.plan_members([(w[:2], (2,), 9, 3), ([w[2]], (), 8, 2)]))
    at_gate(operator, gates[1], lambda: operator.plan_members([([w[0]], (), 9, 3), (w[1:], (2,), 8, 2)]))
    check(operator, [[w[0]], w[1:]], epochs=3)
    assert "stage 1 of 2: units 0 to 1 of 7" in w[0].log()
    assert "stage 1 of 2: units 0 to 1 of 7" in w[1].log()


def test_stages_compute_activations_again_as_the_plan_says(operate: Callable[..., Operator]) -> None:
    """One stage of a pipeline, and a whole model; then the other stage, under the same cut."""
    operator = operate(batch_samples=BATCH, parallelism="Pipeline")
    gate = Gate(operator.folder, 3)
    w = started(operator, 3, faults={0: gate.fault})

    def change(*again: int) -> Plan:
        pipeline = Layout(kind=LayoutKind.PIPELINE, cuts=(3,), recomputing=again)
        return operator.plan_members([(w[:2], pipeline, 9, 3), ([w[2]], Layout(recomputing=(0,)), 8, 2)])

    change(1)
    at_gate(operator, gate, lambda: change(0))
    check(operator, [w[:2], [w[2]]])
    said = ["activations computed again" in worker.log().split("plan 2.")[0] for worker in w]
    assert said == [False, True, True]
    assert "units 0 to 2 of 7, activations computed again" in w[0].log()


def test_stages_change_partners_under_the_same_cuts(operate: Callable[..., Operator]) -> None:
    """No rank gets another part of the model; all connections inside members are new."""
    operator = operate(batch_samples=BATCH, parallelism="Pipeline")
    gate = Gate(operator.folder, 3)
    w = started(operator, 4, faults={0: gate.fault})
    operator.plan_members([(w[:2], (4,), 11, 3), (w[2:], (4,), 6, 2)])
    at_gate(operator, gate, lambda: operator.plan_members([([w[0], w[3]], (4,), 11, 3), ([w[2], w[1]], (4,), 6, 2)]))
    check(operator, [[w[0], w[3]], [w[2], w[1]]])


def test_gradients_are_clipped_by_the_norm_over_all_stages(operate: Callable[..., Operator]) -> None:
    """Each stage of the only member holds a part of the gradient that no other rank holds."""
    operator = operate(batch_samples=BATCH, epochs=1, parallelism="Pipeline")
    w = started(operator, 3, clip_norm=0.2)
    operator.plan_members([(w, (2, 5), BATCH, 4)])
    check(operator, [w], epochs=1, clip_norm=0.2)


def test_a_stage_out_of_memory_makes_its_member_use_smaller_micro_batches(operate: Callable[..., Operator]) -> None:
    operator = operate(batch_samples=BATCH, parallelism="Pipeline")
    fault = {"place": "in loss", "step": 2, "do": "exhaust"}
    a, b = started(operator, 2, prefix="a", faults={1: fault}), started(operator, 1, prefix="b")
    operator.plan_members([(a, (3,), 12, 4), (b, (), 5, 0)])
    check(operator, [a, b])


def test_a_stage_out_of_memory_with_single_samples_keeps_no_activations(operate: Callable[..., Operator]) -> None:
    """Micro-batches of 2 samples, then of 1, then units compute their activations again; nothing is left after that."""
    operator = operate(batch_samples=BATCH, epochs=1, parallelism="Pipeline")
    fault = {"place": "in loss", "step": 2, "do": "exhaust", "every": 0, "times": 2}
    a = started(operator, 2, prefix="a", faults={1: fault})
    operator.plan_members([(a, (3,), BATCH, 2)])
    check(operator, [a], epochs=1)
    assert "out of memory with micro-batches of 2 samples: using 1 from now on" in a[1].log()
    assert "activations of units are computed again from now on" in a[1].log()
    assert "computed again" not in a[0].log()


def test_a_stage_that_cannot_hold_a_single_sample_fails_with_a_sentence(operate: Callable[..., Operator]) -> None:
    operator = operate(batch_samples=BATCH, epochs=1, parallelism="Pipeline")
    fault = {"place": "in loss", "step": 2, "do": "exhaust", "every": 0, "times": 3}
    a = started(operator, 2, prefix="a", faults={1: fault})
    operator.plan_members([(a, (3,), BATCH, 2)])
    operator.finish([a[1]])
    assert a[1].code not in (0, None)
    assert a[1].outcome is not None
    assert "a single sample does not fit into memory" in a[1].outcome.reason
    assert a[1].outcome.cause is Cause.OUT_OF_DEVICE_MEMORY, "the operator cuts the model again for it"
    a[0].signal(signal.SIGTERM)


def test_a_stage_may_take_longer_than_the_time_between_two_looks_at_the_group(
    operate: Callable[..., Operator],
) -> None:
    """The other stage waits for a message for 0.6 s in each micro-batch."""
    operator = operate(batch_samples=BATCH, epochs=1, parallelism="Pipeline")
    samples = 2 * BATCH
    a = [start(operator, "a0", samples=samples), start(operator, "a1", samples=samples, slow_s=0.6)]
    operator.until_ready(*a)
    operator.plan_members([(a, (3,), BATCH, 9)])
    check(operator, [a], epochs=1, samples=samples)
    assert a[0].metric("heterotrain_repeated_steps_total") in (None, 0.0)
    assert "is repeated" not in a[0].log()


def test_units_are_measured_before_the_first_plan(operate: Callable[..., Operator]) -> None:
    operator = operate(batch_samples=BATCH, parallelism="Pipeline")
    (worker,) = started(operator, 1)
    assert worker.metric("heterotrain_units") == UNITS
    assert worker.metric("heterotrain_unit_profile_complete") == 1.0
    assert (worker.metric("heterotrain_usable_memory_bytes") or 0) > 0
    assert worker.metric("heterotrain_training_state_ratio") == 4.0
    assert (worker.metric("heterotrain_update_seconds_per_parameter_byte") or 0) > 0
    assert (worker.metric("heterotrain_unit_seconds") or 0) > 0


def test_micro_batches_of_a_model_in_stages_are_refused_in_one_sentence(operate: Callable[..., Operator]) -> None:
    operator = operate(batch_samples=BATCH, parallelism="Pipeline")
    worker = operator.start_ready("w0", script="distributed.pipeline_job_scripts:loops")
    operator.plan_members([([worker], (), BATCH, 0)])
    operator.finish([worker])
    assert "replace the loop over step.micro_batches() by step.compute(loss_fn)" in worker.log()


def test_a_stage_that_leaves_trains_on_until_the_next_plan_has_its_part(operate: Callable[..., Operator]) -> None:
    """SIGTERM for a stage of the only member: no step is lost, no checkpoint is read, and a spare takes over."""
    operator = operate(batch_samples=BATCH, epochs=5, parallelism="Pipeline", grace_s=120.0)
    gate = Gate(operator.folder, 12)
    a, leaver, spare = start(operator, "a0", fault=gate.fault), start(operator, "a1"), start(operator, "s")
    operator.until_ready(a, leaver, spare)
    operator.plan_members([([a, leaver], (3,), BATCH, 4)], spares=[spare])
    operator.until_step(a, 3)
    leaver.signal(signal.SIGTERM)
    operator.until(gate.reached, "the old layout trains on")
    assert leaver.poll() is None
    operator.plan_members([([spare, a], (4,), BATCH, 3)])
    gate.open()
    check(operator, [[spare, a]], epochs=5)
    assert leaver.poll() == 0, operator.evidence()
    assert leaver.outcome is not None
    assert leaver.outcome.ending is Ending.LEFT
    assert "formation 1.1" not in a.log() + spare.log()
    assert "is repeated" not in a.log() + spare.log()


def test_a_stage_that_leaves_before_there_is_a_plan_hands_its_part_over(operate: Callable[..., Operator]) -> None:
    """The grace period is half over and no plan came: the rest of the member keeps the whole state until one comes."""
    operator = operate(batch_samples=BATCH, epochs=4, parallelism="Pipeline", grace_s=1.0)
    gate = Gate(operator.folder, 3)
    a, leaver = start(operator, "a0", fault=gate.fault), start(operator, "a1", slow_s=0.05)
    operator.until_ready(a, leaver)
    operator.plan_members([([a, leaver], (3,), BATCH, 4)])
    operator.until(gate.reached, "three steps are committed")
    leaver.signal(signal.SIGTERM)
    gate.open()
    operator.finish([leaver])
    assert leaver.code == 0
    (new,) = started(operator, 1, prefix="n")
    operator.plan_members([([new, a], (4,), BATCH, 3)])
    check(operator, [[new, a]], epochs=4)


def test_a_stage_that_nobody_else_holds_comes_back_from_a_checkpoint(
    operate: Callable[..., Operator], tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}/checkpoints"
    operator = operate(
        batch_samples=BATCH, epochs=4, parallelism="Pipeline", checkpoint_uri=uri, checkpoint_interval_s=0.0
    )
    fault = {"place": "in loss", "step": 12}
    a, lost = started(operator, 2, prefix="a", faults={1: fault})
    operator.plan_members([([a, lost], (3,), 17, 4)])
    operator.finish([lost])
    (b,) = started(operator, 1, prefix="b")
    operator.plan_members([([b, a], (4,), 17, 3)])
    check(operator, [[b, a]], epochs=4)
    assert "continue from a checkpoint" in a.log()


def test_training_begins_again_where_a_lost_stage_is_in_no_checkpoint(operate: Callable[..., Operator]) -> None:
    """Every worker that holds the rest ends with a cause; the operator's new workers begin with the first step."""
    operator = operate(batch_samples=BATCH, epochs=2, parallelism="Pipeline")
    a, lost = started(operator, 2, prefix="a", faults={1: {"place": "in loss", "step": 5}})
    operator.plan_members([([a, lost], (3,), 17, 4)])
    operator.finish([lost])
    (b,) = started(operator, 1, prefix="b")
    operator.plan_members([([b, a], (4,), 17, 3)])
    operator.finish([a, b])
    for worker in (a, b):
        assert worker.outcome is not None, operator.evidence()
        assert (worker.outcome.ending, worker.outcome.cause) == (Ending.FAILED, Cause.STATE_LOST)
        assert "whole training state of step 5" in worker.outcome.reason
    c, d = started(operator, 2, prefix="c")
    operator.plan_members([([c, d], (4,), 17, 3)])
    check(operator, [[c, d]])
