"""Inputs of the layout planner: measured units, kinds of devices with their links, and the job's limits.

Everything here is a frozen value. ``invalid`` states in one sentence what is wrong with a problem; every planner
function assumes that it returned ``None``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from heterotrain_core.units import UnitProfile, UnitSeconds

MOST_UNITS = 4096
"""Units of a model. Deep models have some hundred blocks."""
MOST_KINDS = 32
"""Kinds of devices in one problem."""
MOST_DEVICES = 65536
"""Devices of one kind."""
MOST_MICRO_BATCHES = 16
"""Candidate sizes of a micro-batch."""
MOST_BATCH_SAMPLES = 10**9
"""Samples of a global batch."""
MOST_BYTES = 1e18
"""Bytes of anything: an exabyte, far beyond real devices, and exact enough in a float."""
MOST_UPDATE_S_PER_BYTE = 1.0
"""Seconds of the optimizer for a byte of parameters. Slow processors take some 1e-9."""
LEAST_SECONDS = 1e-9
"""Shorter than any device takes. In a step of seconds such times vanish by rounding, and a search may never end."""
MOST_SECONDS = 1e6
"""Seconds of one pass through one unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Devices that are equal for the planner.

    Attributes:
        name: unique; usually the pool's name.
        count: devices that may be used.
        memory_bytes: usable bytes of one device, without what allocator and libraries take.
        price_per_hour: of one device.
        devices_per_node: devices that share a node and its fast links, at least 1.
        update_s_per_byte: seconds of the optimizer for each byte of parameters, once a step.
    """

    name: str
    count: int
    memory_bytes: int
    price_per_hour: float = 0.0
    devices_per_node: int = 1
    update_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between two devices, the same in both directions, which do not slow each other.

    Attributes:
        bytes_per_s: above 0; ``math.inf`` for a connection that takes no time.
        latency_s: until the first byte arrives.
    """

    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        """Return how long a message of this size takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One job's model and devices.

    Attributes:
        units: in the order of computation.
        kinds: unique names; a kind may have no device at the moment.
        default_link: between devices whose kinds are not in ``links``.
        links: by pair of names, in either order; a pair of equal names is the link between two devices of a kind.
        state_ratio: bytes of training state for each byte of parameters: parameters, gradients and optimizer. Adam in
            FP32 has 4.
        batch_samples: the global batch.
        micro_batches: candidate sizes of a micro-batch, in samples, without repetition. Each member may take another.
        least_members: members that there must be; f + 1 for a job that survives f losses without a checkpoint.
        most_stages: stages of one member at most.
        may_cut: whether members may be pipelines.
        may_shard: whether members may be sharded, over devices of any kinds.
        may_recompute: whether a stage that lacks memory may compute the activations of its units again in the backward
            pass. It then keeps only what enters each of them, and all activations of one; the model's first and last
            unit stay as they are.
        reduces_late: whether sharded members are those of the trainer over several workers. They gather a unit ahead
            like others, but add up a unit's gradients before the next unit computes, and keep the first and the last
            unit gathered for whole passes. Otherwise these sums are made while the next unit computes.
        ends_inside: whether the first and the last unit are layers of the model's list, as in ``nn.Sequential``. Then
            such members gather, reduce and release them like the others.
    """

    units: tuple[UnitProfile, ...]
    kinds: tuple[DeviceKind, ...]
    default_link: Link = Link()
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    state_ratio: float = 4.0
    batch_samples: int
    micro_batches: tuple[int, ...]
    least_members: int = 1
    most_stages: int = 16
    may_cut: bool = True
    may_shard: bool = False
    may_recompute: bool = False
    reduces_late: bool = False
    ends_inside: bool = False

    def link(self, one: str, other: str) -> Link:
        """Return the link between two kinds, whichever way round it was given."""
        return self.links.get((one, other)) or self.links.get((other, one)) or self.default_link


def invalid(problem: Problem) -> str | None:
    """Return in one sentence the first thing that makes a problem unusable, ``None`` when it is sound."""
    return _invalid_limits(problem) or _invalid_kinds(problem) or _invalid_links(problem) or _invalid_units(problem)


def _invalid_limits(problem: Problem) -> str | None:
    sizes = problem.micro_batches
    checks = (
        ("batch_samples", problem.batch_samples, 1, MOST_BATCH_SAMPLES),
        ("least_members", problem.least_members, 1, MOST_KINDS * MOST_DEVICES),
        ("most_stages", problem.most_stages, 1, MOST_UNITS),
        ("the number of units", len(problem.units), 1, MOST_UNITS),
        ("the number of device kinds", len(problem.kinds), 1, MOST_KINDS),
        ("the number of micro-batch sizes", len(sizes), 1, MOST_MICRO_BATCHES),
        *(("a micro-batch", size, 1, problem.batch_samples) for size in sizes),
        ("state_ratio", problem.state_ratio, 1.0, 1000.0),
    )
    for what, value, low, high in checks:
        if not low <= value <= high:
            return f"{what} is {value}, but it has to be between {low} and {high}"
    return "a micro-batch size is listed twice" if len(set(sizes)) < len(sizes) else None


def _invalid_kinds(problem: Problem) -> str | None:
    names = [kind.name for kind in problem.kinds]
    if len(set(names)) < len(names):
        return f"a device kind is listed twice: {min(name for name in names if names.count(name) > 1)}"
    for kind in problem.kinds:
        checks = (
            ("devices", kind.count, 0, MOST_DEVICES),
            ("bytes of memory", kind.memory_bytes, 0, MOST_BYTES),
            ("as price_per_hour", kind.price_per_hour, 0, MOST_BYTES),
            ("devices on a node", kind.devices_per_node, 1, MOST_DEVICES),
            ("as update_s_per_byte", kind.update_s_per_byte, 0, MOST_UPDATE_S_PER_BYTE),
        )
        for what, value, low, high in checks:
            if not low <= value <= high:
                return f"device kind {kind.name} has {value} {what}, but it has to be between {low} and {high:g}"
    return None if any(kind.count for kind in problem.kinds) else "there is no device of any kind"


def _invalid_links(problem: Problem) -> str | None:
    names = {kind.name for kind in problem.kinds}
    for pair in problem.links:
        if len(pair) != 2 or not set(pair) <= names:  # noqa: PLR2004  # a pair
            return f"a link joins {pair}, which are not two of the device kinds"
    for link in (problem.default_link, *problem.links.values()):
        # Not "<= 0": that would let NaN through.
        if not link.bytes_per_s > 0 or not 0 <= link.latency_s <= MOST_SECONDS:
            return f"the link {link} needs bytes_per_s above 0 and latency_s between 0 and {MOST_SECONDS:g}"
    return None


def _invalid_units(problem: Problem) -> str | None:
    for index, unit in enumerate(problem.units):
        sizes = (unit.parameter_bytes, unit.activation_bytes, unit.boundary_bytes)
        if not all(0 <= size <= MOST_BYTES for size in sizes):
            return f"unit {index} ({unit.name}) has a size that is not between 0 and {MOST_BYTES:g} bytes"
        for kind in problem.kinds:
            points = unit.seconds.get(kind.name, ())
            if not points:
                return f"unit {index} ({unit.name}) was not measured on {kind.name}: measure it or leave the kind out"
            if clause := _invalid_points(points):
                return f"unit {index} ({unit.name}) on {kind.name} {clause}"
    return None


def _invalid_points(points: tuple[UnitSeconds, ...]) -> str | None:
    sizes = [point.micro_batch_samples for point in points]
    if sizes[0] < 1 or any(b <= a for a, b in itertools.pairwise(sizes)):
        return "has measurements whose micro-batches do not grow from at least 1"
    times = [second for point in points for second in (point.forward_s, point.backward_s)]
    if not all(0 <= second <= MOST_SECONDS for second in times):
        return f"has a time that is not between 0 and {MOST_SECONDS:g} s"
    if any(point.forward_s + point.backward_s < LEAST_SECONDS for point in points):
        return f"has a measurement of less than {LEAST_SECONDS:g} s"
    return None
