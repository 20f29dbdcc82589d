"""``job.wrap``: makes of the script's model this rank's part, in the job's layout.

The only place that knows which layouts there are (``parts.interface``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from heterotrain_core.contract.choices import Parallelism
from heterotrain_core.contract.plan import Layout, LayoutKind

from heterotrain.errors import UsageError
from heterotrain.membership.fixed import Fixed
from heterotrain.network.gloo.member_group import MemberGroup
from heterotrain.network.link_speeds import LinkSpeeds
from heterotrain.numerics.elementwise import is_elementwise
from heterotrain.parts.memory import leave_out_what_is_loaded, usable_bytes
from heterotrain.parts.pieces.sums import PieceSums
from heterotrain.parts.planned.cuttable import CuttableModel
from heterotrain.parts.planned.part import PlannedPart
from heterotrain.parts.planned.processors import usable_processors
from heterotrain.parts.sharded.part import ShardedPart
from heterotrain.parts.sharded.sharded import shard, uses_of
from heterotrain.parts.sharded.sharded_model import ShardedModel
from heterotrain.parts.units.draws import UnitDraws
from heterotrain.parts.units.initial_weights import InitialValues, built
from heterotrain.parts.units.units import Units, units_of
from heterotrain.parts.units.weight_files import PretrainedWeights
from heterotrain.parts.units.wrappers import WrapOptions as WrapOptions  # noqa: PLC0414  # job.wrap takes it from here
from heterotrain.parts.units.wrappers import prepare_units
from heterotrain.parts.whole.graphs import GraphedForward, check_recordable
from heterotrain.parts.whole.part import WholePart
from heterotrain.parts.whole.recording import CudaRecorder
from heterotrain.state import admission
from heterotrain.steps.job_parts import JobParts
from heterotrain.telemetry.unit_report import report_units

_log = logging.getLogger(__name__)

PROFILE_S = 20.0
"""Seconds after which units of a model are measured once only."""

OFFLOADED_STAGES = (
    "job.wrap: offload=True is not possible for stages and for sharded members of several workers, whose state stays "
    "in the devices' memory: leave it out and let the plan use more workers, or divide the model inside each worker "
    "(spec.parallelism.mode Sharded, or parallelism='sharded')"
)
"""Said before anything is planned: the operator would plan with the devices' memory, and the job run out of it."""

DIVIDED_GRAPHS = (
    "job.wrap: graphs=True is for a model that each rank holds whole, in one unit: leave it out, or leave out units= "
    "and set spec.parallelism.mode Data"
)

Model = torch.nn.Module | Callable[[], torch.nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """What ``job.wrap`` needs of a job.

    Attributes:
        job: the other parts; its ``wrapped`` gets the part of the model.
        check_open: refuses a pass over a divided model where the loss of a worker would not repeat it.
        speeds: of the links to ranks on other workers.
    """

    job: JobParts
    parallelism: Parallelism
    check_open: Callable[[], None]
    speeds: LinkSpeeds

    def wrap(self, model: Model, units: str | None, options: WrapOptions) -> torch.nn.Module:
        """Take the job's model; see ``Job.wrap``.

        Raises:
            UsageError: it cannot be trained this way, or the job has one.
        """
        if self.job.training.model is not None:
            raise UsageError("job.wrap takes one model and has one already: put several into one torch.nn.ModuleDict")
        cut = self.parallelism in (Parallelism.PIPELINE, Parallelism.AUTO)
        if cut and options.offload:
            raise UsageError(OFFLOADED_STAGES)
        if options.graphs and (units is not None or self.parallelism is not Parallelism.DATA):
            raise UsageError(DIVIDED_GRAPHS)
        if unused := _without_effect(options, stages=cut, shards=self._shards):
            _log.warning(unused)
        if cut:
            return self._to_cut(model, units, options)
        return self._with_values(model, units, options)

    @property
    def _shards(self) -> int:
        return self.job.identity.local_world_size if self.parallelism is Parallelism.SHARDED else 1

    def _with_values(self, model: Model, path: str | None, options: WrapOptions) -> torch.nn.Module:
        """Take a whole model, or divide its tensors among the ranks of a worker."""
        job = self.job
        units: Units | None = None
        fill: Callable[[torch.nn.Module | None], None] = _has_values
        if not isinstance(model, torch.nn.Module) and callable(model):
            model = built(model)
            units = units_of(model, path)
            fill = partial(self._initial_values(model, options).fill_unit, units)
            if self._shards == 1:
                fill(None)
        elif options.weights is not None:
            raise UsageError(
                "weights= fills a model that a function builds without memory: job.wrap(lambda: MyModel(...), "
                "weights=...). A model that has its values already needs no weights="
            )
        admission.check_model(model, has_values=units is None or self._shards == 1)
        if units is None and (
            path is not None or self._shards > 1 or options.checkpoint_units or options.compile_units
        ):
            units = units_of(model, path)
        layers = () if units is None else units.layers
        gradients = job.numerics.reducer(model)
        ranks, rank = self._shards, job.identity.local_rank if self._shards > 1 else 0
        group = MemberGroup(rank=rank, world_size=ranks, check_open=self.check_open)
        if ranks > 1:
            gather_dtype = job.numerics.precision.gather_dtype
            shard(model, group, layers, device=job.device, options=options, gather_dtype=gather_dtype, fill=fill)
            job.training.own_layout = ShardedModel(model, uses_of(model))
        else:
            prepare_units(layers, options)
            model = model.to(job.device)
        job.training.model = model
        draws = None if units is None else UnitDraws(units, seed=job.config.seed, device=job.device)
        layers = layers or _own_layers(model)
        if self.parallelism is Parallelism.SHARDED:
            sums = PieceSums(job.training, job.numerics, gradients)
            job.wrapped.take(
                ShardedPart(model, sums, gradients, group=group, device=job.device, layers=layers, draws=draws)
            )
        else:
            graphs = self._graphs(model) if options.graphs else None
            job.wrapped.take(WholePart(model, gradients, layers=layers, draws=draws, graphs=graphs))
        return model

    def _graphs(self, model: torch.nn.Module) -> GraphedForward | None:
        """Record the model's passes; a processor has nothing to record, and the same script may run on both."""
        kind = self.job.device.type
        if kind == "cuda":
            return GraphedForward(model, CudaRecorder())
        check_recordable(model)
        _log.info("job.wrap: graphs=True has no effect here, because this rank computes on a %s", kind)
        return None

    def _to_cut(self, model: Model, path: str | None, options: WrapOptions) -> torch.nn.Module:
        """Describe a model that plans cut into stages; this rank's part gets values when a plan names it."""
        if isinstance(model, torch.nn.Module) or not callable(model):
            raise UsageError(
                "a model that is cut into stages is built by a function, so that no rank needs memory for all of it: "
                "job.wrap(lambda: MyModel(...), units=...)"
            )
        job, whole = self.job, built(model)
        admission.check_model(whole, has_values=False)
        cuttable = CuttableModel(
            whole, path, self._initial_values(whole, options), options=options,
            gather_dtype=job.numerics.precision.gather_dtype,
        )  # fmt: skip
        job.wrapped.take(
            PlannedPart(
                cuttable, job.training, PieceSums(job.training, job.numerics), job.device, speeds=self.speeds,
                check_open=self.check_open, measure=partial(self._look, cuttable),
                ranks_on_host=job.identity.local_world_size,
            )
        )  # fmt: skip
        job.training.model = whole
        return whole

    def _initial_values(self, model: torch.nn.Module, options: WrapOptions) -> InitialValues:
        """Return the values of a model on the meta device: the script's weights, or what layers draw."""
        weights = None if options.weights is None else PretrainedWeights(options.weights, model)
        return InitialValues(seed=self.job.config.seed, device=self.job.device, weights=weights)

    def _look(self, model: CuttableModel, inputs: Callable[[int], Any]) -> float | None:
        """Look at the model with the data set's first samples, and measure its units for the operator.

        Returns:
            Bytes of training state for each byte of parameters; ``None`` where nobody plans with them.
        """
        job, seen = self.job, model.look(inputs(1))
        if isinstance(job.membership, Fixed):
            cuts = model.even_cuts(job.identity.local_world_size)[1:-1]
            job.membership.divide(Layout(kind=LayoutKind.PIPELINE, cuts=cuts) if cuts else Layout())
            return None
        size_mb = sum(seen.parameter_bytes) / 1e6
        _log.info("measuring %d units of the model, %.1f MB of parameters", len(model.names), size_mb)
        kind, ranks = job.device.type, job.identity.local_world_size
        processors = usable_processors(job.device, ranks=ranks)
        profiles = model.profile(inputs, kind=kind, limit_s=PROFILE_S, processors=processors)
        usable = usable_bytes(job.device, ranks=ranks)
        ratio = model.state_ratio(job.training.optimizers)
        report_units(
            job.report, profiles, kind=kind, memory_bytes=usable, state_ratio=ratio,
            update_s_per_byte=model.update_s_per_byte(job.training.optimizers, processors=processors),
            can_shard=is_elementwise(job.training.optimizers),
        )  # fmt: skip
        leave_out_what_is_loaded()
        return ratio


def _has_values(_unit: torch.nn.Module | None) -> None:
    """Leave a unit as it is: the script has made it with values."""


def _own_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the layers of a ``torch.nn.Sequential``; another model has to name its list of layers."""
    return tuple(model.children()) if type(model).forward is torch.nn.Sequential.forward else ()


def _without_effect(options: WrapOptions, *, stages: bool, shards: int) -> str:
    """Return the sentence about options for divided tensors where no tensor is divided; empty where all have effect.

    They are no error, because the same script trains in every layout.
    """
    given = [name for name in ("keep_gathered", "offload") if getattr(options, name)]
    if not given or (shards > 1 and not stages):
        return ""
    names = " and ".join(f"{name}=True" for name in given)
    here = "this model is cut into stages" if stages else "this rank holds the whole model"
    less = ": it stays in the device's memory" if options.offload else ""
    return f"job.wrap: {names} {'has' if len(given) == 1 else 'have'} no effect, because {here}{less}"
