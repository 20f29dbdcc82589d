"""Makes the loop of a job, and all that it works with."""

from __future__ import annotations

from heterotrain_core.contract.choices import OnDivergence

from heterotrain.checkpoints.record import RunRecord
from heterotrain.identity import Mode
from heterotrain.state import admission
from heterotrain.steps.agreement import Agreement
from heterotrain.steps.attempt import Attempts
from heterotrain.steps.departure import Departure
from heterotrain.steps.ending import End
from heterotrain.steps.formations import Formations
from heterotrain.steps.hooks import Hooks
from heterotrain.steps.job_parts import JobParts
from heterotrain.steps.leadership import Leadership
from heterotrain.steps.loop import Loop
from heterotrain.steps.observer import Observer
from heterotrain.steps.replicas import Replicas
from heterotrain.steps.resources import StepResources
from heterotrain.steps.script_exchanges import ScriptExchanges
from heterotrain.steps.shutdown import Shutdown
from heterotrain.steps.step_records import StepRecords
from heterotrain.telemetry.progress import ProgressDisplay
from heterotrain.telemetry.tensorboard import TensorBoardWriter
from heterotrain.termination_message import TerminationMessage


def loop_of(
    job: JobParts, *, hooks: Hooks, leadership: Leadership, record: RunRecord, termination_message: TerminationMessage,
    display: ProgressDisplay, tensorboard_dir: str | None, micro_batch_samples: int | None,
) -> Loop:  # fmt: skip
    """Return the loop of a job.

    Args:
        job: what it consists of.
        hooks: of the script.
        leadership: is told this rank in each formation.
        record: of the run, for its checkpoints.
        termination_message: how the process ended.
        display: the line on a terminal.
        tensorboard_dir: where curves are written; ``None`` for nowhere.
        micro_batch_samples: the largest micro-batch to try; ``None`` for any.
    """
    config, training, report, numerics, clock = job.config, job.training, job.report, job.numerics, job.clock
    checkpoints, identity, operated = job.checkpoints, job.identity, job.identity.mode is Mode.OPERATED
    on_divergence = admission.choice("onDivergence", config.on_divergence, OnDivergence)
    replicas, observer = Replicas(training, numerics, report, on_divergence), Observer(report, training, numerics)
    shutdown = Shutdown(
        config=config, training=training, membership=job.membership, checkpoints=checkpoints,
        termination_message=termination_message, operated=operated, clock=clock,
    )  # fmt: skip
    departure = Departure(shutdown, grace_s=config.grace_s, operated=operated, clock=clock)
    end = End(shutdown, training, config)
    attempts = Attempts(report, numerics.forward_state, cap_samples=micro_batch_samples)
    formations = Formations(job, shutdown=shutdown, observer=observer)
    exchanges = ScriptExchanges(formations)
    resources = StepResources(job, formations=formations, shutdown=shutdown, observer=observer, attempts=attempts)
    records = StepRecords(
        job, observer=observer, record=record, replicas=replicas, attempts=attempts, display=display,
        tensorboard=TensorBoardWriter(tensorboard_dir, identity, report=report) if tensorboard_dir else None,
    )  # fmt: skip
    agreement = Agreement(
        job, formations=formations, departure=departure, shutdown=shutdown, end=end, hooks=hooks, observer=observer,
        replicas=replicas, records=records, resources=resources, attempts=attempts, exchanges=exchanges,
    )  # fmt: skip
    return Loop(
        job, shutdown=shutdown, formations=formations, exchanges=exchanges, resources=resources,
        agreement=agreement, end=end, observer=observer, replicas=replicas, hooks=hooks, records=records,
        attempts=attempts, formed=leadership.formed,
    )  # fmt: skip
