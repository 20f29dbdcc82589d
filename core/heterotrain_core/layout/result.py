"""Results of the layout planner: members with their layouts and predicted times, or why there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from heterotrain_core.contract.choices import Choice
from heterotrain_core.contract.plan import Binding


class LayoutKind(Choice):
    """How a member's devices divide the work and the state."""

    REPLICATED = "Replicated"
    """One device holds everything."""
    SHARDED = "Sharded"
    """Each device computes all units on its part of the share; parameters and optimizer state are divided."""
    PIPELINE = "Pipeline"
    """Each device holds contiguous units; micro-batches pass through the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Contiguous units on one device.

    Attributes:
        kind: name of the device kind.
        first_unit, last_unit: indices into ``Problem.units``, both included.
        forward_s: seconds of one micro-batch's forward pass, without transfers.
        backward_s: of its backward pass.
        receive_s: seconds in which the stage waits for the bytes of one micro-batch: its input in the forward pass and
            the gradient of its output in the backward pass. Receiving does not overlap with computing.
        memory_bytes: training state, and the activations of all micro-batches that it keeps at the same time.
    """

    kind: str
    first_unit: int
    last_unit: int
    forward_s: float
    backward_s: float
    receive_s: float
    memory_bytes: int

    @property
    def busy_s(self) -> float:
        """Seconds of one micro-batch in this stage."""
        return self.forward_s + self.backward_s + self.receive_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
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
class Layout:
    """How the devices of one member hold the model.

    Attributes:
        kind: replicated layouts have one stage, pipelines several; sharded ones have shards.
        stages: in the order of computation; empty for a sharded layout.
        shards: by local position; empty otherwise.
    """

    kind: LayoutKind
    stages: tuple[Stage, ...] = ()
    shards: tuple[Shard, ...] = ()

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first unit of each stage but the first one."""
        return tuple(stage.first_unit for stage in self.stages[1:])

    @property
    def devices(self) -> Mapping[str, int]:
        """Devices by kind."""
        return Counter([*(stage.kind for stage in self.stages), *(shard.kind for shard in self.shards)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The best layout for some devices, whichever nodes they are on, with the time of each share.

    A share of n micro-batches takes ``first_s + (n − 1) next_s``.

    Attributes:
        devices: by kind, in the order of ``Problem.kinds``.
        micro_batch_samples: samples that the member processes at a time; shares are multiples of it.
        first_s: seconds of a share of one micro-batch; the fill of a pipeline.
        next_s: seconds of each further one; the slowest stage of a pipeline.
        exchange_bytes: gradient bytes of the device that has most.
        layout: what each device holds.
    """

    devices: tuple[int, ...]
    micro_batch_samples: int
    first_s: float
    next_s: float
    exchange_bytes: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member with its share and its predicted times.

    Attributes:
        layout: its devices and what they hold.
        share_samples: samples of each global batch.
        micro_batch_samples: size of a micro-batch; the last one of a share is filled up with samples of weight zero.
        micro_batches: of the share.
        compute_s: predicted seconds from the first forward pass to the last backward pass.
        binding: what keeps it from a shorter step.
    """

    layout: Layout
    share_samples: int
    micro_batch_samples: int
    micro_batches: int
    compute_s: float
    binding: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
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
