"""The mounted plan: absent, swapped, broken, foreign, older."""

from __future__ import annotations

from pathlib import Path

from heterotrain.membership.plan_source import HeldPlan, PlanSource
from heterotrain_core.contract.codec import Refused, encode_plan
from heterotrain_core.contract.plan import Plan


def text_of(revision: int, *, job_uid: str = "j") -> str:
    """Return a plan without members."""
    return encode_plan(
        Plan(job_uid=job_uid, generation=0, revision=revision, members=(), ranks=(), global_batch_samples=8)
    )


def mount(folder: Path, text: str, version: str) -> None:
    """Swap the mount as the kubelet does: a new folder, then the link ``..data``."""
    (folder / version).mkdir()
    (folder / version / "plan.json").write_text(text)
    (folder / "..new").symlink_to(version)
    (folder / "..new").replace(folder / "..data")
    if not (folder / "plan.json").is_symlink():
        (folder / "plan.json").symlink_to("..data/plan.json")


def test_a_swap_is_seen(tmp_path: Path) -> None:
    """Absent, first and second plan; the callback runs for each."""
    changes: list[HeldPlan | None] = []
    source = PlanSource(str(tmp_path), job_uid="j")
    source.subscribe(lambda: changes.append(source.newest), lambda: None)
    source.poll()
    assert source.newest is None
    for revision in (1, 2):
        mount(tmp_path, text_of(revision), f"v{revision}")
        source.poll()
        assert source.newest is not None
        assert source.newest.plan.version == (0, revision)
        assert source.newest.text == text_of(revision)
    assert len(changes) == 2


def test_only_what_is_read_from_the_mount_and_newer_is_spread(tmp_path: Path) -> None:
    reads: list[HeldPlan | None] = []
    source = PlanSource(str(tmp_path), job_uid="j")
    source.subscribe(lambda: None, lambda: reads.append(source.newest))
    source.offer(text_of(2))
    mount(tmp_path, text_of(2), "v2")
    source.poll()
    assert reads == [], "a peer had sent it before"
    mount(tmp_path, text_of(3), "v3")
    source.poll()
    source.poll()
    assert [held.plan.revision for held in reads if held is not None] == [3]


def test_what_is_refused_leaves_the_plan_alone(tmp_path: Path) -> None:
    """Older, foreign and broken plans, and the same one again, change nothing and trigger no callback."""
    changes: list[None] = []
    source = PlanSource(str(tmp_path), job_uid="j")
    source.subscribe(lambda: changes.append(None), lambda: None)
    source.offer(text_of(5))
    changes.clear()
    for text in (text_of(4), text_of(6, job_uid="k"), text_of(6)[:-5]):
        assert isinstance(source.offer(text), Refused)
    source.offer(text_of(5))
    assert changes == []
    assert source.newest is not None
    assert source.newest.plan.revision == 5
