"""Finds ranks whose copy of the training state has come apart from the others', and brings them together again.

All ranks apply the same gradient to the same state, so their copies stay equal without being compared: until a script
changes something on one rank only, or a machine's memory fails. Nothing else would show it. So each rank takes a
fingerprint of one slice of its state after each measured step, and sends it with the next step's control vector. All
ranks compare, and reach the same conclusion. The measuring budget (``telemetry/sampling.py``) covers the cost.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from heterotrain_core.contract import metrics as names
from heterotrain_core.contract.choices import OnDivergence

from heterotrain.errors import Diverged
from heterotrain.membership.interface import ActiveGroup
from heterotrain.network.control import Column, one
from heterotrain.network.group import Group
from heterotrain.network.texts import gather_texts
from heterotrain.numerics.method import Numerics
from heterotrain.state import transfer
from heterotrain.state.cause import Account, formats_of, likely_cause
from heterotrain.state.comparison import REMEDY, Difference, compare, describe
from heterotrain.state.fingerprint import (
    Item,
    checksum,
    combined,
    items_of,
    named,
    parts_in,
    projection,
    settings_checksum,
    slices_of,
    to_float,
)
from heterotrain.state.training import TrainState
from heterotrain.steps.ballot import Voting
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

MOST_RESYNCS = 10
"""Times that the state is copied. A copy that comes apart again and again has a cause that copying does not end."""
MOST_NAMED = 256
"""Tensors of a slice that are compared one by one, to name those that differ."""
TOLERANCE = 1.0
"""Largest difference of two projections, which are in units of the tolerated difference."""


FINGERPRINTS = Column("fingerprint", one(tuple))
"""Of a slice of a rank's state, as after the step before, by rank; NaN when none was taken."""


@dataclass(slots=True)
class _Pass:
    """One pass through the state, slice by slice.

    The tensors are listed once for each pass. An optimizer that replaces a tensor meanwhile is looked at in the next.
    """

    items: list[Item]
    slices: list[tuple[int, int]]
    next: int = 0

    def part(self, index: int) -> tuple[Item, ...]:
        """Return a slice as parts of tensors."""
        return parts_in(self.items, *self.slices[index])


class Replicas:
    """The comparison of this rank's copy of the state with the others'.

    Attributes:
        fingerprint: for the next control vector; NaN if none was taken after the last step.
        donor: the rank whose state all others take over before the next step; ``None`` for none.
    """

    def __init__(self, training: TrainState, numerics: Numerics, report: RankMetrics, policy: OnDivergence) -> None:
        self.fingerprint = math.nan
        self._training = training
        self._numerics = numerics
        self._report = report
        self._policy = policy
        self._is_exact = True
        self._was_mixed = False
        self._resyncs = 0
        self._differences = 0
        self.donor: int | None = None
        self._pass: _Pass | None = None
        self._compared: tuple[_Pass, int] | None = None
        self._memory: torch.Tensor | None = None

    def form(self, group: Group | None, device: torch.device) -> None:
        """Start a formation: agree on whether all copies have to have the same bits.

        They have if all devices are of one kind, and the copies never were on devices of different kinds.

        Raises:
            PeerLost: the group is broken.
        """
        self.forget()
        self.donor = None
        if group is None:
            return
        kind = float(zlib.crc32(kind_of(device).encode()))
        rows = group.gather_now([kind, float(self._was_mixed), float(self._resyncs)])
        self._was_mixed = any(row[1] for row in rows) or len({row[0] for row in rows}) > 1
        self._resyncs = int(max(row[2] for row in rows))
        self._is_exact = not self._was_mixed

    def forget(self) -> None:
        """Start a new pass, as other tensors may hold the state now."""
        self.fingerprint, self._pass, self._compared = math.nan, None, None

    def measure(self) -> None:
        """Take the fingerprint of the next slice."""
        self._pass = self._pass or self._begin()
        index = self._pass.next
        self.fingerprint = self._of(self._pass, index)
        self._compared = (self._pass, index)
        self._pass.next += 1
        if self._pass.next == len(self._pass.slices):
            self._pass = None

    def vote(self, _voting: Voting) -> tuple[float]:
        """Return the number of ``FINGERPRINTS``."""
        return (self.fingerprint,)

    def clear(self) -> None:
        """Drop the fingerprint that was sent with the step that is being committed."""
        self.fingerprint = math.nan

    def judge(self, fingerprints: Sequence[float], active_group: ActiveGroup) -> None:
        """Act on the fingerprints in a committed step's control vectors.

        Raises:
            Diverged: they differ, and the job is to fail then.
            PeerLost: the group broke meanwhile.
        """
        difference = compare(fingerprints, tolerance=self._tolerance)
        if difference is None or active_group.group is None or self._compared is None:
            return
        which, index = self._compared
        self._found(difference, active_group, self._differing(which, index, difference, active_group.group))

    def judge_result(self, active_group: ActiveGroup) -> None:
        """Compare the whole state before the training ends.

        Raises:
            Diverged: the copies differ, and the job is to fail then.
            PeerLost: the group broke meanwhile.
        """
        if active_group.group is None:
            return
        self.forget()
        whole = self._begin()
        parts = [self._of(whole, index) for index in range(len(whole.slices))]
        own = combined(parts) if self._is_exact else math.fsum(parts) / math.sqrt(len(parts))
        rows = active_group.group.gather_now([own])
        difference = compare([row[0] for row in rows], tolerance=self._tolerance)
        if difference is None:
            return
        self._found(difference, active_group, _ends(whole.part(0) + whole.part(len(whole.slices) - 1)))
        self.resync(active_group)

    def resync(self, active_group: ActiveGroup) -> bool:
        """Send the chosen rank's state to all others, if that was decided; return whether it was.

        Raises:
            PeerLost: the group broke meanwhile.
        """
        donor, self.donor = self.donor, None
        group = active_group.group
        if donor is None or group is None:
            return False
        received = transfer.exchange(group, transfer.copying(donor, group.world_size), self._training.flat)
        if received is not None:
            self._training.restore_flat(received)
        self._resyncs += 1
        self.forget()
        _log.warning(
            "the state of rank %d was sent to all others (%d of at most %d times)", donor, self._resyncs, MOST_RESYNCS
        )
        return True

    # -- internals ---------------------------------------------------------------------------------------------------

    @property
    def _tolerance(self) -> float:
        return 0.0 if self._is_exact else TOLERANCE

    def _begin(self) -> _Pass:
        model = self._training.model
        items = [] if model is None else items_of(model, self._training.optimizers, self._numerics.replicated_buffers())
        return _Pass(items, slices_of(items))

    def _of(self, which: _Pass, index: int) -> float:
        part = which.part(index)
        if not self._is_exact:
            return projection(part)
        total, self._memory = checksum(part, self._memory)
        return to_float(total, settings_checksum(self._training.optimizers))

    def _differing(self, which: _Pass, index: int, difference: Difference, group: Group) -> list[str]:
        """Return the names of the tensors that differ, by comparing those of the slice one by one."""
        part = which.part(index)
        if not self._is_exact:
            return _ends(part)
        own = list(named(part[:MOST_NAMED]))
        row = [value for _, value in own] + [0.0] * (MOST_NAMED - len(own))
        rows = group.gather_now([float(settings_checksum(self._training.optimizers)), *row])
        good = rows[difference.donor]
        found = [
            name
            for number, (name, _) in enumerate(own, 1)
            if any(rows[rank][number] != good[number] for rank in difference.others)
        ]
        if any(rows[rank][0] != good[0] for rank in difference.others):
            found.insert(0, "settings of the optimizer (such as its learning rate)")
        return found or _ends(part)

    def _found(self, difference: Difference, active_group: ActiveGroup, where: list[str]) -> None:
        self._report.count(names.DIVERGENCES)
        self._differences += 1
        workers = [rank.worker for rank in active_group.roster.ranks]
        what = describe(difference, step=self._training.progress.steps - 1, workers=workers, names=where)
        remedy = self._cause(difference, active_group.group, where) + REMEDY
        if self._policy is OnDivergence.FAIL:
            raise Diverged(f"{what}. {remedy}")
        if self._policy is OnDivergence.RESYNC:
            if self._resyncs >= MOST_RESYNCS:
                raise Diverged(f"{what}, although it was made equal {self._resyncs} times. {remedy}")
            self.donor = difference.donor
        elif self._differences & (self._differences - 1):
            return  # after the first, one line whenever their number doubles
        _log.warning("%s (%d such comparisons so far). %s", what, self._differences, remedy)

    def _cause(self, difference: Difference, group: Group | None, where: list[str]) -> str:
        """Return what probably made the copies differ, from what all ranks say about theirs."""
        training = self._training
        if group is None or training.model is None:
            return ""
        own = Account(training.joined, formats_of(training.optimizers))
        texts = gather_texts(group, json.dumps(asdict(own)).encode(), "what each rank says about its copy")
        frozen = [name for name, parameter in training.model.named_parameters() if not parameter.requires_grad]
        accounts = [Account(**json.loads(text)) for text in texts]
        return likely_cause(difference, accounts, names=where, frozen=frozen)


def kind_of(device: torch.device) -> str:
    """Return what the bits of an update depend on: the device, and for CPUs the vector units and number of threads.

    Measured on CPUs: elementwise updates have the same bits with AVX2 and AVX-512, others without vector units; norms,
    which clipping uses, have others with another number of threads.
    """
    software = f"{torch.__version__} {torch.version.cuda}"
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {software}"
    units = torch.backends.cpu.get_cpu_capability()
    return f"{device.type} {platform.machine()} {units} {torch.get_num_threads()} {software}"


def _ends(part: Sequence[Item]) -> list[str]:
    """Return the first and the last tensor of a slice, as one name."""
    first, last = part[0].name, part[-1].name
    return [first if first == last else f"the part of the state from {first} to {last}"]
