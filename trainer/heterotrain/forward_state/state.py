"""The tensors that forward passes change, through the passes of a step: begin, take, agree, start, wait, finish.

What no rule covers is watched (``watch.py``). A rank that sees such a change says so in its vote. All ranks then agree
which tensors are tracked from this pass on, under the rule ``leader``, and one of them logs their names.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from heterotrain.errors import UsageError
from heterotrain.forward_state.combining import COMBINED, RuleGroup, finish, groups_of, packed
from heterotrain.forward_state.entries import ForwardTensor, entries_of, matches, write
from heterotrain.forward_state.rules import Combination, Rule, combination
from heterotrain.forward_state.unsaved import LOOKS, Unsaved
from heterotrain.forward_state.watch import Watch
from heterotrain.network.group import Group as Peers
from heterotrain.network.sums import Reduction
from heterotrain.network.texts import gather_texts
from heterotrain.state.buffer_copies import BufferCopies

_log = logging.getLogger(__name__)

MOST_NAMED = 4
_FOUND = Combination(Rule.LEADER)


class ForwardState:
    """What forward passes change in a model that every rank holds.

    Attributes:
        is_active: whether there is anything to track or watch; the same on every rank.
        copies: the values before the current step, of all buffers and of frozen parameters that may change.
    """

    def __init__(self, handled: tuple[type[torch.nn.Module], ...] = ()) -> None:
        """Start without a model; layers of a ``handled`` kind keep their buffers the same by themselves."""
        self.is_active = False
        self.copies = BufferCopies()
        self._handled = handled
        self._model: torch.nn.Module | None = None
        self._unsaved: Unsaved | None = None
        self._declared: list[tuple[str, Combination]] = []
        self._found: set[str] = set()
        self._unreported: list[str] = []
        self._replicated: list[ForwardTensor] = []
        self._changing: list[ForwardTensor] = []
        self._groups: list[RuleGroup] = []
        self._of_pass: list[RuleGroup] = []
        self._watch = Watch((), self.copies)
        self._tensors: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._samples = self._micro_batches = 0
        self._leads = self._is_reshaped = False
        self._total: torch.Tensor | None = None
        self._work: Reduction | None = None
        self._rank, self._world_size, self._peers = 0, 1, 1

    # -- the model and the script's rules ----------------------------------------------------------------------------

    def use(self, model: torch.nn.Module) -> None:
        """Track a model that every rank holds."""
        self._model = model
        self._found.clear()
        self._unsaved = Unsaved(model)
        self.find()

    def declare(self, pattern: str, rule: Any, *, decay: float = 1.0) -> None:
        """Combine the tensors with these names by a rule.

        Raises:
            UsageError: there are none, or the rule is not one.
        """
        chosen = combination(rule, decay=decay)
        model = self._model
        if model is None:
            raise UsageError("call model = job.wrap(model) before job.buffers, and not for a model that plans cut")
        names = [entry.name for entry in entries_of(model, (), self._handled)]
        if not any(matches(pattern, name) for name in names):
            shown = f"it has {', '.join(names[:MOST_NAMED])}" + (", …" if names[MOST_NAMED:] else "")
            raise UsageError(
                f"job.buffers: no persistent buffer and no frozen parameter of the model is named {pattern!r}: "
                + (shown if names else "it has none but statistics of the global batch, whose rule is fixed")
            )
        self._declared.append((pattern, chosen))
        self.find()

    def find(self) -> None:
        """Look for the tensors again: the model has changed."""
        every = [] if self._model is None else list(entries_of(self._model, self._declared, self._handled))
        for entry in every:
            if entry.combination is None and entry.name in self._found:
                entry.combination = _FOUND
        ruled = [(entry, entry.combination.rule) for entry in every if entry.combination is not None]
        tracked = [entry for entry, rule in ruled if rule in COMBINED]
        self._groups = groups_of(tracked)
        grouped = [entry for group in self._groups for entry in group.entries]
        self._changing = grouped + [entry for entry, rule in ruled if rule is Rule.DERIVED]
        own = {entry.name for entry, rule in ruled if rule is Rule.OWN}
        self._replicated = [entry for entry in every if entry.name not in own]
        trained = 0 if self._model is None else sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        self._watch = Watch(
            [entry for entry in every if entry.combination is None], self.copies, most_bytes=trained,
            looks=self._watch.looks,
        )  # fmt: skip
        self.is_active = bool(self._changing or self._watch.entries)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and buffers that are the same on every rank between steps."""
        for entry in self._replicated:
            if not entry.is_frozen:
                yield entry.name, entry.tensor

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the frozen parameters that may change in a step."""
        if self.is_active:
            for entry in (*self._changing, *self._watch.copied):
                if entry.is_frozen:
                    yield entry.name, entry.tensor

    def form(self, group: Peers | None) -> None:
        """Agree with the ranks of a new formation on what is tracked.

        Raises:
            PeerLost: the group is broken.
            UsageError: the ranks' scripts have given different rules.
        """
        self._peers = 1 if group is None else group.world_size
        if self._model is None or group is None:
            return
        self.find()
        rows = _share(group, {"found": sorted(self._found), "rules": self._rules()})
        if any(row["rules"] != rows[0]["rules"] for row in rows):
            raise UsageError("ranks have different rules for buffers: make the same calls of job.buffers on every rank")
        self._take_names({name for row in rows for name in row["found"]})

    # -- a pass over the micro-batches -------------------------------------------------------------------------------

    def begin(self, *, leads: bool = True) -> None:
        """Begin a pass; ``leads``: this rank has the batch's first sample."""
        self._samples = self._micro_batches = 0
        if self._unsaved is not None and self._unsaved.looks < LOOKS:
            self._unsaved.begin()
        if not self.is_active:
            return
        self._leads = leads
        self._is_reshaped, self._total, self._work = False, None, None
        self._watch.begin()
        self._tensors = [entry.place[entry.key] for entry in self._changing]
        self._before = [tensor.detach().clone() for tensor in self._tensors]
        self._of_pass, start = self._groups, 0
        for group in self._of_pass:
            group.begin(self._before[start : start + len(group.entries)])
            start += len(group.entries)

    def take(self, samples: int) -> None:
        """Take up what a micro-batch has left, and put the earlier values back; 0 samples leave no trace."""
        if samples and self._unsaved is not None and self._unsaved.looks < LOOKS:
            self._unsaved.look(divides=self._micro_batches > 0 or self._peers > 1)
        if self.is_active:
            self._take(samples)
        self._samples += samples
        self._micro_batches += samples > 0

    def _take(self, samples: int) -> None:
        with torch.no_grad():
            is_first = self._leads and not self._samples and samples > 0
            self._watch.look(is_first=is_first)
            now = [entry.place[entry.key] for entry in self._changing]
            start = 0
            for group in self._of_pass if samples else ():
                stop, shapes = start + len(group.entries), group.shapes
                group.take(now[start:stop], samples, is_first=is_first)
                self._is_reshaped = self._is_reshaped or group.shapes is not shapes
                start = stop
            for entry, tensor, other in zip(self._changing, self._tensors, now, strict=True):
                if other is not tensor:
                    entry.place[entry.key] = tensor
            write(self._changing, self._before)
            self._watch.put_back()

    @property
    def has_news(self) -> bool:
        """Whether this rank has seen a tensor change that no rule covers, or get another shape."""
        return self._is_reshaped or self._watch.has_changed()

    def agree(self, group: Peers | None) -> None:
        """Agree with all ranks on what has changed, because some of them have news.

        Raises:
            PeerLost: the group is broken.
            UsageError: a tensor has different shapes on two ranks.
        """
        names = set(self._watch.changed)
        if group is not None:
            shapes = {name: list(shape) for each in self._of_pass for name, shape in each.reshaped()}
            rows = _share(group, {"found": sorted(names), "shapes": shapes})
            names = {name for row in rows for name in row["found"]}
            for each in self._of_pass:
                each.reshape([
                    _one_shape(entry.name, shape, [row["shapes"] for row in rows])
                    for entry, shape in zip(each.entries, each.shapes, strict=True)
                ])  # fmt: skip
        if adopted := self._watch.adopt(names):
            more = RuleGroup(Rule.LEADER, [entry for entry, _, _ in adopted])
            more.begin([before for _, before, _ in adopted])
            if self._leads and self._samples:
                more.take([value for _, _, value in adopted], self._samples, is_first=True)
            self._of_pass = [*self._of_pass, more]
            self._take_names(names)

    def start(self, group: Peers | None) -> None:
        """Start to sum over all ranks; every rank has to call this after the last bucket has started.

        Raises:
            PeerLost: the group is broken.
        """
        if not self._of_pass:
            return
        self._rank, self._world_size = (0, 1) if group is None else (group.rank, group.world_size)
        self._total = packed(
            self._of_pass, self._samples, has_first=self._leads and self._samples > 0, rank=self._rank,
            world_size=self._world_size,
        )  # fmt: skip
        if group is not None and group.world_size > 1:
            self._work = group.all_reduce(self._total)

    def wait(self, group: Peers | None) -> None:
        """Wait for the sum.

        Raises:
            PeerLost: the group is broken.
        """
        work, self._work = self._work, None
        if work is not None and group is not None:
            group.wait(work, "state that changes in forward")

    def finish(self) -> None:
        """Give the tensors their new values: the pass counts."""
        if not self.is_active:
            return
        with torch.no_grad():
            if self._total is not None:
                finish(self._of_pass, self._total, self._world_size)
                self._total = None
            for entry in self._changing:
                derive = None if entry.combination is None else entry.combination.derive
                if derive is not None and (value := derive(entry.layer)) is not None:
                    write([entry], [value.detach()])
        if self._samples:
            self._watch.looks = False
        if self._unreported and (self._world_size > 1 or self._micro_batches > 1):
            self._report()

    # -- internals ---------------------------------------------------------------------------------------------------

    def _take_names(self, names: set[str]) -> None:
        """Track tensors without a rule."""
        if new := names - self._found:
            self._found |= new
            self._unreported = sorted({*self._unreported, *new})
            self.find()

    def _rules(self) -> int:
        """Return a checksum of the rules that the script has given."""
        given = [(pattern, str(chosen.rule), chosen.decay) for pattern, chosen in self._declared]
        return zlib.crc32(repr(given).encode())

    def _report(self) -> None:
        names, self._unreported = self._unreported, []
        if self._rank:
            return
        kinds = {entry.name: type(entry.layer).__name__ for entry in self._changing}
        shown = ", ".join(f"{name} of {kinds.get(name, 'a layer')}" for name in names[:MOST_NAMED])
        more = f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else ""
        _log.warning(
            "%s%s changed in a forward pass, and no rule says how the values of ranks and micro-batches combine. Every "
            "rank takes the one after the batch's first micro-batch, which is right where it does not depend on the "
            "samples. Call job.buffers(name, rule) after job.wrap: mean, sum, min, max, leader, own or a function",
            shown, more,
        )  # fmt: skip


def _share(group: Peers, value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every rank's value, by rank.

    Raises:
        PeerLost: the group is broken.
    """
    texts = gather_texts(group, json.dumps(value).encode(), "the names of buffers that change in forward")
    return [json.loads(text) for text in texts]


def _one_shape(name: str, own: torch.Size, changed: Sequence[Mapping[str, list[int]]]) -> torch.Size:
    """Return the shape that a tensor has on all ranks that have changed it."""
    found = {tuple(shapes[name]) for shapes in changed if name in shapes}
    if len(found) > 1:
        raise UsageError(
            f"buffer {name!r} has different shapes on different ranks after a forward pass, {sorted(found)}: call "
            f"job.buffers({name!r}, 'own') after job.wrap, or give it one shape"
        )
    return torch.Size(found.pop()) if found else own
