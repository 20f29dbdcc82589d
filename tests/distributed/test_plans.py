"""New revisions change shares at their boundary, on all ranks in the same step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed.harness import Operator, Worker, assert_same_weights, reference
from heterotrain_core.contract.plan import Boundary, BoundaryKind
from support.lineage import lineage

Operate = Callable[..., Operator]


def shares_by_step(folder: Path) -> dict[int, tuple[int, ...]]:
    """Return the shares of each committed step; fail when two ranks disagree."""
    found: dict[int, tuple[int, ...]] = {}
    for path in (folder / "samples").glob("*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            assert found.setdefault(line["step"], tuple(line["shares"])) == tuple(line["shares"])
    return found


def waiting(tmp: Path, step: int) -> dict[str, object]:
    """Return a fault that holds a worker in a step until the test creates the file ``release``."""
    return {
        "place": "step",
        "step": step,
        "do": "wait",
        "reached": str(tmp / "reached"),
        "release": str(tmp / "release"),
    }


def trained(operator: Operator, workers: list[Worker], *, epochs: int = 2) -> None:
    """Fail unless these workers finished with the weights and samples of an undisturbed run."""
    operator.finish(workers)
    expected, ids = reference(epochs=epochs)
    for worker in workers:
        assert_same_weights(operator.weights(worker), expected)
    assert lineage(operator.folder / "samples") == ids


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
    operator = operate()
    faults = [waiting(tmp_path, 2), None, None]
    workers = [operator.start(f"w{number}", fault=fault, gossip=False) for number, fault in enumerate(faults)]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(6, 5, 5))
    operator.until((tmp_path / "reached").exists, "step 2")
    operator.plan(workers, to=[workers[2]], new_generation=False, shares=(10, 4, 2), boundary=boundary)
    operator.until(lambda: "plan 1.2" in workers[2].log(), "the plan is read")
    (tmp_path / "release").touch()
    trained(operator, workers)
    assert shares_by_step(tmp_path) == {step: (6, 5, 5) if step < switch else (10, 4, 2) for step in range(12)}


def test_probes_vary_the_shares_of_the_first_steps(operate: Operate, tmp_path: Path) -> None:
    """Each vector is used for its number of steps in each epoch, then the plan's own shares."""
    operator = operate()
    workers = [operator.start("w0"), operator.start("w1")]
    operator.until_ready(*workers)
    operator.plan(workers, shares=(8, 8), probe=((10, 6), (6, 10)), probe_steps=2)
    trained(operator, workers)
    epoch = [(10, 6)] * 2 + [(6, 10)] * 2 + [(8, 8)] * 2
    assert shares_by_step(tmp_path) == dict(enumerate(epoch + epoch))


def test_batch_and_learning_rate_change_at_the_boundary(operate: Operate, tmp_path: Path) -> None:
    """A plan may change the global batch; samples stay exactly once."""
    operator = operate()
    workers = [operator.start("w0", fault=waiting(tmp_path, 2)), operator.start("w1")]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until((tmp_path / "reached").exists, "step 2")
    operator.plan(workers, new_generation=False, batch_samples=24, shares=(16, 8))
    operator.until(lambda: all("plan 1.2" in w.log() for w in workers), "the plan is read")
    (tmp_path / "release").touch()
    operator.finish(workers)
    expected, ids = reference(epochs=2, batches=lambda step: 16 if step < 6 else 24)
    assert_same_weights(operator.weights(workers[0]), expected)
    assert lineage(tmp_path / "samples") == ids


def test_a_new_batch_is_probed_and_outlives_a_member(operate: Operate, tmp_path: Path) -> None:
    """A new batch applies within an epoch, with the probe's shares and those of the survivors of a loss."""
    operator = operate()
    doomed = {"place": "launched", "step": 4}  # before its vote, so that the others cannot commit the step
    workers = [
        operator.start("w0", fault=waiting(tmp_path, 1)), operator.start("w1"), operator.start("w2", fault=doomed),
    ]  # fmt: skip
    operator.until_ready(*workers)
    operator.plan(workers, shares=(6, 5, 5))
    operator.until((tmp_path / "reached").exists, "step 1")
    operator.plan(
        workers, new_generation=False, batch_samples=20, shares=(10, 6, 4),
        probe=((12, 5, 3), (8, 7, 5)), probe_steps=1, boundary=Boundary(kind=BoundaryKind.STEPS, every_steps=2),
    )  # fmt: skip
    operator.until(lambda: all("plan 1.2" in w.log() for w in workers), "the plan is read")
    (tmp_path / "release").touch()
    operator.finish(workers)
    expected, ids = reference(epochs=2, batches=lambda step: 16 if step < 2 else 20)
    for survivor in workers[:2]:
        assert_same_weights(operator.weights(survivor), expected)
    assert lineage(tmp_path / "samples") == ids
    shares = shares_by_step(tmp_path)
    assert [shares[step] for step in range(4)] == [(6, 5, 5), (6, 5, 5), (12, 5, 3), (8, 7, 5)]
    assert [(len(shares[step]), sum(shares[step])) for step in range(4, 11)] == [
        (2, 20), (2, 4), (2, 20), (2, 20), (2, 20), (2, 20), (2, 16)
    ]  # fmt: skip


def test_a_foreign_and_an_older_plan_are_refused(operate: Operate, tmp_path: Path) -> None:
    """A plan of another job, an older plan and a broken plan change nothing."""
    operator = operate()
    workers = [operator.start("w0", fault=waiting(tmp_path, 2)), operator.start("w1")]
    operator.until_ready(*workers)
    operator.plan(workers)
    operator.until((tmp_path / "reached").exists, "step 2")
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
    (tmp_path / "release").touch()
    trained(operator, workers)
