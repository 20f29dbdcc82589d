"""New revisions change shares at their boundary, on all ranks in the same step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Gate, Operator, assert_finished
from heterotrain_core.contract.plan import Boundary, BoundaryKind

Operate = Callable[..., Operator]


def shares_by_step(folder: Path) -> dict[int, tuple[int, ...]]:
    """Return the shares of each committed step; fail when two ranks disagree."""
    found: dict[int, tuple[int, ...]] = {}
    for path in (folder / "samples").glob("*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            assert found.setdefault(line["step"], tuple(line["shares"])) == tuple(line["shares"])
    return found


@pytest.mark.parametrize(
    ("boundary", "switch"),
    [(Boundary(), 6), (Boundary(kind=BoundaryKind.STEPS, every_steps=4), 4), (Boundary(kind=BoundaryKind.NEVER), 6)],
    ids=["epoch", "steps", "never"],
)
def test_a_revision_takes_effect_at_its_boundary(
    operate: Operate, tmp_path: Path, boundary: Boundary, switch: int
) -> None:
    """Only one worker gets the revision; the others receive its bytes with the vote, and all switch at the same step.

    Heartbeats would spread the plan, too, so the workers take nothing from them.
    """
    operator, gate = operate(), Gate(tmp_path, 2)
    workers = operator.start_workers(3, faults={0: gate.fault}, gossip=False)
    operator.plan(workers, shares=(6, 5, 5))
    operator.until(gate.reached, "step 2")
    operator.plan(workers, to=[workers[2]], new_generation=False, shares=(10, 4, 2), boundary=boundary)
    operator.until_read([workers[2]])
    gate.open()
    assert_finished(operator, workers)
    assert shares_by_step(tmp_path) == {step: (6, 5, 5) if step < switch else (10, 4, 2) for step in range(12)}


def test_probes_vary_the_shares_of_the_first_steps(operate: Operate, tmp_path: Path) -> None:
    """Each vector is used for its number of steps in each epoch, then the plan's own shares."""
    operator = operate()
    workers = operator.start_workers(2)
    operator.plan(workers, shares=(8, 8), probe=((10, 6), (6, 10)), probe_steps=2)
    assert_finished(operator, workers)
    epoch = [(10, 6)] * 2 + [(6, 10)] * 2 + [(8, 8)] * 2
    assert shares_by_step(tmp_path) == dict(enumerate(epoch + epoch))


def test_batch_and_learning_rate_change_at_the_boundary(operate: Operate, tmp_path: Path) -> None:
    """A plan may change the global batch; samples stay exactly once."""
    operator, gate = operate(), Gate(tmp_path, 2)
    workers = operator.start_workers(2, faults={0: gate.fault})
    operator.plan(workers)
    operator.until(gate.reached, "step 2")
    operator.plan(workers, new_generation=False, batch_samples=24, shares=(16, 8))
    operator.until_read(workers)
    gate.open()
    assert_finished(operator, workers, size=lambda step: 16 if step < 6 else 24)


def test_a_new_batch_is_probed_and_outlives_a_member(operate: Operate, tmp_path: Path) -> None:
    """A new batch applies within an epoch, with the probe's shares and those of the survivors of a loss."""
    operator, gate = operate(), Gate(tmp_path, 1)
    doomed = {"place": "launched", "step": 4}  # before its vote, so that the others cannot commit the step
    workers = operator.start_workers(3, faults={0: gate.fault, 2: doomed})
    operator.plan(workers, shares=(6, 5, 5))
    operator.until(gate.reached, "step 1")
    operator.plan(
        workers, new_generation=False, batch_samples=20, shares=(10, 6, 4),
        probe=((12, 5, 3), (8, 7, 5)), probe_steps=1, boundary=Boundary(kind=BoundaryKind.STEPS, every_steps=2),
    )  # fmt: skip
    operator.until_read(workers)
    gate.open()
    assert_finished(operator, workers[:2], size=lambda step: 16 if step < 2 else 20)
    shares = shares_by_step(tmp_path)
    assert [shares[step] for step in range(4)] == [(6, 5, 5), (6, 5, 5), (12, 5, 3), (8, 7, 5)]
    assert [(len(shares[step]), sum(shares[step])) for step in range(4, 11)] == [
        (2, 20), (2, 4), (2, 20), (2, 20), (2, 20), (2, 20), (2, 16)
    ]  # fmt: skip


def test_a_foreign_and_an_older_plan_are_refused(operate: Operate, tmp_path: Path) -> None:
    """A plan of another job, an older plan and a broken plan change nothing."""
    operator, gate = operate(), Gate(tmp_path, 2)
    workers = operator.start_workers(2, faults={0: gate.fault})
    operator.plan(workers)
    operator.until(gate.reached, "step 2")
    mount = workers[0].folder / "plan" / "plan.json"
    good = mount.read_text()
    for name, text in [
        ("foreign", good.replace("job-uid", "another-uid")), ("older", good.replace('"revision":1', '"revision":0')),
        ("broken", good[: len(good) // 2]),
    ]:  # fmt: skip
        scratch = tmp_path / name
        scratch.write_text(text)
        refusals = workers[0].log().count("refused the mounted plan")
        scratch.replace(mount)
        operator.until(lambda n=refusals: workers[0].log().count("refused the mounted plan") > n, f"{name} is refused")  # type: ignore[misc]  # a default argument binds the loop's variable
    gate.open()
    assert_finished(operator, workers)
