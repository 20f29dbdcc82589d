"""This rank's ballot in the vote on a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterotrain.checkpoints.manager import CheckpointManager
from heterotrain.checkpoints.manifest import new_mark
from heterotrain.exchange.interface import Gradients
from heterotrain.membership.interface import ActiveGroup
from heterotrain.membership.plan_source import HeldPlan
from heterotrain.network.control import LAST, Slot
from heterotrain.numerics.method import Numerics
from heterotrain.state.training import TrainState
from heterotrain.steps.observer import Observer
from heterotrain.steps.replicas import Replicas
from heterotrain.steps.shutdown import Shutdown
from heterotrain.steps.step_passes import StepPasses
from heterotrain.steps.vote import read_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBallot:
    """The parts of this rank that have something to say."""

    training: TrainState
    checkpoints: CheckpointManager
    numerics: Numerics
    observer: Observer
    replicas: Replicas
    shutdown: Shutdown

    def slot(
        self, step: StepPasses, active_group: ActiveGroup, reducer: Gradients, held: HeldPlan, *,
        ok: bool, leaving: bool, waiting: bool, hooks_follow: bool,
    ) -> Slot:  # fmt: skip
        """Return this rank's slot of the control vector.

        Args:
            step: the step.
            active_group: the formation.
            reducer: of the gradients.
            held: the newest plan that this rank holds.
            ok: whether this rank has computed its part.
            leaving: whether it leaves after the step.
            waiting: whether it would leave, but waits for a plan without it.
            hooks_follow: whether long hooks come next.
        """
        observer, state = self.observer, self.numerics.forward_state
        buckets = len(reducer.buckets)  # the same in every rank's slot, even if layers were frozen since the last step
        return Slot(
            vote=ok, steps=step.task.number, generation=held.plan.generation, revision=held.plan.revision,
            plan_bytes=held.size_bytes, plan_checksum=held.checksum, leaving=leaving, waiting=waiting,
            weight=step.weight, loss_sum=read_loss(step.loss_sum, active_group.group),
            checkpoint=self.checkpoints.proposes(active_group, self.training, before_hooks=hooks_follow),
            mark=new_mark() if active_group.rank == 0 else 0,  # only the lowest rank's mark is read
            plain=observer.plain, preconditioned=observer.preconditioned, measure_every=observer.budget.measure_every,
            fingerprint=math.nan if step.passes else self.replicas.fingerprint,  # compared in the first pass
            buckets_s=observer.buckets_s if len(observer.buckets_s) == buckets else (math.nan,) * buckets,
            signature=reducer.signature, more=step.more, unused=reducer.unused, parameters=reducer.parameters,
            changed=state.is_active and state.has_news, summed=step.summed.code,
            ends=self.shutdown.ends(step.task.number), samples=step.task.batch_samples + LAST * step.task.ends_epoch,
        )  # fmt: skip
