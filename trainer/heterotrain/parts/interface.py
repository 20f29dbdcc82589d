"""What steps, loop and job know of a layout: this rank's *part* of the model.

``job.wrap`` chooses the part, in ``model_setup`` and nowhere else:

- ``whole``: every rank holds the whole model (data parallelism);
- ``sharded``: ``fully_shard`` divides it among the ranks of a worker;
- ``planned``: each plan gives this rank a stage of a pipeline (``stages``) or a shard by its memory (``unequal``).

Three abilities are optional. A part without one has ``None`` in its place:

- ``OwnSchedule``: the part runs all passes of a share by itself, as a stage of a pipeline does. Without it, a step
  runs the model on one micro-batch after the other.
- ``SecondPhase``: some rank lacks elements that others hold, so all confirm their sums before any applies them.
- a script's own loop over micro-batches: ``check_script_runs`` raises where a script cannot have one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from heterotrain_core.contract.plan import Plan

from heterotrain.errors import UsageError
from heterotrain.exchange.interface import Gradients
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.group import Group
from heterotrain.parts.batches import LossFunction
from heterotrain.state.prepared import Confirmation, PreparedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A member's samples of one step, for a part that runs them by itself.

    Attributes:
        step: number of the step.
        start: the step's samples before the member's first one.
        sizes: samples of each micro-batch, at least one.
        batch_samples: samples of the step over all members.
        fetch: returns a micro-batch, (inputs, targets), by its index.
    """

    step: int
    start: int
    sizes: tuple[int, ...]
    batch_samples: int
    fetch: Callable[[int], Any]


@dataclass(slots=True)
class Result:
    """What a part knows after its passes; loss and weight are zeros on all stages but the last one.

    Attributes:
        loss_sum: sum of the losses, by samples or by the weights of the loss function.
        weight: of the samples.
        load_s: seconds of loading samples.
        forward_s: seconds of forward passes, with waiting for the stage before.
        backward_s: seconds of backward passes, with waiting for the stage after.
    """

    loss_sum: float = 0.0
    weight: float = 0.0
    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How passes compute.

    Attributes:
        autocast: returns the context of forward passes and loss functions.
        loss_scale: factor on the loss in backward passes.
    """

    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    loss_scale: float = 1.0


PLAIN = Method()


class OwnSchedule(Protocol):
    """Runs all passes of a share by itself."""

    def run(
        self,
        share: Share,
        loss_fn: LossFunction,
        *,
        method: Method = PLAIN,
        before_last: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run all forward and backward passes; gradients are added to ``parameter.grad``.

        The loss of a sample counts as in ``step.backward``: divided by the step's samples.

        Args:
            share: the member's samples.
            loss_fn: of the model's output and the micro-batch's targets.
            method: how passes compute.
            before_last: called before the backward pass after which the gradients are complete.

        Raises:
            PeerLost: another rank of the member is lost; gradients are incomplete, and the step has to be repeated.
            UsageError: the loss is not one, or a batch is not a pair.
        """

    def evaluate(
        self, fetch: Callable[[int], Any], batches: int, measure: Callable[[Any, Any], Any], *, method: Method = PLAIN
    ) -> list[Any]:
        """Run forward passes, without gradients; return what ``measure`` makes of each batch, where there is output.

        Args:
            fetch: returns a batch, (inputs, targets), by its number.
            batches: their number, the same on all ranks of the member.
            measure: of the model's output and the batch's targets.
            method: how passes compute.

        Raises as ``run``.
        """


class SecondPhase(Protocol):
    """Lets all ranks confirm that they hold the sums of their own elements, before any of them applies a step."""

    def confirm(self, group: Group | None, prepared: PreparedStep | None) -> Confirmation:
        """Wait until every rank holds its sums; return what all know of the whole gradient.

        Args:
            group: the formation's connections.
            prepared: finishes the step later, once others may have heard of this rank; ``None`` in a pass that is
                not the step's last.

        Raises:
            PeerLost: the group broke meanwhile.
        """


class Part(ABC):
    """What this rank holds of the model, and how it computes with that; without more, the whole model for good.

    Attributes:
        has_phases: whether a script may train with other data, in a second ``job.steps``.
        schedule: runs a whole share by itself; ``None`` where a step runs one micro-batch after the other.
        second_phase: ends a step on all ranks together; ``None`` where each rank of the formation holds the whole
            model, so that a rank that misses the end of a step takes over the state of another one.
    """

    has_phases = True

    # -- a formation -------------------------------------------------------------------------------------------------

    def look(self, example: Callable[[int], Any]) -> None:  # noqa: B027  # a part may need nothing
        """Prepare before the first formation; ``example`` returns the inputs of so many samples of the data set."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027  # as above
        """Take note of an optimizer of the job."""

    def place(self, plan: Plan, plan_rank: int) -> None:  # noqa: B027  # as above
        """Hold what a plan gives this rank; the state follows in the next transfer.

        Raises:
            UsageError: the model cannot be divided as the plan says.
        """

    def wants(self, plan: Plan, plan_rank: int) -> Collection[str]:  # noqa: ARG002  # of parts that plans assign
        """Return the parameters and buffers that a plan gives a rank whole; none where it needs a part of each."""
        return ()

    def room_bytes(self) -> int:
        """Return the memory of this rank for parts of the state that it does not need itself."""
        return 0

    @abstractmethod
    def form(self, active_group: ActiveGroup, cap_samples: int | None) -> int | None:
        """Take part in a new formation: connect the member's ranks, and agree on how gradients are summed.

        Args:
            active_group: the formation.
            cap_samples: the largest micro-batch known to fit on this rank.

        Returns:
            The largest micro-batch known to fit on all ranks of the member.

        Raises:
            PeerLost: a rank was lost meanwhile.
            UsageError: the ranks do not fit together.
        """

    # -- a step ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def gradients(self) -> Gradients:
        """Sums this rank's gradients in the current formation."""

    @property
    def schedule(self) -> OwnSchedule | None:
        """See the class."""
        return None

    @property
    def second_phase(self) -> SecondPhase | None:
        """See the class."""
        return None

    def check_script_runs(self) -> None:  # noqa: B027  # as above
        """Check that a script may run the model itself, one micro-batch after the other.

        Raises:
            UsageError: only ``step.compute`` can run it.
        """

    @abstractmethod
    def forward(self, step: int, start: int, inputs: Any) -> Any:
        """Return the model's output for a micro-batch, which begins at the step's sample ``start``.

        Raises:
            PeerLost: another rank of the member is lost or has left the pass.
        """

    def reserve(self) -> list[torch.Tensor]:
        """Return memory that this rank's update will need, for the caller to free before it.

        Raises:
            OutOfMemory: there is not enough.
        """
        return []

    @abstractmethod
    def spare_memory(self) -> bool:
        """Keep no activations of units from now on; return ``False`` if there is nothing more to spare."""

    def release_memory(self) -> None:  # noqa: B027  # as above
        """Release memory that only saves time, before smaller micro-batches are tried."""

    def leave_pass(self, reason: str, *, keep_gradients: bool) -> None:  # noqa: B027  # as above
        """Leave a forward or backward pass, wherever this rank is in it; the member's other ranks leave it, too.

        ``keep_gradients``: whether they are complete, and the step may still be finished with them.
        """

    def rest(self) -> None:  # noqa: B027  # as above
        """Give up what a pass without gradients keeps gathered."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop reductions that are in flight in a formation that has been cut."""


class Wrapped:
    """The part that ``job.wrap`` makes, when everything else of a job is connected already.

    Attributes:
        known: the part; ``None`` before ``job.wrap``.
    """

    def __init__(self) -> None:
        self.known: Part | None = None

    def take(self, part: Part) -> None:
        """Train this part."""
        self.known = part

    @property
    def part(self) -> Part:
        """The part.

        Raises:
            UsageError: the script has not wrapped a model.
        """
        if self.known is None:
            raise UsageError("call model = job.wrap(model) before job.steps")
        return self.known

    def place(self, plan: Plan, plan_rank: int) -> None:
        """Hold what a plan gives this rank; see ``Part.place``."""
        self.part.place(plan, plan_rank)
