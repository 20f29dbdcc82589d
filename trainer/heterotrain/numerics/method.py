"""The numeric settings on which all ranks agree: format, loss scale, learning rate, BatchNorm and compression."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from heterotrain_core.contract.choices import Compression, OnNonFinite, Precision
from heterotrain_core.contract.config import TrainingConfig
from heterotrain_core.scaling_rules import Family, Scaling, Statistics, needed_statistics

from heterotrain.errors import UsageError
from heterotrain.exchange.flat.buckets import MIB
from heterotrain.exchange.flat.compression import CompressedExchange
from heterotrain.exchange.flat.exchange import FlatExchange
from heterotrain.exchange.flat.reducer import Reducer
from heterotrain.exchange.gate import Gate
from heterotrain.forward_state.state import ForwardState
from heterotrain.network.group import Group
from heterotrain.numerics import fused, learning_rate
from heterotrain.numerics.batch_norm import BatchNorm, BatchNormContext, GlobalBatchNorm, synchronise
from heterotrain.numerics.learning_rate import Rate, RatePolicy
from heterotrain.numerics.local_batch_norm import localise
from heterotrain.numerics.noise_scale import NoiseAverage
from heterotrain.numerics.non_finite import Action, LossHistory, choose_action
from heterotrain.numerics.outlier_samples import Kurtosis, RankSquares, estimate_by_rank
from heterotrain.numerics.precision import LossScale, MixedPrecision
from heterotrain.state.admission import check_belongs, check_model, choice
from heterotrain.state.training import TrainState

_log = logging.getLogger(__name__)

WARM_UP_BATCHES = 100
"""Base batches over which a changed learning-rate factor takes effect, unless the user sets a number of samples."""


class Numerics:
    """The current numeric settings, and the replicated state behind them.

    Attributes:
        precision: format of the forward pass.
        batch_norm_context: the current step, as BatchNorm layers need it.
        noise: averages by kind of statistics.
        kurtosis: what is known of outlier samples, by the same kinds.
        base_samples: the batch that the user's learning rate was chosen for.
        losses: the newest finite loss and the steps skipped since then.
        forward_state: what layers change in their forward passes, such as running statistics.
    """

    def __init__(
        self,
        config: TrainingConfig,
        device: torch.device,
        training: TrainState,
        *,
        batch_norm: str = BatchNorm.GLOBAL,
    ) -> None:
        """Register the state with ``training``.

        Raises:
            UsageError: this device cannot compute in the configured format, or a setting has an unknown value.
        """
        self.precision = MixedPrecision(choice("precision", config.precision, Precision), device)
        self._on_non_finite = choice("onNonFinite", config.on_non_finite, OnNonFinite)
        self.losses = LossHistory()
        self._compression = choice("compression", config.compression, Compression)
        self._batch_norm = choice("batch_norm", batch_norm, BatchNorm)
        self.batch_norm_context = BatchNormContext()
        self.noise = dict.fromkeys(Statistics, NoiseAverage())
        self.kurtosis = dict.fromkeys(Statistics, Kurtosis())
        self.base_samples = base = config.base_batch_samples
        self._config = config
        self._training = training
        warm_up = config.learning_rate_warmup_samples
        self._policy = RatePolicy(
            scaling=choice("learningRateScaling", config.learning_rate_scaling, Scaling),
            base_samples=base,
            warm_up_samples=WARM_UP_BATCHES * base if warm_up is None else warm_up,
        )
        self._rate = self._next = Rate()
        self._loss_scale = LossScale()
        self._mixing: list[torch.nn.Module] = []
        self._known: set[int] = set()  # parameters that a model of the job had
        self.forward_state = ForwardState((GlobalBatchNorm,))
        training.extras["heterotrain-numerics"] = self

    def state_dict(self) -> dict[str, Any]:
        """Return the state for joining ranks and checkpoints."""
        return {
            "rate": asdict(self._rate),
            "loss_scale": asdict(self._loss_scale),
            "losses": asdict(self.losses),
            "noise": {str(kind): asdict(average) for kind, average in self.noise.items()},
            "kurtosis": {str(kind): asdict(known) for kind, known in self.kurtosis.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state that ``state_dict`` returned on this or another rank."""
        self._rate = self._next = Rate(**state["rate"])
        self._loss_scale = LossScale(**state["loss_scale"])
        self.losses = LossHistory(**state["losses"])
        self.noise = {Statistics(kind): NoiseAverage(**average) for kind, average in state["noise"].items()}
        self.kurtosis = {Statistics(kind): Kurtosis(**known) for kind, known in state["kurtosis"].items()}

    # -- the script's objects ----------------------------------------------------------------------------------------

    def reducer(self, model: torch.nn.Module, *, is_cut: bool = False) -> Reducer:
        """Convert BatchNorm layers as configured, and return the reducer with the model's buckets.

        Args:
            model: all of it.
            is_cut: whether plans may give other ranks a part of it only.

        Raises:
            UsageError: a layer mixes samples in an unknown way.
        """
        self.layers_changed(model)
        if not is_cut:
            self.forward_state.use(model)
        return Reducer(
            model,
            bucket_bytes=self.bucket_bytes,
            exchange=CompressedExchange(self._compression) if self.compresses else FlatExchange(),
            is_measurable=not is_cut,
            on_change=self._parameters_changed,
        )

    def _parameters_changed(self) -> None:
        """Check and convert layers that the script has added or replaced, and the optimizers' parameters.

        Raises:
            UsageError: the model or an optimizer cannot be trained this way.
        """
        model = self._training.model
        if model is not None:
            check_model(model)
            self.layers_changed(model)
            check_belongs(model, self._training.optimizers, earlier=self._known)
            for optimizer in self._training.optimizers:
                fused.lay_out(optimizer)
            self._known |= {id(parameter) for parameter in model.parameters()}

    @property
    def bucket_bytes(self) -> int:
        """A bucket of gradients ends as soon as it holds this much."""
        return int(self._config.bucket_mib * MIB)

    @property
    def compresses(self) -> bool:
        """Whether the job asks for compressed gradients."""
        return self._compression is not Compression.NONE

    def replicated_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers that have to be the same on every rank between steps."""
        yield from self.forward_state.named()
        for layer in self._mixing:
            for name, buffer in layer.named_buffers(recurse=False):
                yield f"{layer.heterotrain_name}.{name}", buffer

    def layers_changed(self, model: torch.nn.Module) -> None:
        """Convert the BatchNorm layers that the model has now.

        Raises:
            UsageError: a layer mixes samples in an unknown way.
        """
        if self._batch_norm is BatchNorm.GLOBAL:
            self._mixing = synchronise(model, self.batch_norm_context)
        else:
            localise(model)
        self.forward_state.find()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that the learning-rate rule does not support, alone or next to the earlier ones.

        Raises:
            UsageError: the rule does not support it.
        """
        learning_rate.check(self._policy.scaling, [*self._training.optimizers, optimizer])

    # -- around a step -----------------------------------------------------------------------------------------------

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a rank without samples has to run the model because layers wait for all ranks."""
        return any(layer.training for layer in self._mixing)

    def form(self, group: Group | None) -> None:
        """Agree with the ranks of a new formation on the format, and on the state that changes in forward.

        Raises:
            PeerLost: the group is broken.
            UsageError: the ranks' scripts have given different rules for buffers.
        """
        before = self.precision.format
        self.precision.agree(group)
        if self.precision.format is not before:
            _log.info("from now on forward passes run in %s", self.precision.format)
        self.forward_state.form(group)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss, a power of two; 1 in all formats except fp16."""
        return self._loss_scale.factor if self.precision.scales_loss else 1.0

    @property
    def steers_by_noise(self) -> bool:
        """Whether the learning rate follows the noise scale, so that noise measurements affect the weights."""
        return self._policy.scaling is Scaling.ADASCALE

    @property
    def wants_preconditioned(self) -> bool:
        """Whether the learning-rate rule needs the noise of preconditioned gradients."""
        if not self.steers_by_noise:
            return False
        families = {learning_rate.family_of(optimizer) for optimizer in self._training.optimizers}
        return any(
            needed_statistics(self._policy.scaling, family) is Statistics.PRECONDITIONED
            for family in families
            if family is not None
        )

    def update(
        self, optimizers: Sequence[torch.optim.Optimizer], *, global_batch_samples: int, gate: Gate | None = None
    ) -> tuple[float, ...]:
        """Take the optimizers' steps at the learning rates for the plan's global batch; return the rates by group.

        With a gate, queue the steps behind it.
        """
        rates = self._plan(optimizers, global_batch_samples)
        used = learning_rate.scaled_rates(optimizers, rates)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            fused.take_step(optimizer, rate.factor, gate)
        return used

    def non_finite_action(self) -> Action:
        """Return what to do with a step whose loss or gradient is not finite."""
        return choose_action(
            self._on_non_finite,
            loss_scale=self._loss_scale.factor if self.precision.scales_loss else None,
            skipped=self.losses.skipped,
        )

    def skip(self, optimizers: Sequence[torch.optim.Optimizer], *, global_batch_samples: int) -> tuple[float, ...]:
        """Leave the weights unchanged, as loss or gradient is not finite; return the rates as ``update`` does.

        The step counts like any other.
        """
        return learning_rate.scaled_rates(optimizers, self._plan(optimizers, global_batch_samples))

    def measured(self, kind: Statistics, ranks: Sequence[RankSquares], *, total_squared: float) -> None:
        """Update the averages and the knowledge of outlier samples with the squares of one step.

        Args:
            kind: of the gradients.
            ranks: the squares of each rank.
            total_squared: ``|g|^2`` of the step's gradient.
        """
        average, kurtosis = self.noise[kind], self.kurtosis[kind]
        before, scale = average.corrected(), average.scale()
        sample = estimate_by_rank(
            ranks, total_squared=total_squared, kurtosis_samples=kurtosis.samples(), noise_samples=scale
        )
        if sample is None:
            return
        samples = math.fsum(rank.samples for rank in ranks)
        self.noise[kind] = average.after(sample, samples=samples, base_samples=self.base_samples)
        if before is not None:
            self.kurtosis[kind] = kurtosis.after(
                ranks, total_squared=total_squared, variance=before.variance, noise_samples=scale
            )

    def committed(self, *, step: int, loss: float | None, finite: bool) -> int:
        """Update the state after a committed step; return how often to step the schedulers.

        Args:
            step: number of the step.
            loss: its mean loss; ``None`` if that is unknown or not finite.
            finite: whether loss and gradient were finite, so that the step was applied.
        """
        self.losses = self.losses.after(loss, step=step, skipped=not finite)
        if self.precision.scales_loss:
            self._loss_scale = self._loss_scale.after(finite=finite)
            if not finite:
                _log.info(
                    "the gradient overflowed in fp16: weights unchanged, loss scale now %g", self._loss_scale.factor
                )
        steps = learning_rate.schedule_steps(self._rate, self._next)
        self._rate = self._next
        return steps

    @property
    def learning_rate_scale(self) -> float:
        """Factor on the learning rate in the last committed step."""
        return self._rate.factor

    def _plan(self, optimizers: Sequence[torch.optim.Optimizer], global_batch_samples: int) -> list[Rate]:
        """Return the state of each optimizer's factor; schedules follow the first one."""
        rates = []
        for optimizer in optimizers:
            if optimizer not in self._training.optimizers:  # optimizers are compared by identity
                raise UsageError(
                    f"step.apply got a {type(optimizer).__name__} that is unknown to job.optimizer, so its state would "
                    "be lost when workers join or leave. Pass the one that job.optimizer returned."
                )
            family, kind = Family.SGD, None
            if self._policy.scaling is not Scaling.NONE:
                family = learning_rate.family_of(optimizer) or Family.SGD  # the other rules do not depend on the kind
                kind = needed_statistics(self._policy.scaling, family)
            rates.append(self._policy.next(
                self._rate, family=family, batch_samples=global_batch_samples,
                done_samples=self._training.progress.samples, noise_samples=self.noise[kind].scale() if kind else None,
            ))  # fmt: skip
        self._next = rates[0]
        return rates
