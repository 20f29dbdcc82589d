"""Sums the gradients of a divided model: each piece over its owners, while backward is still running.

It takes the place of ``Reducer`` in formations in which some rank does not hold the whole model. A rank's gradient of
its own part is already the sum over what its member computed for this part: ``fully_shard`` adds up inside a member,
and a stage of a pipeline sees all samples of its member. So the plain sum over owners is the gradient of the global
batch, as for whole models.

Every rank knows the names and sizes of all parameters (``state.layout.ModelLayout``). Whatever has to be the same on
all ranks, such as the bits of unused parameters, is numbered by them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from heterotrain.errors import UsageError
from heterotrain.exchange.flat.buckets import squared_norm
from heterotrain.exchange.flat.exchange import FlatExchange
from heterotrain.exchange.interface import Exchange, Gradients
from heterotrain.exchange.refusals import CHANGED, CLEARED, TWICE
from heterotrain.exchange.script_hooks import ScriptHooks
from heterotrain.exchange.timeline import timeline_of
from heterotrain.network.group import Group
from heterotrain.parts.pieces.division import PieceDivision
from heterotrain.parts.pieces.piece_buckets import PieceBucket, piece_buckets
from heterotrain.state.finite import all_finite
from heterotrain.state.layout import ModelLayout
from heterotrain.state.local import gradient, local, set_gradient

REFROZEN = (
    "parameters of a divided model were frozen, unfrozen or replaced while the job trains, and other ranks do not hold "
    "them: do this before job.steps"
)


@dataclass(eq=False)
class PieceReducer(Gradients):
    """The buckets of one formation's pieces: in a fixed order, unmeasured, and tested by the second phase, no gate.

    Attributes:
        layout: this rank's part of the model.
        division: the pieces.
        rank: this rank in the formation.
        bucket_bytes: a bucket ends as soon as it holds this much.
        parameters: number of trainable parameters of the whole model.
        signature: of the pieces, which all ranks have compared when the formation began.
        script_hooks: empty: a script's hooks on divided parameters see parts.
        known_squared: of the whole model's gradient, as the second phase has found it.
    """

    layout: ModelLayout
    division: PieceDivision
    rank: int
    bucket_bytes: int
    exchange: Exchange = field(default_factory=FlatExchange)
    elements: int = 0
    parameters: int = 0
    signature: int = 0
    script_hooks: ScriptHooks = field(default_factory=ScriptHooks)
    known_squared: float = math.nan
    _buckets: list[PieceBucket] = field(default_factory=list)
    _parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)
    _in_buckets: dict[str, list[PieceBucket]] = field(default_factory=dict)
    _hooks: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)
    _arrived: set[str] = field(default_factory=set)
    _seen: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _armed: bool = False

    def __post_init__(self) -> None:
        named = dict(self.layout.named_parameters())
        self._parameters = {
            name: named[name]
            for name in self.division.names
            if name in named and name in self.division.holding and self.division.holding[name].elements
        }
        parts = {name: local(parameter) for name, parameter in self._parameters.items()}
        # A piece with one owner is complete as it is: a buffer for it would be a second copy of its gradient.
        exchanged = [piece for piece in self.division.pieces if len(piece.owners) > 1]
        self._buckets = piece_buckets(
            exchanged, parts, self.division.holding, rank=self.rank, enough_bytes=self.bucket_bytes
        )
        for bucket in self._buckets:
            for name in bucket.names:
                self._in_buckets.setdefault(name, []).append(bucket)
        device = next((part.device for part in parts.values()), torch.device("cpu"))
        self.exchange.use(self._buckets, timeline_of(device))
        self.signature = zlib.crc32(repr(self.division.pieces).encode())
        self.parameters = len(self.division.names)
        self.elements = sum(part.numel() for part in parts.values())
        for name, parameter in self._parameters.items():
            self._hook(name, parameter)

    def _hook(self, name: str, parameter: torch.nn.Parameter) -> None:
        def arrived(_gradient_is_there: torch.Tensor) -> None:
            self._arrive(name)

        register: Callable[..., torch.utils.hooks.RemovableHandle] = parameter.register_post_accumulate_grad_hook
        self._hooks.append(register(arrived))

    def end(self) -> None:
        """Leave the model's parameters alone: another reducer follows."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def flats(self) -> list[torch.Tensor]:  # type: ignore[override]  # looked up: parameters drop their gradients
        """This rank's parts of the gradients."""
        return list(self._gradients().values())

    def _gradients(self) -> dict[str, torch.Tensor]:
        found = {name: gradient(parameter) for name, parameter in self._parameters.items()}
        return {name: part for name, part in found.items() if part is not None}

    # -- around a backward pass --------------------------------------------------------------------------------------

    def begin(self, *, micro_batches: int = 1) -> None:  # noqa: ARG002  # as Reducer.begin
        """Start a step without gradients.

        Raises:
            UsageError: parameters were frozen, unfrozen or replaced since the formation began.
        """
        self.abandon()
        now = {name: p for name, p in self.layout.named_parameters() if p.requires_grad and name in self._parameters}
        if len(now) < len(self._parameters) or any(now[name] is not p for name, p in self._parameters.items()):
            raise UsageError(REFROZEN)
        self._seen.clear()
        self._arrived.clear()
        if self.layout.uses is not None:
            self.layout.uses.clear()
        self.known_squared = math.nan
        for _, parameter in self.layout.named_parameters():
            parameter.grad = None

    def arm(self, group: Group | None) -> None:
        """Let the next backward pass, the step's last, start the reductions."""
        self.exchange.begin(group)
        self._armed = True
        self._arrived.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)

    def flush(self) -> None:
        """Start the buckets that are left after backward.

        Their parameters got no gradient in the last pass; they may have one of an earlier pass.
        """
        self._armed = False
        earlier = {name: part for name, part in self._gradients().items() if name not in self._arrived}
        left = self._buckets[self.exchange.started :]
        for bucket in left:
            for own, part in bucket.parts.items():
                if own.name in earlier:
                    part.copy_(earlier[own.name].reshape(-1)[own.start : own.stop])
                elif own.name not in self._arrived:
                    part.zero_()
        self._arrived |= earlier.keys()
        self.remember()
        for bucket in left:
            self.exchange.start(bucket)

    def remember(self) -> None:
        """Record the gradients' versions after a backward pass."""
        self._seen = {name: (part, part._version) for name, part in self._gradients().items()}  # noqa: SLF001  # torch's own count of changes

    def check_untouched(self) -> None:
        """Check that nothing has changed the gradients since the last backward pass.

        Raises:
            UsageError: something has.
        """
        now = self._gradients()
        for name, (part, version) in self._seen.items():
            if now.get(name) is not part or part._version != version:  # noqa: SLF001  # as in remember
                raise UsageError(CHANGED)

    def wait(self) -> None:
        """Wait until every bucket is reduced, and make the sums the parameters' gradients.

        Raises:
            PeerLost: the group is broken.
        """
        for _ in self.exchange.finish():
            pass  # a gradient may have its pieces in several buckets
        for name, parameter in self._parameters.items():
            part = gradient(parameter)
            if part is None:
                part = torch.zeros_like(local(parameter))
                set_gradient(parameter, part)
            rows = part.contiguous()  # pieces count elements row by row, in whatever order they lie in memory
            flat = rows.view(-1)
            for bucket in self._in_buckets.get(name, ()):
                for own, summed in bucket.parts.items():
                    if own.name == name:
                        flat[own.start : own.stop].copy_(summed)
            if rows is not part:
                part.copy_(rows)

    def abandon(self) -> None:
        """Drop a failed step; waits until its operations have released the buffers (cut the group first)."""
        self.exchange.abandon()
        self._armed = False

    # -- what all ranks have to agree on -----------------------------------------------------------------------------

    @property
    def unused(self) -> int:
        """The parameters that got no gradient on this rank in this step, and those that it does not hold, as bits."""
        uses = self.layout.uses
        used = self._arrived if uses is None else {name for name in self._arrived if name in uses}
        return sum(1 << place for place, name in enumerate(self.division.names) if name not in used)

    def drop_unused(self, unused: int) -> None:
        """Leave parameters that no rank has used without a gradient, so that the optimizer does not touch them."""
        for place, name in enumerate(self.division.names):
            if unused >> place & 1 and name in self._parameters:
                self._parameters[name].grad = None

    def owned_squared(self) -> float:
        """Return the squared norm, in float64, of the gradients of the pieces whose lowest owner this rank is."""
        found = self._gradients()
        parts = []
        for piece in self.division.pieces:
            if piece.owners[0] == self.rank and piece.name in found:
                begin = self.division.holding[piece.name].start
                parts.append(found[piece.name].reshape(-1)[piece.start - begin : piece.stop - begin])
        return float(squared_norm(parts))

    # -- after the reduction -----------------------------------------------------------------------------------------

    def check_kept(self) -> None:
        """Check that the script has not dropped all gradients since the reduction.

        Raises:
            UsageError: it has.
        """
        if self._parameters and not self._gradients() and self._arrived:
            raise UsageError(CLEARED)

    def scale(self, factor: float) -> None:
        """Multiply every gradient, in place."""
        super().scale(factor)
        self.known_squared *= factor * factor

    def first_non_finite(self) -> str | None:
        """Return the name of the first parameter whose gradient is not finite here; ``None`` if there is none."""
        return next((name for name, part in self._gradients().items() if not all_finite([part])), None)

    def squared_norm(self) -> torch.Tensor | float:
        """Return the squared norm of the whole model's gradient, as the second phase has found it."""
        return self.known_squared

    # -- internals ---------------------------------------------------------------------------------------------------

    def _arrive(self, name: str) -> None:
        if not self._armed:
            return
        if name in self._arrived:
            raise UsageError(TWICE)
        self._arrived.add(name)
        found = gradient(self._parameters[name])
        for bucket in self._in_buckets.get(name, ()):
            for own, part in bucket.parts.items():
                if own.name == name and found is not None:
                    part.copy_(found.reshape(-1)[own.start : own.stop])
            bucket.missing -= 1
            if not bucket.missing:
                self.exchange.start(bucket)
