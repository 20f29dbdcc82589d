"""A stage whose process really runs out of memory: the job goes on with another cut, chosen by the operator's code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from distributed.harness import Operator, Worker, assert_same_weights
from distributed.memory_scripts import SAMPLES, UNIT_BYTES, UNITS, loss_of, model, optimizer_of, rows
from heterotrain.data.order import permutation
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import units_of
from heterotrain_core.contract.outcome import Cause, Ending
from heterotrain_core.contract.plan import Plan
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.decide.plan.memory_limits import MOST_TRIES
from support.fake_cluster import FakeCluster, pool
from unit.operator.decide.plan.test_pipelines import plan_of

BATCH, EPOCHS = 16, 2
STATE_BYTES = 4 * UNIT_BYTES
"""Parameters, gradients and both moments of a unit."""
FURTHER_BYTES = int(12.6 * UNIT_BYTES)
"""Gradients, moments and temporary tensors of three units take eleven units, and those of four take fourteen."""


def profile(name: str, *, units_that_fit: float, slowness: float) -> PoolProfile:
    """Return what workers of a pool report: too much memory, where they measured it before the limit was there."""
    points = tuple(
        UnitSeconds(micro_batch_samples=n, forward_s=0.003 * n * slowness, backward_s=0.007 * n * slowness)
        for n in (1, 2, 4)
    )
    unit = UnitProfile(
        name="", parameter_bytes=UNIT_BYTES, activation_bytes=2**14, boundary_bytes=2**13, seconds={name: points}
    )
    units = tuple(replace(unit, name=str(index)) for index in range(UNITS))
    return PoolProfile(memory_bytes=int(units_that_fit * STATE_BYTES), units=units)


def a_cluster() -> FakeCluster:
    """Return the operator's side of a job with a fast and a slow worker; neither holds the model alone."""
    spec = {
        "parallelism": {"mode": "Pipeline"}, "elasticPolicy": {"minReplicas": 1}, "backoffLimit": 0,
        "training": {"epochs": EPOCHS, "globalBatchSize": BATCH},
    }  # fmt: skip
    cluster = FakeCluster(pool("a", maxReplicas=1), pool("b", maxReplicas=1), spec=spec).with_nodes("a", "b", cpu="1")
    profiles = {
        "a": profile("a", units_that_fit=5.5, slowness=1),
        "b": profile("b", units_that_fit=4.5, slowness=4),
    }
    cluster.telemetry = Telemetry(profiles=profiles)
    return cluster


def held(plan: Plan) -> dict[str, int]:
    """Return the number of units of each worker."""
    found = {}
    for rank in plan.ranks:
        edges = (0, *plan.members[rank.member].layout.cuts, UNITS)
        found[rank.worker] = edges[rank.stage + 1] - edges[rank.stage]
    return found


def reference() -> dict[str, torch.Tensor]:
    """Train in this process with plain torch; return the final weights."""
    units = units_of(built(model), None)
    InitialValues(seed=0, device=torch.device("cpu")).fill(units)
    whole, (x, y) = units.model, rows().tensors
    optimizer = optimizer_of(whole.parameters())
    for epoch in range(EPOCHS):
        order = permutation(seed=0, epoch=epoch, epoch_samples=SAMPLES, shuffle=True).tolist()
        for cursor in range(0, SAMPLES, BATCH):
            chosen = order[cursor : cursor + BATCH]
            optimizer.zero_grad()
            loss_of(whole(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return {name: p.detach() for name, p in whole.named_parameters()}


def test_a_stage_that_the_kernel_refuses_memory_ends_in_another_cut(operate: Callable[..., Operator]) -> None:
    """The worker of pool a gets no memory for the gradients and moments of the units that its profile promised.

    Each of its processes really ends. The operator's decision follows from the outcome that the process has written.
    """
    cluster = a_cluster().start()
    operator = operate(batch_samples=BATCH, epochs=EPOCHS, parallelism="Pipeline")
    workers: dict[str, Worker] = {}
    cuts: list[int] = []
    while True:
        plan = plan_of(cluster)
        units = held(plan)
        for rank in plan.ranks:
            if rank.worker not in workers:
                limit = FURTHER_BYTES if plan.pool_of(rank) == "a" else 0
                workers[rank.worker] = operator.start(
                    rank.worker, script="distributed.memory_scripts:train", further_bytes=limit
                )
                operator.until_ready(workers[rank.worker])
        (member,) = plan.members
        stages = [workers[rank.worker] for rank in plan.ranks]
        (name,) = (rank.worker for rank in plan.ranks if plan.pool_of(rank) == "a")
        assert units[name] not in cuts, "no cut is tried twice"
        cuts.append(units[name])
        operator.plan_members([(stages, member.layout.cuts, BATCH, member.micro_batch_samples)])
        operator.until(lambda name=name: workers[name].poll() is not None, f"{name} ends")  # type: ignore[misc]  # a default argument binds the loop's variable
        if workers[name].code == 0:
            break
        outcome = workers[name].outcome
        assert outcome is not None
        assert (outcome.ending, outcome.cause) == (Ending.FAILED, Cause.OUT_OF_DEVICE_MEMORY), operator.evidence()
        cluster.end(name, Ending.FAILED, exit_code=1, reason=outcome.reason, cause=outcome.cause)
        cluster.settle()
        cluster.pass_time(60).settle()
        cluster.schedule().run()
        cluster.settle()
    operator.finish(stages)
    assert 2 <= len(cuts) <= MOST_TRIES, operator.evidence()
    assert sorted(cuts, reverse=True) == cuts
    assert (cluster.status["restarts"], cluster.condition("Failed")[0]) == (0, "False")
    assert all(worker.code == 0 for worker in stages), operator.evidence()
    found: dict[str, torch.Tensor] = {}
    for worker in stages:
        found |= torch.load(operator.folder / f"{worker.name}.pt", weights_only=True)
    expected = reference()
    assert_same_weights({name: found[name] for name in expected}, expected)
