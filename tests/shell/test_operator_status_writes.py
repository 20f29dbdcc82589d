"""When and with which fields the status is written."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from heterotrain_operator.api.status import as_body
from heterotrain_operator.cluster_state.parse import (
    parse_job,
)
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.memory import JobMemory
from heterotrain_operator.engine.status_writer import NUMBERS_PER_S
from support.fake_cluster import FakeCluster
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, without_competition


@pytest.mark.looptime
async def test_numbers_are_written_at_intervals_and_changes_at_once() -> None:
    kube = FakeKube()
    clocks = Clocks(monotonic=asyncio.get_running_loop().time)
    app = without_competition(kube, status_interval_s=5.0, clocks=clocks)
    cluster = FakeCluster().with_nodes("a", "b", "c")
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job
    app.store.jobs.put(parse_job(cluster.job))
    await app.reconciler.run_once(KEY)
    memory = app.reconciler._memories[KEY]
    job = app.store.jobs.get(KEY)
    assert job is not None

    def writes() -> int:
        return len([call for call in kube.writes if call[0] == "merge status"])

    first = writes()
    await asyncio.sleep(1)
    numbers = replace_status(job, step=5)
    assert await app.statuses.write(job, numbers, memory) == pytest.approx(4.0)
    assert writes() == first
    conditions = as_body(job.status)["conditions"]
    reworded = replace_status(
        job, conditions=[{**each, "message": "the same with newer numbers"} for each in conditions]
    )
    assert await app.statuses.write(job, reworded, memory) == pytest.approx(4.0)
    assert writes() == first
    change = replace_status(job, step=5, restarts=1)
    assert await app.statuses.write(job, change, memory) is None
    assert writes() == first + 1
    await asyncio.sleep(6)
    job = app.store.jobs.get(KEY)
    assert job is not None
    assert await app.statuses.write(job, reworded, memory) is None
    assert writes() == first + 2, "late, but written"


async def test_jobs_take_turns_to_write_numbers_and_a_change_takes_none() -> None:
    kube, now_s = FakeKube(), 0.0
    app = without_competition(kube, status_interval_s=0.0, clocks=Clocks(monotonic=lambda: now_s))
    jobs = []
    for name in ("a", "b", "c"):
        body = copy.deepcopy(FakeCluster().job)
        body["metadata"] |= {"name": name, "uid": f"uid-{name}"}
        kube.objects["heterotrainjobs", "ns", name] = body
        app.store.jobs.put(parse_job(body))
        jobs.append(parse_job(body))
    memories = [JobMemory(uid=job.uid) for job in jobs]

    async def waits(**fields: object) -> list[float | None]:
        found = []
        for key, memory in zip([job.key for job in jobs], memories, strict=True):
            job = app.store.jobs.get(key)
            assert job is not None
            found.append(await app.statuses.write(job, replace_status(job, **fields), memory))
        return found

    turn_s = 1 / NUMBERS_PER_S
    assert await waits(step=1) == [None, None, None], "the first status"
    assert await waits(step=5) == [None, pytest.approx(turn_s), pytest.approx(2 * turn_s)]
    now_s = turn_s
    assert await waits(step=6) == [pytest.approx(2 * turn_s), None, pytest.approx(turn_s)], "each keeps its turn"
    assert await waits(step=6, restarts=1) == [None, None, None]


def replace_status(job: object, **fields: object) -> object:
    """Return the job's status with other fields."""
    status = job.status  # type: ignore[attr-defined]  # a JobView
    return type(status).model_validate({**as_body(status), **fields})


async def test_fields_that_an_older_definition_of_jobs_lacks_are_left_out_of_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise no status could be written until the definition is updated, and no failure would be counted."""
    kube = FakeKube()
    app = an_app(kube)
    merge, older = kube.merge, [True]

    async def pruning(*where: Any, **which: Any) -> Any:
        """Store a status as an API server with an older definition does."""
        patch = where[-1]
        if older[0] and "status" in patch:
            known = copy.deepcopy({name: value for name, value in patch["status"].items() if name != "selector"})
            for each in known.get("pools") or ():
                each.pop("placed")
            where = (*where[:-1], {**patch, "status": known})
        return await merge(*where, **which)

    monkeypatch.setattr(kube, "merge", pruning)
    await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert "selector" not in status
    assert status["desiredReplicas"] == 3
    kube.calls.clear()
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert len(kube.writes) <= 1, "the missing fields alone are no reason to write"
    older[0] = False
    app.reconciler.reapply()  # after a full list, the definition may be newer
    cluster_body = kube.objects["heterotrainjobs", "ns", "job"]
    app.events.job({**cluster_body, "metadata": {**cluster_body["metadata"], "resourceVersion": "9999"}}, deleted=False)
    await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert "selector" in status
    assert all("placed" in each for each in status["pools"])
