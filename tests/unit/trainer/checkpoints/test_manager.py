"""When checkpoints are written, what is restored from them, and what happens in a grace period."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import heterotrain
import pytest
import torch
from heterotrain.checkpoints.checkpoint import CheckpointFolder
from heterotrain.checkpoints.grace import estimate_write, must_start_now
from heterotrain.checkpoints.manager import CheckpointManager, WriteReason
from heterotrain.checkpoints.storage import Storage
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.session import Job
from heterotrain.state.ranges import TensorRange
from heterotrain.telemetry.logs import TextFormatter
from heterotrain.telemetry.report import RankMetrics
from heterotrain_core.contract import metrics
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.outcome import Ending
from support.divided_models import full, training_of

URI = "memory://bucket/jobs/one"
X = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(24, 2)
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True) ** 2)


class Stream(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same samples in sequence, in an order drawn while they are read."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        rest = list(range(len(DATA)))
        while rest:
            yield DATA[rest.pop(int(torch.randint(len(rest), ())))]


def opened(shard: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a shard of six samples."""
    return [DATA[index] for index in range(6 * shard, 6 * shard + 6)]


KINDS: dict[str, Any] = {"map": DATA, "shards": heterotrain.Shards(range(4), [6] * 4, opened), "stream": Stream()}


class Counting(torch.nn.Module):
    """A linear layer with a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 1).double()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)  # type: ignore[operator]  # torch types a buffer as a module or a tensor
        return torch.nn.functional.linear(x, self.inner.weight, self.inner.bias)


@pytest.fixture(autouse=True)
def _tidy(monkeypatch: pytest.MonkeyPatch, own_process: None) -> Iterator[None]:
    """Isolate other tests from the effects of ``init`` on the process, and from the store's content."""
    monkeypatch.setattr("heterotrain.checkpoints.storage.PAUSES_S", (0.0,))
    fsspec.filesystem("memory").store.clear()
    yield
    fsspec.filesystem("memory").store.clear()


def nothing(*_: Any) -> None:
    """Neither before training nor in a micro-batch."""


def run(
    *,
    data: Any = DATA,
    stop_after: int | None = None,
    prepare: Callable[[Job], None] = nothing,
    during: Callable[[Job, int, int], None] = nothing,
    **settings: Any,
) -> tuple[Job, Counting, list[int]]:
    """Train; return the job, its model and the sample ids in the order of their steps.

    ``during`` is called after each micro-batch, with the number of its step and its own.
    """
    job = heterotrain.init(**({"epochs": 2, "batch_samples": 8, "checkpoint_uri": URI} | settings))
    torch.manual_seed(1)
    model = job.wrap(Counting())
    assert isinstance(model, Counting)
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    prepare(job)
    ids: list[int] = []
    for step in job.steps(data):
        with step:
            for index, (x, y) in enumerate(step.micro_batches()):
                step.backward(((model(x) - y) ** 2).mean())
                during(job, step.number, index)
            step.apply(optimizer)
        ids += step.task.ids
        if stop_after is not None and step.number + 1 == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)
            stop_after = None
    return job, model, ids


@pytest.mark.parametrize("stop_after", [2, 3, 4], ids=["mid-epoch", "epoch's last step", "next epoch"])
@pytest.mark.parametrize("kind", ["map", "shards", "stream"])
def test_a_terminated_run_continues_from_an_object_store(kind: str, stop_after: int) -> None:
    """It ends with the bits and the samples of an undisturbed run, for every kind of data set."""
    data = KINDS[kind]
    _, undisturbed, ids = run(data=data, checkpoint_uri=None)
    assert sorted(ids[:24]) == sorted(ids[24:]) == list(range(24))
    torch.manual_seed(99)
    with pytest.raises(SystemExit):
        run(data=data, stop_after=stop_after)
    found = CheckpointFolder(URI, max_to_keep=9).load_newest()
    assert found is not None
    assert found[0].step == stop_after + 1
    _, resumed, rest = run(data=data)
    assert rest == ids[8 * (stop_after + 1) :]
    torch.testing.assert_close(resumed.state_dict(), undisturbed.state_dict(), rtol=0, atol=0)


def test_the_final_state_is_written_and_nothing_is_trained_twice() -> None:
    """A job that is started again after its end does nothing."""
    _, first, ids = run()
    _, second, rest = run()
    assert len(ids) == 48
    assert rest == []
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_a_store_that_does_not_answer_is_not_a_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the checkpoints of a job that starts over would displace the old ones."""
    run()

    def refuses(_self: Storage) -> list[str]:
        raise PermissionError("no credentials")

    monkeypatch.setattr(Storage, "names", refuses)
    with pytest.raises(UsageError, match="no credentials; training does not start from the beginning"):
        run()


def test_a_store_that_fails_while_training(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Training still completes, and every failure is counted."""

    def fails(_self: Storage, name: str, _chunks: object) -> None:
        raise RuntimeError(f"the store's library broke at {name[:10]}")

    monkeypatch.setattr(Storage, "put", fails)
    job, _, ids = run(checkpoint_interval_s=0.0)
    assert len(ids) == 48
    assert job._report._counters["heterotrain_checkpoint_failures_total"] >= 1
    assert "the store's library broke" in caplog.text


def test_memory_is_allocated_before_the_first_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, as much as the state then needs; the copy uses it."""
    monkeypatch.setattr("heterotrain.checkpoints.manager.PREPARE_FROM_BYTES", 0)
    job, model, _ = run()
    writer = job._loop._checkpoints._writer
    assert writer is not None
    assert writer._buffer is not None
    assert writer._buffer.numel() == job._training.size_bytes()
    assert CheckpointFolder(URI, max_to_keep=9).newest_order()[1] == 6
    torch.testing.assert_close(run()[1].state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_store_that_hangs_is_logged_and_training_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are committed while the first checkpoint is stuck; when the store recovers, the final state is written."""
    for module in ("manager", "schedule"):
        monkeypatch.setattr(f"heterotrain.checkpoints.{module}.STUCK_S", 0.0)
    release, put = threading.Event(), Storage.put

    def hangs(self: Storage, name: str, chunks: list[memoryview], **options: Any) -> Any:
        release.wait()
        return put(self, name, chunks, **options)

    monkeypatch.setattr(Storage, "put", hangs)

    def during(job: Job, step: int, _index: int) -> None:
        if step == 5:
            assert "check whether its store is stuck" in caplog.text
            assert job._report._counters["heterotrain_checkpoint_failures_total"] >= 1
            release.set()

    run(checkpoint_interval_s=0.0, during=during)
    assert CheckpointFolder(URI, max_to_keep=9).newest_order()[1] == 6


def test_a_store_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The run ends, and its outcome says that the final state is not stored."""
    for module in ("manager", "schedule"):
        monkeypatch.setattr(f"heterotrain.checkpoints.{module}.STUCK_S", 0.01)
    for module in ("manager", "kept"):
        monkeypatch.setattr(f"heterotrain.checkpoints.{module}.HANG_S", 0.2)
    monkeypatch.setenv("HETEROTRAIN_TERMINATION_MESSAGE", str(tmp_path / "outcome"))
    release = threading.Event()
    monkeypatch.setattr(Storage, "put", lambda *_: release.wait())
    job, _, ids = run()
    release.set()
    for thread in threading.enumerate():
        if thread.name == "heterotrain-checkpoint":
            thread.join()  # else it would complete its checkpoint in the next test's store
    assert len(ids) == 48
    outcome = job._termination_message.outcome
    assert outcome is not None
    assert outcome.ending is Ending.FINISHED
    assert "the checkpoint of the final state is missing (its store did nothing for" in outcome.reason


def test_a_final_write_that_fails_is_in_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_self: Storage, name: str, _chunks: object, **_options: object) -> None:
        raise RuntimeError(f"s3://key:sec/ret@bucket refused {name[:10]}")

    monkeypatch.setattr(Storage, "put", fails)
    outcome = run()[0]._termination_message.outcome
    assert outcome is not None
    assert outcome.ending is Ending.FINISHED
    assert "missing (s3://***@bucket refused checkpoint); this process wrote no other" in outcome.reason


def test_no_password_is_logged_or_recorded(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is in the URI of a run without an operator, at most."""
    caplog.set_level(logging.INFO)
    run(checkpoint_uri="memory://key:hush/hush@bucket/jobs")
    record = next(data for name, data in fsspec.filesystem("memory").store.items() if "reproducibility" in name)
    text = "".join(TextFormatter().format(each) for each in caplog.records)
    for place in (record.getvalue().decode(), text, capsys.readouterr().err):
        assert "hush" not in place
    with pytest.raises(UsageError) as refused:
        Storage("nosuch://key:hush/hush@bucket/jobs")
    assert "hush" not in str(refused.value)


def test_a_slow_step_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """With SIGTERM in a step that ends too late, a rank writes state and buffers from before that step."""
    caplog.set_level(logging.WARNING)
    before: dict[str, torch.Tensor] = {}

    def prepare(job: Job) -> None:
        job.buffers("seen", "own")
        job._loop._attempts.cap_samples = 2

    def during(job: Job, step: int, index: int) -> None:
        if (step, index) == (1, 0):
            assert job._training.model is not None
            before.update({name: value.clone() for name, value in job._training.model.state_dict().items()})
            job._loop.resources.step_s = 1e9
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(epochs=1, prepare=prepare, during=during)
    early, last = CheckpointFolder(URI, max_to_keep=9).manifests()[::-1]
    assert (early.step, last.step) == (1, 2)
    state = CheckpointFolder(URI, max_to_keep=9).load(early)
    assert state["progress"]["steps"] == 1
    assert float(state["model"].pop("seen")) == 8.0
    assert float(before.pop("seen")) == 10.0
    torch.testing.assert_close(dict(state["model"]), before, rtol=0, atol=0)
    assert "the running step would end too late" in caplog.text


def test_a_write_that_will_not_fit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Estimated from the speed of the last one; it is attempted anyway."""
    caplog.set_level(logging.WARNING)

    def prepare(job: Job) -> None:
        job._loop.shutdown._grace_s = 5.0
        job._loop._checkpoints._speed_bytes_per_s = 1.0

    with pytest.raises(SystemExit):
        run(epochs=1, prepare=prepare, stop_after=1)
    assert "the job may continue from an older checkpoint" in caplog.text
    assert CheckpointFolder(URI, max_to_keep=9).newest_order()[1] == 2


def test_which_writes_fit_a_grace_period() -> None:
    """By hand: 100 MB at 50 MB/s with slack take 3 s, and one second is reserved for the exit."""
    seen = estimate_write(size_bytes=100_000_000, speed_bytes_per_s=50e6, left_s=10.0)
    assert (seen.needed_s, seen.fits) == (3.0, True)
    assert not estimate_write(size_bytes=100_000_000, speed_bytes_per_s=50e6, left_s=3.9).fits
    assert estimate_write(size_bytes=1, speed_bytes_per_s=None, left_s=0.0).fits
    assert not must_start_now(seen, left_s=10.0, step_left_s=5.9)
    assert must_start_now(seen, left_s=10.0, step_left_s=6.1)
    unknown = estimate_write(size_bytes=1, speed_bytes_per_s=None, left_s=10.0)
    assert [must_start_now(unknown, left_s=10.0, step_left_s=s) for s in (4.0, 6.0)] == [False, True]
    hopeless = estimate_write(size_bytes=100_000_000, speed_bytes_per_s=1e6, left_s=10.0)
    assert not must_start_now(hopeless, left_s=10.0, step_left_s=100.0)


def test_a_rank_with_a_part_of_the_model_writes_no_whole_checkpoint() -> None:
    """Where the parts of all ranks did not become a checkpoint, the own part is not taken for one."""
    half = {name: TensorRange(name, 0, extent.stop // 2) for name, extent in full().items()}
    rest = {name: TensorRange(name, extent.stop // 2, extent.stop) for name, extent in full().items()}
    training = training_of(half, seed=1, steps=2)
    training.holdings = (half, rest)
    identity = Identity(mode=Mode.ALONE)
    manager = CheckpointManager(identity, TrainingConfig(checkpoint_uri=URI), report=RankMetrics(identity))
    manager.write(WriteReason.LEFT_ALONE, training, 1)
    assert manager.best() == (-1, -1)
    training = training_of(full(), seed=1, steps=2)
    manager.write(WriteReason.LEFT_ALONE, training, 1)
    assert manager.best() == (1, 2)


def test_the_restored_checkpoint_is_reported_until_there_is_a_newer_one() -> None:
    """After a suspend the operator learns of the last checkpoint from the next workers, if it missed the outcomes."""
    identity = Identity(mode=Mode.ALONE)
    first = CheckpointManager(identity, TrainingConfig(checkpoint_uri=URI), report=RankMetrics(identity))
    first.write(WriteReason.LEFT_ALONE, training_of(full(), seed=1, steps=2), 1)
    assert first.kept.newest is not None
    assert first.kept.newest[0] == 2
    report = RankMetrics(identity)
    manager = CheckpointManager(identity, TrainingConfig(checkpoint_uri=URI), report=report)
    assert manager.kept.newest is None
    assert metrics.CHECKPOINT_STEP not in report.current()
    assert manager.load_into(training_of(full(), seed=5))
    assert manager.kept.newest == first.kept.newest
    gauges = report.current()
    assert (gauges[metrics.CHECKPOINT_STEP], gauges[metrics.CHECKPOINT_TIME]) == first.kept.newest
    manager.write(WriteReason.LEFT_ALONE, training_of(full(), seed=1, steps=3), 1)
    assert report.current()[metrics.CHECKPOINT_STEP] == 3
