"""The public side of a job, seen from one rank."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.choices import Backend, Parallelism
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.contract.outcome import Ending

from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.checkpoints.record import RunRecord, fingerprint
from heterotrain.clock import Clock
from heterotrain.data import batches
from heterotrain.data.loader_process import WorkerInit, Workers
from heterotrain.data.main_guard import check_main_guard, main_line
from heterotrain.data.rng import reseed
from heterotrain.data.slices import Source
from heterotrain.data.sources import NumberedStream, source_of
from heterotrain.errors import Excluded, UsageError
from heterotrain.evaluated_data import Evaluated, EvaluatedData
from heterotrain.evaluation import (
    Measure,
    agree_on_stream,
    check_read,
    evaluated_by_part,
    means,
    measured,
    part_of,
    sums,
)
from heterotrain.identity import Identity, Mode
from heterotrain.job_setup import membership_of
from heterotrain.keywords import known_keywords
from heterotrain.membership.devices import take_device
from heterotrain.membership.interface import OwnSide
from heterotrain.model_setup import ModelSetup
from heterotrain.network.gloo.default_group import check_free
from heterotrain.network.link_speeds import LinkSpeeds
from heterotrain.network.mesh.exchange import Purpose
from heterotrain.numerics.batch_norm import BatchNorm
from heterotrain.numerics.method import Numerics
from heterotrain.parts.interface import Method, Wrapped
from heterotrain.preflight import in_job
from heterotrain.registered_objects import RegisteredObjects
from heterotrain.state import admission
from heterotrain.state.training import TrainState
from heterotrain.steps.assembly import loop_of
from heterotrain.steps.hooks import Hooks
from heterotrain.steps.job_parts import JobParts
from heterotrain.steps.leadership import Leadership
from heterotrain.steps.phases import TrainingPhase, TrainingPhases
from heterotrain.steps.step import Step
from heterotrain.stop_signals import StopSignals
from heterotrain.telemetry import gpu
from heterotrain.telemetry.logs import Tags, set_up_logs
from heterotrain.telemetry.progress import ProgressDisplay
from heterotrain.telemetry.report import RankMetrics
from heterotrain.telemetry.serving import serve
from heterotrain.termination_message import TerminationMessage

_log = logging.getLogger(__name__)


class Job(RegisteredObjects):
    """One training job, seen from this rank. Made by ``heterotrain.init``."""

    _is_ready = False
    """Whether all parts are there: log lines and failures may come before."""

    def __init__(
        self,
        identity: Identity,
        config: TrainingConfig,
        *,
        tensorboard_dir: str | None = None,
        micro_batch_samples: int | None = None,
        batch_norm: str = BatchNorm.GLOBAL,
        clock: Clock = time.monotonic,
    ) -> None:
        """Prepare this rank; ``clock`` measures how long peers are silent, and the limits of waits."""
        self.identity = identity
        self.config = config
        self.device = take_device(identity)
        display = ProgressDisplay()
        set_up_logs(identity.tags, where=self._position, before=display.clear)
        self._training = TrainState()
        self._numerics = Numerics(config, self.device, self._training, batch_norm=batch_norm)
        self._line = main_line()
        self._leadership = Leadership(leads=None if identity.mode is Mode.OPERATED else not identity.rank)
        self._wrapped, speeds = Wrapped(), LinkSpeeds()
        self._report = RankMetrics(identity)
        self._report.look_up(links=speeds.links)
        self._hooks = Hooks(self._training, self._report, self._leadership, epochs=config.epochs)
        self._termination_message = self._watch()
        self._record = self._keep("heterotrain-record", RunRecord(identity, config))
        checkpoints = CheckpointManager(identity, config, report=self._report, record=self._record_file, clock=clock)
        parallelism = admission.choice("parallelism", config.parallelism, Parallelism)
        own = OwnSide(
            identity=identity, training=self._training, checkpoints=checkpoints, device=self.device,
            backend=admission.choice("backend", config.backend, Backend), timeout_s=config.peer_timeout_s,
            place=self._wrapped.place, clock=clock,
        )  # fmt: skip
        shards = identity.local_world_size if parallelism is Parallelism.SHARDED else 1
        self._membership = membership_of(own, config, report=self._report, shards=shards)
        self._phases = TrainingPhases(config)
        job = JobParts(
            identity=identity, config=config, device=self.device, training=self._training, membership=self._membership,
            checkpoints=checkpoints, numerics=self._numerics, report=self._report, wrapped=self._wrapped, clock=clock,
        )  # fmt: skip
        self._loop = loop_of(
            job, hooks=self._hooks, leadership=self._leadership, record=self._record,
            termination_message=self._termination_message, display=display, tensorboard_dir=tensorboard_dir,
            micro_batch_samples=micro_batch_samples,
        )  # fmt: skip
        self._setup = ModelSetup(
            job=job, parallelism=parallelism, check_open=self._loop.exchanges.check_open, speeds=speeds
        )
        self._is_ready = True
        self._stop_signals = StopSignals(self._loop.shutdown.request)
        self._stop_signals.install()
        torch.manual_seed(config.seed)
        reseed(config.seed, self.device)  # numpy and Python, too: every rank divides its data sets alike

    def _watch(self) -> TerminationMessage:
        """Serve telemetry, watch the device, and return what says at the end how the process has ended."""
        message = TerminationMessage(
            self.identity.termination_path,
            where=self._where,
            metrics=self._report.reported,
            checkpoint=self._report.checkpoint,
            on_failure=self._abandon,
        )
        message.install()
        self._server = serve(self._report, self.identity)
        gpu.watch(self.device, self._report)
        in_job.start(self.identity, self.device, self.config.checkpoint_uri, self._report)
        return message

    @known_keywords
    def steps(
        self,
        dataset: batches.MapDataset | NumberedStream | Iterable[Any],
        *,
        collate: batches.Collate | None = None,
        shuffle: bool = True,
        workers: int = 0,
        prefetch_factor: int = 2,
        worker_init_fn: WorkerInit | None = None,
        lockstep: bool = False,
        readers: str = "one",
        epochs: int | None = None,
        steps: int | None = None,
        confirm: str = "now",
    ) -> Iterator[Step]:
        """Yield steps until every epoch is committed; a step that fails through no fault of the script is repeated.

        Args:
            dataset: a data set with a length and indices; or with a length and ``read(epoch, start, stop)``, such as
                ``heterotrain.Shards``; or one that can be iterated again for each epoch. It must be the same, in the
                same order, on every rank: each rank selects its own part.
            collate: makes a batch from a list of samples; torch's own by default.
            shuffle: draw a new order for each epoch; only for a data set with indices, the others have their own.
            workers: processes that load samples ahead. With 0 the training process loads them.
            prefetch_factor: micro-batches that each process has loaded or is loading, at least 1.
            worker_init_fn: called in each process with its number, before its first sample.
            lockstep: give every rank the same number of micro-batches in each step, for scripts that exchange data in
                the loop over them, by ``step.all_gather`` or ``torch.distributed``. Missing ones are made up for by
                single samples with weight zero (``step.is_padding``).
            readers: of a data set that can only be iterated: ``one`` rank reads it and sends each rank its samples, or
                ``all`` ranks read all of it and keep their part.
            epochs: of a phase of the training, which this call trains; a later call trains the next phase, with data of
                its own. The last one may leave it out, and trains the rest.
            steps: the same in a training by steps. The epoch ends with the last one.
            confirm: a step ``now``, or ``late``, by the next vote: GPUs never wait, and own variables may change twice.

        Raises:
            UsageError: there is nothing to train, or the data cannot be read this way.
        """
        one_reader, late = _is_one_of("readers", readers, "one", "all"), _is_one_of("confirm", confirm, "late", "now")
        processes = self._processes(workers, prefetch_factor, worker_init_fn)
        source = source_of(dataset, collate=collate, shuffle=shuffle, seed=self.config.seed, one_reader=one_reader)
        phase = self._begin_phase(source, epochs, steps)
        try:
            yield from self._loop.steps(source, workers=processes, lockstep=lockstep, late=late, phase=phase)
        except GeneratorExit:  # the script left the loop, often by an error; under torchrun it may still communicate
            if self.identity.mode is Mode.OPERATED:
                self._abandon("the script left job.steps before the end of the training")
            self._loop.leave_early()
            raise
        except Excluded as excluded:
            self._termination_message.write(Ending.LEFT, str(excluded))
            self._membership.close()
            raise SystemExit(0) from excluded
        except Exception:  # of a data set, or because another rank has left
            self._loop.leave_early()
            raise
        finally:
            if not self._loop.is_between_phases:
                self._stop_signals.end()

    def _processes(self, workers: int, prefetch_factor: int, init_fn: WorkerInit | None) -> Workers:
        """Check that training may begin, and return the processes that load samples ahead; see ``steps``.

        Raises:
            UsageError: the script has not registered what is needed, or registered what does not fit together.
        """
        admission.check_default_device()
        if self._training.model is None or not self._training.optimizers:
            raise UsageError("call job.wrap(model) and job.optimizer(optimizer) before job.steps")
        if self._loop.active_group is None:
            check_free()
        processes = Workers(
            count=admission.whole_number("workers", workers, least=0),
            prefetch_factor=admission.whole_number("prefetch_factor", prefetch_factor, least=1),
            init_fn=init_fn,
        )
        if processes.count:
            check_main_guard([self._line, main_line()])
        admission.check_belongs(self._training.model, self._training.optimizers)
        admission.check_schedules(self._training.optimizers, self._training.extras.values())
        return processes

    def _begin_phase(self, source: Source, epochs: int | None, steps: int | None) -> TrainingPhase:
        """Return a new phase of so many epochs or steps.

        Raises:
            UsageError: this is not the number of a phase, or other data come in the middle of an epoch.
        """
        phase = self._phases.begin(epochs=epochs, steps=steps)
        self._record.data, self._record.phase = fingerprint(source), phase.number
        if self._training.earlier is None:  # else the state is that of a phase to come
            self._phases.check_data((source.order, self._record.data), self._training.progress)
        self._training.order = source.order
        self._stop_signals.begin()
        return phase

    def report(self, **values: float) -> None:
        """Export values (numbers, or tensors with one element) as metrics; the lowest rank also logs them.

        Raises:
            UsageError: a value is not a number.
        """
        self._hooks.report("job.report", values)

    def sum(self, **values: float) -> dict[str, float]:
        """Return each value summed over all ranks. Every rank has to call this, in a hook or inside ``with step:``.

        Hooks are those of ``on_epoch_end`` and ``every_steps``. In a step it has to come before ``step.apply``. There
        the loss of a worker repeats the hook or step with the remaining ranks. A sum is over the members of that time.

        Raises:
            UsageError: this is called elsewhere, where nothing would repeat it.
        """
        group = self._loop.exchanges.begin("job.sum")
        if group is None:
            return dict(values)
        rows = group.gather_now(list(values.values()), Purpose.SUM)
        return {name: math.fsum(column) for name, column in zip(values, zip(*rows, strict=True), strict=True)}

    @known_keywords
    def part(
        self, dataset: Evaluated, *, batch_samples: int | None = None, collate: batches.Collate | None = None
    ) -> Iterator[Any]:
        """Yield batches of this rank's part of a data set, in proportion to its share; together the ranks see it once.

        The ranks of a sharded member get the same number of batches, because they run the model together. Of fewer
        samples than ranks, some get a batch whose tensors have no rows.

        Args:
            dataset: one of those of ``job.steps``, or a DataLoader of one, whose batch size and ``collate_fn`` are
                the defaults; its processes are not used. Every rank reads the whole of a stream, and keeps its part.
            batch_samples: samples per batch, at least 1, 64 by default; the last batch may be smaller.
            collate: makes a batch from a list of samples; torch's own by default.

        Raises:
            UsageError: ``batch_samples`` is below 1, a DataLoader has a sampler of its own, ranks have different
                streams, or one is evaluated outside hooks and steps.
        """
        data = EvaluatedData(dataset, batch_samples=batch_samples, collate=collate, seed=self.config.seed)
        if data.is_stream:
            group = self._loop.exchanges.begin("job.part of a stream")
            agree_on_stream(group, data, seed=self.config.seed, fail=self._loop.agreement.fail)
        return part_of(self._loop.active_group, data, device=self.device)

    @known_keywords
    def evaluate(
        self, dataset: Evaluated, measure: Measure, *, batch_samples: int | None = None,
        collate: batches.Collate | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Return means over a data set, each sample once, computed by all ranks together; for hooks.

        Hooks are those of ``on_epoch_end`` and ``every_steps``. It works in every layout, also where no rank has the
        whole model. Batches are pairs, as in ``step.compute``.

        Args:
            dataset: as in ``job.part``; a model that is cut into stages needs one with a length.
            measure: returns means over the samples of a batch by name, from (output, targets); numbers, or tensors
                with one element. In a pipeline, the member's last stage calls it.
            batch_samples: as in ``job.part``.
            collate: makes a batch from a list of samples; torch's own by default.

        Raises:
            UsageError: this is called elsewhere, the data cannot be divided (``job.part``), a batch is not a pair, or
                ``measure`` returns something else.
        """
        model = self._training.model
        if model is None:
            raise UsageError("call model = job.wrap(model) before job.evaluate")
        group = self._loop.exchanges.begin("job.evaluate")
        data = EvaluatedData(dataset, batch_samples=batch_samples, collate=collate, seed=self.config.seed)
        schedule = self._wrapped.part.schedule
        if schedule is None:
            agree_on_stream(group, data, seed=self.config.seed, fail=self._loop.agreement.fail)
            parts = part_of(self._loop.active_group, data, device=self.device)
            with torch.no_grad():
                own = sums(measured(model, batch, measure) for batch in parts)
            check_read(group, data)
            return means(group, own)
        method = Method(autocast=self._numerics.precision.autocast)
        return evaluated_by_part(schedule, self._loop.require_group(), data, measure, device=self.device, method=method)

    def finish(self, reason: str) -> None:
        """End the training successfully after the current step, on all ranks; one of them is enough.

        In hooks and after a step, the steps that are committed by then are the last ones. Where another rank has begun
        the next step meanwhile, nobody commits that.
        """
        self._loop.finish(reason)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader: the lowest one of the current members, and the only one of them.

        Alone and under torchrun this is known from ``init`` on. In a worker pod the members meet in ``job.steps``;
        before the first step, no rank is the leader. When the leader is lost or leaves, another rank becomes leader
        before the next step (``on_leader_change``).
        """
        return self._leadership.asked()

    def _abandon(self, reason: str) -> None:
        if not self._is_ready:
            return
        self._loop.leave_early()
        self._report.gauges({names.READY: 0.0})
        self._membership.abandon(reason)

    def _record_file(self) -> bytes | None:
        return self._record.file(self._training.progress)

    def _where(self) -> tuple[int, int]:
        return (self._training.progress.epoch, self._training.progress.steps)

    def _position(self) -> Tags:
        """Return this rank's position in the training, for its log lines."""
        if not self._is_ready:
            return {}
        epoch, step = self._where()
        active_group = self._loop.active_group
        if active_group is None:
            return {"epoch": epoch, "step": step}
        return {
            "rank": active_group.rank,
            "formation": str(active_group.roster.formation),
            "epoch": epoch,
            "step": step,
        }


def _is_one_of(name: str, value: str, one: str, other: str) -> bool:
    """Return whether an argument is the first of two words.

    Raises:
        UsageError: it is neither.
    """
    if value not in (one, other):
        raise UsageError(f'{name} must be "{one}" or "{other}", not {value!r}')
    return value == one
