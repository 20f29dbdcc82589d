"""The part of the model that plans give this rank: another one whenever a plan divides the model in another way.

It is a stage of a pipeline, or a part of every unit in a sharded member. A member of one rank is a pipeline of one
stage, which holds all units. The connections of a member are used in steps and hooks only. A rank that leaves a pass
in the middle cuts them, and the next formation connects the ranks again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from heterotrain_core.contract.plan import Layout, LayoutKind, Plan

from heterotrain.errors import OutOfMemory, UsageError
from heterotrain.exchange.interface import Gradients
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.network.heartbeat import PeerKey, key_of
from heterotrain.network.link_speeds import LinkSpeeds
from heterotrain.numerics.elementwise import check_elementwise
from heterotrain.numerics.out_of_memory import out_of_memory
from heterotrain.parts.interface import OwnSchedule, Part, SecondPhase
from heterotrain.parts.memory import give_back, usable_bytes
from heterotrain.parts.pieces.sums import PieceSums
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.stages.stage import Stage
from heterotrain.parts.unequal.shards import ModelShards
from heterotrain.state.layout import is_whole, sizes_of
from heterotrain.state.moved_optimizers import MovedOptimizer
from heterotrain.state.training import TrainState, holding_of

_log = logging.getLogger(__name__)

_WITHOUT_OPTIMIZER = 2.0
"""Parameters and gradients, which exist before an update."""

SCRIPT_RUNS = (
    "a model that is cut into stages is on several workers: replace the loop over step.micro_batches() by "
    "step.compute(loss_fn)"
)


class PlannedPart(Part):
    """The part of a rank that trains what each plan gives it."""

    has_phases = False

    def __init__(
        self,
        model: CuttableModel,
        training: TrainState,
        sums: PieceSums,
        device: torch.device,
        *,
        speeds: LinkSpeeds,
        check_open: Callable[[], None] = lambda: None,
        measure: Callable[[Callable[[int], Any]], float | None] = lambda _example: None,
        ranks_on_host: int = 1,
    ) -> None:
        """Describe a rank without a part of the model.

        Args:
            model: the whole model.
            training: gets this rank's part of the model.
            sums: of the part's gradients.
            device: of this rank.
            speeds: of the links to the member's ranks on other workers.
            check_open: called before each operation inside the member; see ``MemberGroup``.
            measure: looks at the model before the first formation, with samples as in ``look``. It returns the bytes
                of training state for each byte of parameters, ``None`` where it does not measure them.
            ranks_on_host: processes that share the host's memory.
        """
        self._model = model
        self._training = training
        self._sums = sums
        self._device = device
        self._speeds, self._check_open, self._measure = speeds, check_open, measure
        self._ranks_on_host = ranks_on_host
        self._state_ratio: float | None = None
        self._optimizers: list[MovedOptimizer] = []
        self._ranks = 1
        self._group = MemberGroup(rank=0, world_size=1)
        self._part: Stage | ModelShards | None = None
        self._place: tuple[Layout, int] | None = None
        self._connected: tuple[PeerKey, ...] = ()
        self._has_leftovers = False
        self._has_room = False

    def look(self, example: Callable[[int], Any]) -> None:
        """Find out how the model computes, and measure its units for the operator."""
        self._state_ratio = self._measure(example)

    @property
    def part(self) -> Stage | ModelShards:
        """This rank's part of the model.

        Raises:
            UsageError: no plan has given it one yet.
        """
        if self._part is None:
            raise UsageError(
                "this rank has no part of the model yet: run the model inside `for step in job.steps(...)`"
            )
        return self._part

    @property
    def gradients(self) -> Gradients:
        """Sums gradients as the current formation needs it."""
        if self._sums.current is None:
            raise UsageError("this rank sums no gradients yet: train inside `for step in job.steps(...)`")
        return self._sums.current

    @property
    def schedule(self) -> OwnSchedule | None:
        """The stage; ``None`` in a sharded member, where each rank runs the whole model."""
        return self._part if isinstance(self._part, Stage) else None

    @property
    def second_phase(self) -> SecondPhase | None:
        """The second phase where some rank lacks elements that others hold."""
        return self._sums.second_phase

    def check_script_runs(self) -> None:
        """Refuse a script's own loop: the same script has to train in every plan."""
        raise UsageError(SCRIPT_RUNS)

    def forward(self, step: int, start: int, inputs: Any) -> Any:
        """Return the model's output for a micro-batch, in a sharded member."""
        if not isinstance(self._part, ModelShards):
            raise UsageError("a stage has no output of the whole model: run it with step.compute")
        return self._part.forward(step, start, inputs)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer follow the parameters of this rank's part; it was made from those of the whole model."""
        self._optimizers.append(MovedOptimizer(optimizer, self._model.model))

    def place(self, plan: Plan, plan_rank: int) -> None:
        """Make the part that a plan gives this rank, if it has another one; the state follows in the next transfer.

        Raises:
            UsageError: the model cannot be divided as the plan says.
        """
        rank = plan.ranks[plan_rank]
        layout, units = plan.members[rank.member].layout, len(self._model.names)
        divided = layout.kind is LayoutKind.SHARDED and layout.shards > 1
        position = rank.shard if divided else rank.stage
        recomputes = rank.stage in layout.recomputing
        again = (rank.stage,) if recomputes else ()  # what other stages recompute does not change this rank's part
        own = layout if divided else Layout(kind=LayoutKind.PIPELINE, cuts=layout.cuts, recomputing=again)
        wanted = (own, position)
        if layout.shards > 1 and not divided:
            raise UsageError("the plan divides the stages of a pipeline into shards, which this image cannot do")
        if wanted == self._place:
            return
        self._group.cut("this rank takes another part of the model")
        self._group = MemberGroup(
            rank=position, world_size=layout.ranks, check_open=self._check_open, on_received=self._speeds.received
        )
        self._connected = ()
        if self._part is not None:
            for _, parameter in self._part.named_parameters():
                parameter.grad = None  # only the state of the earlier part is needed
        part: Stage | ModelShards
        if divided:
            check_elementwise([optimizer.optimizer for optimizer in self._optimizers])
            part = self._model.shards(layout, self._group)
            held = sum(extent.elements for extent in part.holding.values())
            total = sum(sizes_of(part.shapes).values())
            _log.info("shard %d of %d: %d of %d parameters", position + 1, layout.shards, held, total)
        else:
            cuts = (0, *layout.cuts, units)
            part = self._model.stage(cuts, self._group, recomputes=recomputes)
            _log.info(
                "stage %d of %d: units %d to %d of %d%s", rank.stage + 1, layout.stages, cuts[rank.stage],
                cuts[rank.stage + 1] - 1, units, ", activations computed again" if recomputes else "",
            )  # fmt: skip
        training = self._training
        whole = is_whole(part.shapes, part.holding)
        training.change_layout(part.model, part, begin=lambda: self._model.begin(part))
        parameters = dict(part.named_parameters())
        for optimizer in self._optimizers:
            optimizer.move(parameters)
        training.optimizers = [optimizer.optimizer for optimizer in self._optimizers]
        self._part, self._place, self._ranks = part, wanted, layout.ranks
        self._has_leftovers, self._has_room = True, False
        self._sums.model_changed(part.model, is_whole=whole)
        give_back(self._device)  # all of the earlier part but the tensors of its state

    def wants(self, plan: Plan, plan_rank: int) -> Collection[str]:
        """Return the parameters and buffers of the stage that a plan gives a rank; none in a sharded member.

        There, each rank needs a part of every one, which the next transfer brings.

        Raises:
            UsageError: the model cannot be divided as the plan says.
        """
        rank = plan.ranks[plan_rank]
        layout = plan.members[rank.member].layout
        if layout.kind is LayoutKind.SHARDED:
            return ()
        group = MemberGroup(rank=rank.stage, world_size=layout.stages)
        cuts = (0, *layout.cuts, len(self._model.names))
        found = holding_of(self._model.stage(cuts, group))
        return (self._model.model.state_dict() if found is None else found).keys()

    def room_bytes(self) -> int:
        """Return this rank's share of the host's memory."""
        return usable_bytes(torch.device("cpu"), ranks=self._ranks_on_host)

    def form(self, active_group: ActiveGroup, cap_samples: int | None) -> int | None:
        """Take part in a new formation, connecting the member's ranks where they are not.

        Raises:
            PeerLost: a rank was lost meanwhile.
        """
        if self._has_leftovers:
            self._has_leftovers = False
            give_back(self._device)
        cap = self._connect(active_group, cap_samples)
        if active_group.group is not None:
            self._sums.form(active_group.group)
        return cap

    def _connect(self, active_group: ActiveGroup, cap_samples: int | None) -> int | None:
        roster, group = active_group.roster, active_group.group
        if group is None or all(member.layout.ranks == 1 for member in roster.members):
            return cap_samples
        position = roster.positions[active_group.rank]
        mine = [rank for rank, other in enumerate(roster.positions) if other == position]
        keys = tuple(key_of(roster.ranks[rank]) for rank in mine)
        intact = self._group.is_connected and keys == self._connected
        own = roster.ranks[active_group.rank].worker_uid
        others = {place: roster.ranks[rank] for place, rank in enumerate(mine)}
        others = {place: each for place, each in others.items() if each.worker_uid != own}
        self._speeds.form({place: roster.plan.pool_of(each) for place, each in others.items()})
        rows = group.gather_now([float(intact), float(cap_samples or math.inf)])
        if self._ranks > 1:
            again = any(not rows[rank][0] for rank in mine)
            self._connected = ()
            group.attach(self._group, f"member {position}" if again else "", "gloo")
            self._connected = keys
        cap = min(rows[rank][1] for rank in mine)
        return None if math.isinf(cap) else int(cap)

    def reserve(self) -> list[torch.Tensor]:
        """Return memory for what a stage's first update allocates; the caller frees it right before the update.

        Optimizers make their state in their first update. When that fails, others may have committed the step, and with
        this rank a part of the model would be lost. So it is found out before the vote whether the state fits, next to
        all that the exchange of gradients takes.

        Raises:
            OutOfMemory: it does not fit.
        """
        if self._has_room or self._state_ratio is None:
            return []
        optimizers = [each.optimizer for each in self._optimizers]
        with_state = {id(p) for optimizer in optimizers for p in optimizer.state}
        parameters = [p for _, p in self.part.named_parameters() if p.requires_grad]
        more = max(0.0, self._state_ratio - _WITHOUT_OPTIMIZER)
        sizes = [
            size
            for p in parameters
            if id(p) not in with_state
            for size in [*([p.nbytes] * int(more)), int(p.nbytes * (more % 1))]
        ]
        held: list[torch.Tensor] = []
        try:
            for size in [*sizes, *_temporary_bytes(optimizers, parameters)]:
                room = torch.empty(size, dtype=torch.uint8, device=self._device)
                held.append(room.zero_())  # a container's kernel counts pages from their first use
        except RuntimeError as error:
            if out_of_memory(error) is None:
                raise
            held.clear()
            raise OutOfMemory(
                "the optimizer's state of this rank's units does not fit into memory: they need a device with more of "
                "it, or a cut that gives this one fewer units"
            ) from None
        self._has_room = True
        return held

    def spare_memory(self) -> bool:
        """Keep no activations of units from now on; return ``False`` if there is nothing more to spare."""
        if not self._model.checkpoint_units():
            return False
        self.part.checkpoint_units()
        return True

    def leave_pass(self, reason: str, *, keep_gradients: bool) -> None:  # noqa: ARG002  # of a part
        """Leave a pass, wherever this rank is in it; the member's other ranks leave it, too. Gradients stay."""
        if self._ranks > 1:
            self._group.cut(reason)
        self.rest()

    def rest(self) -> None:
        """Give up what an interrupted pass, or one without gradients, keeps gathered."""
        if isinstance(self._part, ModelShards):
            self._part.forget_pass()

    def abandon(self) -> None:
        """Drop reductions that are in flight."""
        self._sums.abandon()


def _temporary_bytes(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.nn.Parameter]
) -> list[int]:
    """Return the sizes of temporary tensors that torch's optimizers have in an update at the same time, about.

    Those that treat all parameters together (``foreach``, the default on GPUs) have one of each parameter's size, those
    that treat one after the other two of the largest one's, and fused ones none.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not parameters or all(group.get("fused") for group in groups):
        return []
    by_default = parameters[0].is_cuda
    if any(by_default if group.get("foreach", False) is None else group.get("foreach", False) for group in groups):
        return [p.nbytes for p in parameters]
    return 2 * [max(p.nbytes for p in parameters)]
