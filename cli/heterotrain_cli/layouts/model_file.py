"""A model file: measured units and the devices to place them on, as users write it (``docs/forecast.md``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.problem import (
    MOST_BATCH_SAMPLES,
    MOST_DEVICES,
    MOST_KINDS,
    MOST_MICRO_BATCHES,
    MOST_UNITS,
    DeviceKind,
    Link,
    Problem,
)
from pydantic import Field

from heterotrain_cli.documents import Document, DocumentPart, Integer, Name, Number, Price, Seconds, schema_config
from heterotrain_cli.errors import InputError

_GIB, _GBIT = 1024**3, 1e9 / 8
_Bytes = Annotated[Integer, Field(ge=0, le=10**18)]


class Measured(DocumentPart):
    """One measurement of a unit on a kind of device."""

    micro_batch_samples: Annotated[Integer, Field(ge=1, le=MOST_BATCH_SAMPLES)]
    """Samples of the micro-batch."""
    forward_s: Seconds
    """Seconds of its forward pass."""
    backward_s: Seconds
    """Seconds of its backward pass."""


class Unit(DocumentPart):
    """One unit, or ``count`` equal ones in a row."""

    name: Name
    """Shown in the answer, such as ``blocks``."""
    count: Annotated[Integer, Field(ge=1, le=MOST_UNITS)] = 1
    """Equal units that this entry stands for."""
    parameter_bytes: _Bytes
    """Bytes of its own parameters."""
    activation_bytes: _Bytes
    """Bytes for each sample that it keeps from the forward pass until its backward pass."""
    boundary_bytes: _Bytes
    """Bytes of its output for each sample."""
    seconds: Annotated[Mapping[str, Annotated[list[Measured], Field(min_length=1)]], Field(min_length=1)]
    """Measurements by kind of device, with growing micro-batches."""


class Devices(DocumentPart):
    """Equal devices."""

    name: Name
    """The kind, as in the units' ``seconds``; usually a pool's name."""
    count: Annotated[Integer, Field(ge=0, le=MOST_DEVICES)]
    """Devices that may be used."""
    memory_gib: Annotated[Number, Field(ge=0, le=1e9)]
    """Usable memory of one device, in GiB."""
    price_per_hour: Price = 0
    """Price of one device for an hour, in any currency."""
    per_node: Annotated[Integer, Field(ge=1, le=MOST_DEVICES)] = 1
    """Devices that share a node."""
    update_seconds_per_gib: Seconds = 0
    """Seconds of the optimizer for each GiB of parameters that a device holds, once a step."""


class Connection(DocumentPart):
    """A link between two devices."""

    gbit_per_second: Annotated[Number, Field(gt=0, le=1e9)] = 1e9
    """Bandwidth in each direction."""
    latency_s: Seconds = 0
    """Seconds until the first byte arrives."""

    def link(self) -> Link:
        """Return the link as the core takes it."""
        return Link(bytes_per_s=self.gbit_per_second * _GBIT, latency_s=self.latency_s)


class KindsConnection(Connection):
    """The link between two kinds of devices."""

    between: tuple[Name, Name]
    """The two kinds; twice the same for the link inside a kind."""


class ModelFile(Document):
    """A model as a sequence of units, and devices to place it on (``heterotrain forecast --model``)."""

    model_config = schema_config("model")

    units: Annotated[tuple[Unit, ...], Field(min_length=1)]
    """In the order of computation."""
    devices: Annotated[tuple[Devices, ...], Field(min_length=1, max_length=MOST_KINDS)]
    """Kinds of devices; each one needs measurements of every unit."""
    default_link: Connection = Connection()
    """Between devices that ``links`` does not name."""
    links: tuple[KindsConnection, ...] = ()
    """Links between certain kinds."""
    state_ratio: Annotated[Number, Field(ge=1, le=1000)] = 4.0
    """Bytes of training state for each byte of parameters: 4 for Adam in FP32."""
    micro_batches: Annotated[
        tuple[Annotated[Integer, Field(ge=1, le=MOST_BATCH_SAMPLES)], ...],
        Field(min_length=1, max_length=MOST_MICRO_BATCHES),
    ] = (1, 2, 4, 8)
    """Sizes of micro-batches to choose from, in samples."""
    least_members: Annotated[Integer, Field(ge=1, le=MOST_DEVICES)] = 1
    """Members that there must be: f + 1 survive f losses without a checkpoint."""
    most_stages: Annotated[Integer, Field(ge=1, le=MOST_UNITS)] = 16
    """Stages of one member at most."""

    def problem(self, batch_samples: int) -> Problem:
        """Return the planner's problem for a global batch.

        Raises:
            InputError: the file has too many units, or no micro-batch is as small as the batch.
        """
        units = tuple(
            UnitProfile(
                name=unit.name if unit.count == 1 else f"{unit.name}.{number}", parameter_bytes=unit.parameter_bytes,
                activation_bytes=unit.activation_bytes, boundary_bytes=unit.boundary_bytes,
                seconds={
                    kind: tuple(UnitSeconds(**dict(point)) for point in points) for kind, points in unit.seconds.items()
                },
            )
            for unit in self.units
            for number in range(unit.count)
        )  # fmt: skip
        sizes = tuple(dict.fromkeys(size for size in self.micro_batches if size <= batch_samples))
        if not sizes:
            raise InputError(
                f"no micro-batch is as small as the batch of {batch_samples}: add a smaller one to microBatches"
            )
        kinds = tuple(
            DeviceKind(
                name=kind.name, count=kind.count, memory_bytes=math.floor(kind.memory_gib * _GIB),
                price_per_hour=kind.price_per_hour,
                devices_per_node=kind.per_node, update_s_per_byte=kind.update_seconds_per_gib / _GIB,
            )
            for kind in self.devices
        )  # fmt: skip
        return Problem(
            units=units, kinds=kinds, default_link=self.default_link.link(),
            links={link.between: link.link() for link in self.links}, state_ratio=self.state_ratio,
            batch_samples=batch_samples, micro_batches=sizes, least_members=self.least_members,
            most_stages=self.most_stages, may_recompute=True,
        )  # fmt: skip
