"""Results of the layout planner: members with their layouts and predicted times, or why there are none."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heterotrain_core.contract.plan import ComputeTime, Layout, LayoutKind, Member, Prediction

_WHOLE = 2**16
"""Weight of the whole training state."""


class HeldUnits(NamedTuple):
    """What a device holds: units ``[first, end)``, and of each unit's state the part from ``start`` to ``stop``."""

    first: int
    end: int
    start: float = 0.0
    stop: float = 1.0


def held_by_place(cuts: Sequence[int], weights: Sequence[float], units: int) -> tuple[HeldUnits, ...]:
    """Return what each stage, or each shard, of a layout holds.

    Args:
        cuts: first unit of each stage but the first one.
        weights: parts of the state by shard, in proportion to these numbers; empty for stages.
        units: of the model.
    """
    if not weights:
        return tuple(HeldUnits(first, end) for first, end in itertools.pairwise((0, *cuts, units)))
    edges = [0.0, *itertools.accumulate(weights)]
    return tuple(HeldUnits(0, units, start / edges[-1], stop / edges[-1]) for start, stop in itertools.pairwise(edges))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """Contiguous units on one device.

    Attributes:
        kind: name of the device kind.
        first_unit, last_unit: indices into ``Problem.units``, both included.
        forward_s: seconds of one micro-batch's forward pass, without transfers.
        backward_s: of its backward pass.
        input_s: seconds in which it waits for the bytes of its input; 0 for the first stage.
        gradient_s: the same for the gradient of its output; 0 for the last stage. Receiving does not overlap with
            computing.
        memory_bytes: training state, and the activations of all micro-batches that it keeps at the same time.
        recomputes: whether it computes activations again in the backward pass, whose seconds contain that.
    """

    kind: str
    first_unit: int
    last_unit: int
    forward_s: float
    backward_s: float
    input_s: float
    gradient_s: float
    memory_bytes: int
    recomputes: bool = False

    @property
    def busy_s(self) -> float:
        """Seconds of one micro-batch in this stage."""
        return self.forward_s + self.backward_s + self.input_s + self.gradient_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """One device of a sharded member.

    Attributes:
        kind: name of the device kind.
        state_ratio: part of the training state that it holds; the parts of a member sum to 1.
        share_samples: its part of the member's share.
        micro_batch_samples: largest micro-batch; the share is accumulated over several.
        memory_bytes: its state, activations, and the units that are gathered at the same time.
    """

    kind: str
    state_ratio: float
    share_samples: int
    micro_batch_samples: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """How devices of some kinds hold the model as one member, with the times and bytes of each.

    Attributes:
        kind: replicated layouts have one stage, pipelines several; sharded ones have shards.
        stages: in the order of computation; empty for a sharded layout.
        shards: by local position; empty otherwise.
    """

    kind: LayoutKind
    stages: tuple[PlannedStage, ...] = ()
    shards: tuple[PlannedShard, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first unit of each stage but the first one."""
        return tuple(stage.first_unit for stage in self.stages[1:])

    @property
    def planned(self) -> Layout:
        """The same as a plan names it: without devices, bytes and times; parts of shards in units of 2⁻¹⁶.

        Their edges are rounded, so that equal edges of two members stay equal, and no owners of a sliver come between.
        """
        shards = self.shards if len(self.shards) > 1 else ()
        parts = itertools.accumulate((shard.state_ratio for shard in shards), initial=0.0)
        edges = [round(_WHOLE * edge) for edge in parts]
        return Layout(
            kind=self.kind,
            cuts=self.cuts,
            recomputing=tuple(index for index, stage in enumerate(self.stages) if stage.recomputes),
            shards=max(1, len(self.shards)),
            state_weights=tuple(max(1, end - begin) for begin, end in itertools.pairwise(edges)),
            sample_weights=tuple(shard.share_samples for shard in shards),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each device, by stage or shard."""
        return (*(stage.kind for stage in self.stages), *(shard.kind for shard in self.shards))

    @property
    def devices(self) -> Mapping[str, int]:
        """Devices by kind."""
        return Counter(self.kinds)

    def member(
        self,
        index: int,
        share_samples: int,
        micro_batch_samples: int,
        compute: ComputeTime,
        *,
        cap_samples: int | None = None,
    ) -> Member:
        """Return a member with this layout as a plan names it."""
        return Member(
            index=index,
            pool="+".join(dict.fromkeys(self.kinds)),
            share_samples=share_samples,
            micro_batch_samples=micro_batch_samples,
            cap_samples=cap_samples,
            granularity_samples=micro_batch_samples,
            compute=compute,
            layout=self.planned,
        )

    def held(self, units: int) -> tuple[HeldUnits, ...]:
        """Return what each stage or shard holds of a model with so many units."""
        return held_by_place(self.cuts, [shard.state_ratio for shard in self.shards], units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The best layout for some devices, whichever nodes they are on, with the time of each share.

    A share of n micro-batches takes ``first_s + (n − 1) next_s``.

    Attributes:
        devices: by kind, in the order of ``Problem.kinds``.
        micro_batch_samples: samples that the member processes at a time; shares are multiples of it.
        first_s: seconds of a share of one micro-batch; the fill of a pipeline.
        next_s: seconds of each further one; the slowest stage of a pipeline.
        layout: what each device holds.
    """

    devices: tuple[int, ...]
    micro_batch_samples: int
    first_s: float
    next_s: float
    layout: DeviceLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """Members that use the devices, with the division of one global batch among them.

    Attributes:
        members: as a plan names them, each pool after the kinds of its devices; shares sum to the global batch. A time
            model is that of the slowest stage for each sample, and the fill of the pipeline and the update once a step.
        layouts: what the devices of each member hold.
        unused: devices by kind that are in no member.
        prediction: of the step: the slowest member by simulation of its schedule with its update, and the exchange. Its
            efficiency is the rate over that of all devices if they computed all the time.
        exchange_s: seconds of the exchange between members, each piece among its owners, none of it hidden.
        reason: one sentence for people.
    """

    members: tuple[Member, ...]
    layouts: tuple[DeviceLayout, ...]
    unused: Mapping[str, int]
    prediction: Prediction
    exchange_s: float
    reason: str

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.step_s

    @property
    def samples_per_s(self) -> float:
        """The global batch over ``step_s``."""
        return sum(member.share_samples for member in self.members) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NoLayout:
    """No layout exists.

    Attributes:
        reason: the bytes that are missing, the largest placement that fits, and a remedy.
        needed_bytes: training state of the whole model, with the activations of one smallest micro-batch; 0 where the
            obstacle is not memory.
        available_bytes: memory of all devices.
        fitting_units: most units, counted from the last one, that any pipeline of these devices can hold.
    """

    reason: str
    needed_bytes: int = 0
    available_bytes: int = 0
    fitting_units: int = 0
