"""A job continues from the checkpoints of an earlier one, and never from those of another namespace."""

from __future__ import annotations

import json
from collections.abc import Iterator

import fsspec
import pytest
import torch
from heterotrain.checkpoints.checkpoint import RECORD, CheckpointFolder
from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.checkpoints.predecessor import predecessor
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.state.tensors import flatten
from heterotrain.telemetry.report import RankMetrics
from heterotrain_core.contract import metrics
from heterotrain_core.contract.config import TrainingConfig
from support.checkpoints import write
from support.divided_models import full, training_of

STORE = "memory://bucket/jobs"
OLD, NEW, OWN = (f"{n}{n}{n}{n}{n}{n}{n}{n}-aaaa-bbbb-cccc-dddddddddddd" for n in "123")


def identity(namespace: str = "vision", name: str = "digits") -> Identity:
    return Identity(mode=Mode.OPERATED, namespace=namespace, job_name=name, job_uid=OWN)


def written(
    folder: str,
    *,
    step: int = 7,
    now_s: float = 1.0,
    owner: tuple[str, str] | None = ("vision", "digits"),
    uid: str = OLD,
) -> None:
    """Leave a checkpoint as a job does that has ended."""
    state = flatten({"value": torch.arange(3.0)})
    kept = CheckpointFolder(f"{STORE}/{folder}", max_to_keep=1)
    write(kept, state, generation=9, step=step, now_s=now_s)
    if owner is not None:
        job = {"job": {"namespace": owner[0], "name": owner[1], "uid": uid}}
        kept.storage.put(RECORD, [json.dumps(job).encode()])


@pytest.fixture(autouse=True)
def _empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("heterotrain.checkpoints.storage.PAUSES_S", (0.0,))
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


def found(resume_from: str, **who: str) -> str | None:
    folder = predecessor(resume_from, STORE, identity(**who))
    return None if folder is None else folder.storage.shown.rsplit("/", 1)[-1]


def test_a_name_stands_for_the_newest_folder_of_that_job() -> None:
    written(f"vision-digits-{OLD}", now_s=5.0)
    written(f"vision-digits-{NEW}", now_s=9.0)
    assert found("digits") == f"vision-digits-{NEW}"
    assert found("digits", name="other") == f"vision-digits-{NEW}"


def test_a_job_that_names_itself_may_start_for_the_first_time() -> None:
    assert found("digits") is None
    written(f"vision-digits-{OWN}")
    assert found("digits") is None, "its own folder is no earlier one"


@pytest.mark.parametrize(
    ("folder", "owner"),
    [
        (f"vision-team-digits-{OLD}", ("vision-team", "digits")),
        (f"vision-team-digits-{OLD}", None),
        (f"vision-team-digits-{OLD}", ("vision", "digits")),
        (f"other-team-digits-{OLD}", ("other", "team-digits")),
        ("vision-team-digits-backup", ("vision", "team-digits")),
    ],
    ids=["namespace with a hyphen", "no record", "another job", "another namespace", "no uid"],
)
def test_a_name_never_leads_to_the_folder_of_another_namespace(folder: str, owner: tuple[str, str] | None) -> None:
    """Namespace ``vision`` with job ``team-digits`` and ``vision-team`` with ``digits`` have folders of one form."""
    written(folder, owner=owner)
    with pytest.raises(UsageError, match=r"no job team-digits of namespace vision has left checkpoints"):
        found("team-digits")


def test_a_folder_is_refused_if_its_record_names_another_namespace() -> None:
    written("copied", owner=("other", "digits"))
    with pytest.raises(UsageError, match="those of namespace other"):
        found(f"{STORE}/copied")
    written("moved", owner=None)
    assert found(f"{STORE}/moved") == "moved"
    written("renamed", owner=("vision", "another-name"))
    assert found(f"{STORE}/renamed") == "renamed"
    written("by hand", owner=("default", "local"), uid="local")
    assert found(f"{STORE}/by hand") == "by hand"


@pytest.mark.parametrize("record", [b"{", b"[]", b'{"job": []}', b'{"job": {}}', b'{"job": "vision"}', b"\xff"])
def test_a_folder_with_a_damaged_record_is_nobodys(record: bytes) -> None:
    """Otherwise a job would get at the checkpoints of another namespace by damaging their record."""
    written(f"other-digits-{OLD}", owner=None)
    CheckpointFolder(f"{STORE}/other-digits-{OLD}", max_to_keep=1).storage.put(RECORD, [record])
    with pytest.raises(UsageError, match="cannot be read"):
        found(f"{STORE}/other-digits-{OLD}")


def test_a_folder_without_a_record_is_refused_by_its_name() -> None:
    """Its job may have been ended before its record was written."""
    written(f"other-digits-{OLD}", owner=None)
    with pytest.raises(UsageError, match="the name of one of another namespace"):
        found(f"{STORE}/other-digits-{OLD}/")
    written(f"vision-digits-{OLD}", owner=None)
    assert found(f"{STORE}/vision-digits-{OLD}") == f"vision-digits-{OLD}"


def test_an_empty_folder_is_a_mistake_and_an_unreadable_store_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        found(f"{STORE}/empty")

    def broken(_self: object) -> list[str]:
        raise OSError("denied")

    monkeypatch.setattr("heterotrain.checkpoints.storage.Storage.names", broken)
    with pytest.raises(UsageError, match="denied"):
        found("digits")


def test_checkpoints_of_an_earlier_job_of_the_same_name_are_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    training = training_of(full(), seed=0)
    manager = CheckpointManager(identity(), TrainingConfig(checkpoint_uri=STORE), report=RankMetrics(identity()))
    assert not manager.load_into(training)
    assert "resumeFrom" not in caplog.text
    written(f"vision-digits-{OLD}")
    assert not manager.load_into(training)
    assert "set checkpoint.resumeFrom: digits" in caplog.text


def test_a_cold_start_prefers_the_own_folder_and_reports_another_one() -> None:
    config = TrainingConfig(checkpoint_uri=STORE, checkpoint_resume_from="digits")
    report = RankMetrics(identity())

    def manager() -> CheckpointManager:
        return CheckpointManager(identity(), config, report=report)

    training = training_of(full(), seed=0)
    kept = CheckpointFolder(f"{STORE}/vision-digits-{OLD}", max_to_keep=1)
    write(kept, training.flat(), generation=9, step=7, now_s=1.0)
    kept.storage.put(RECORD, [json.dumps({"job": {"namespace": "vision", "name": "digits", "uid": OLD}}).encode()])
    assert manager().best() == (0, 7), "of a generation before all of its own"
    begun = training_of(full(), seed=1)
    assert manager().load_into(begun)
    assert report.current()[metrics.RESUMED_STEP] == 7.0
    assert metrics.CHECKPOINT_STEP not in report.current(), "it has none of its own"
    own = CheckpointFolder(f"{STORE}/vision-digits-{OWN}", max_to_keep=1)
    write(own, training.flat(), step=3, now_s=2.0)
    assert manager().best() == (1, 3)
