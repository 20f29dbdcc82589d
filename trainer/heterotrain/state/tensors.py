"""Training state as named tensors and a small skeleton, for joiners and for checkpoints.

The skeleton holds plain values (numbers, text, lists, dictionaries) and a marker in place of each tensor. It is read
with ``weights_only=True``: neither a peer nor a file can make this process run code.

A tensor is known by its name in the whole state, such as ``model.0.weight`` or ``optimizers.0.state.0.weight.exp_avg``.
A rank may hold a range of its elements, or nothing of it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from heterotrain.errors import HeterotrainError, UsageError
from heterotrain.state.memory import byte_view
from heterotrain.state.ranges import TensorRange

_MARKER = "__tensor__"
_ARRAY, _BYTES = "__numpy__", "__bytes_io__"
"""Markers of values that are restored as what they were."""
_PLAIN: tuple[Any, ...] = (bool, int, float, str, bytes)
_STATE_PATH = 5
"""Length of the path to a tensor in an optimizer's state: ``("optimizers", 0, "state", parameter, key)``."""


class Stateful(Protocol):
    """Anything with the two methods of torch's optimizers and schedulers."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state over."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the whole state.

    Attributes:
        name: unique in the state.
        of: name of the model's parameter or buffer that it belongs to; empty where there is none. Whoever holds
            anything of that parameter holds the entry.
        shape: its whole shape.
        dtype: its format.
        divided: whether it is held like the parameter: the same elements. Otherwise it is held whole.
    """

    name: str
    of: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    divided: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def whole(self) -> TensorRange:
        """All elements."""
        return TensorRange(self.name, 0, self.elements)

    @property
    def size_bytes(self) -> int:
        """Size of the whole tensor."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Some elements of a tensor, in place of the tensor in a captured state.

    Attributes:
        values: the elements, flat.
        shape: shape of the whole tensor.
        own: which elements they are.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    own: TensorRange


def elements_in(value: torch.Tensor | TensorShard, wanted: TensorRange) -> torch.Tensor:
    """Return some elements of a whole or divided tensor, flat.

    Raises:
        ValueError: it does not have them all.
    """
    whole = TensorRange(wanted.name, 0, math.prod(value.shape))
    own, values = (value.own, value.values) if isinstance(value, TensorShard) else (whole, value)
    if not own.has(wanted):
        raise ValueError(f"elements {wanted.start} to {wanted.stop} are not in {own.start} to {own.stop}")
    return values.reshape(-1)[wanted.start - own.start : wanted.stop - own.start]


@dataclass(frozen=True, slots=True)
class Held:
    """The elements of an entry that this rank holds (``own``): flat, or in the entry's shape."""

    entry: Entry
    own: TensorRange
    values: torch.Tensor

    @property
    def own_bytes(self) -> TensorRange:
        """The held bytes of the whole tensor."""
        size = self.entry.dtype.itemsize
        return TensorRange(self.entry.name, self.own.start * size, self.own.stop * size)

    def values_in(self, part: TensorRange) -> torch.Tensor:
        """Return some of the held elements, flat; they share the memory."""
        return self.values.reshape(-1)[part.start - self.own.start : part.stop - self.own.start]

    def bytes_in(self, part: TensorRange) -> torch.Tensor:
        """Return some of the held bytes; they share the memory of a contiguous tensor."""
        start = self.own_bytes.start
        return byte_view(self.values)[part.start - start : part.stop - start]


@dataclass(frozen=True, slots=True)
class Flat:
    """A state in two parts: the skeleton as bytes, and what this rank holds of the tensors that it names."""

    skeleton: bytes
    held: list[Held]
    by_name: dict[str, Held] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {held.entry.name: held for held in self.held})

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The held values, in order."""
        return [held.values for held in self.held]


def flatten(state: Mapping[str, Any]) -> Flat:
    """Take a state apart; the tensors are the live ones, not copies.

    Weights of the model that are tied, so that several names stand for the same memory, become one entry with several
    markers. Other parts of a state keep an entry for each name, because their owners may hold on to what they get.

    Raises:
        UsageError: a value is neither plain nor a tensor.
    """
    taker = _Taker(state.get("shapes", {}))
    skeleton = packed({key: taker.strip(value, (key,)) for key, value in state.items()})
    return Flat(skeleton, sorted(taker.found.values(), key=lambda held: _order(held.entry)))


class _Taker:
    """Takes a state apart. A path is the keys that lead to a value."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.found: dict[str, Held] = {}
        self._shapes = shapes
        self._weights: dict[Hashable, Entry] = {}

    def strip(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return the value with markers in place of tensors."""
        if isinstance(value, torch.Tensor | TensorShard):
            return _marker(self._take(value, path))
        if isinstance(value, Mapping):
            return {key: self.strip(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self.strip(item, (*path, i)) for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return {_ARRAY: _marker(self._take(torch.from_numpy(np.array(value)), path))}
        if isinstance(value, io.BytesIO):
            return {_BYTES: value.getvalue()}
        if isinstance(value, np.generic):
            value = value.item()
        for plain in _PLAIN:
            if isinstance(value, plain):
                return plain(value)  # a subclass (a numpy float, a version string) could not be read back
        if value is None:
            return None
        raise UsageError(
            f"the state of {_shown(path)} holds a {type(value).__name__}: "
            "use only numbers, text, lists, dictionaries and tensors"
        )

    def _take(self, value: torch.Tensor | TensorShard, path: tuple[Any, ...]) -> Entry:
        if hasattr(value, "_local_tensor"):
            raise UsageError(
                f"the state of {_shown(path)} is divided among ranks, which is possible for parameters and for "
                "optimizer state of their shape only: use an optimizer such as AdamW or SGD"
            )
        entry, values = self._entry(value, path), value.values if isinstance(value, TensorShard) else value
        if path[0] == "model" and values.numel():
            memory = (values.device, values.data_ptr(), values.dtype, tuple(values.shape), values.stride())
            entry = self._weights.setdefault(memory, entry)
        if entry.name not in self.found:
            own = replace(value.own, name=entry.name) if isinstance(value, TensorShard) else entry.whole
            self.found[entry.name] = Held(entry, own, values.detach())
        return entry

    def _entry(self, value: torch.Tensor | TensorShard, path: tuple[Any, ...]) -> Entry:
        of, divided = "", False
        if path[0] == "model":
            of, divided = str(path[1]), len(path) == 2  # noqa: PLR2004  # ("model", name)
        elif path[0] == "optimizers" and len(path) >= _STATE_PATH and path[2] == "state" and path[3] in self._shapes:
            of, divided = str(path[3]), len(path) == _STATE_PATH
        name, number = ".".join(map(str, path)), 1
        while name in self.found:  # keys with dots
            number += 1
            name = f"{'.'.join(map(str, path))}#{number}"
        dtype = value.values.dtype if isinstance(value, TensorShard) else value.dtype
        shape = tuple(value.shape)
        return Entry(name, of, shape, dtype, divided and self._shapes.get(of) == shape)


def packed(skeleton: Mapping[str, Any]) -> bytes:
    """Return a skeleton with markers as bytes."""
    buffer = io.BytesIO()
    torch.save(dict(skeleton), buffer)
    return buffer.getvalue()


def unpacked(skeleton: bytes) -> dict[str, Any]:
    """Return a skeleton with markers.

    Raises:
        HeterotrainError: it is not one made by ``flatten``.
    """
    # Without arguments, for an empty value. Not for this call only: torch's list is shared by all threads.
    torch.serialization.add_safe_globals([bytes])
    found = torch.load(io.BytesIO(skeleton), weights_only=True)
    if not isinstance(found, dict):
        raise HeterotrainError("a state's skeleton has to be a dictionary")
    return found


def entries_of(skeleton: bytes) -> list[Entry]:
    """Return the tensors that a skeleton names, larger formats first, so that each is aligned in a file of them all."""
    found: dict[str, Entry] = {}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            if _MARKER in value:
                name, shape = str(value[_MARKER]), tuple(value["shape"])
                found[name] = Entry(name, value["of"], shape, _dtype(value["dtype"]), value["divided"])
                return
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(unpacked(skeleton))
    return sorted(found.values(), key=_order)


def empty(skeleton: bytes, range_of: Callable[[Entry], TensorRange | None] = lambda entry: entry.whole) -> Flat:
    """Return a flat state with empty CPU tensors, to be filled by a transfer or from a file.

    Args:
        skeleton: the skeleton.
        range_of: the elements of an entry to make room for; ``None`` leaves the entry out.
    """
    return Flat(skeleton, room_for(entries_of(skeleton), range_of))


def room_for(
    entries: Iterable[Entry], range_of: Callable[[Entry], TensorRange | None], known: Mapping[str, Held] | None = None
) -> list[Held]:
    """Return entries with empty CPU tensors.

    Args:
        entries: of a state.
        range_of: the elements of an entry to make room for; ``None`` leaves the entry out.
        known: what is held already, by name. Its tensors of parameters are taken as they are, if they have exactly
            the wanted elements.
    """
    held = []
    for entry in entries:
        wanted = range_of(entry)
        same = (known or {}).get(entry.name)
        if same is not None and entry.of and same.own == wanted and same.entry.dtype == entry.dtype:
            held.append(Held(entry, same.own, same.values))
        elif wanted is not None:
            shape = entry.shape if wanted == entry.whole else (wanted.elements,)
            held.append(Held(entry, wanted, torch.empty(shape, dtype=entry.dtype)))
    return held


def unflatten(flat: Flat) -> dict[str, Any]:
    """Put a state together again; it shares the memory of the tensors. Entries that are not held are left out.

    Raises:
        HeterotrainError: the skeleton is not one made by ``flatten``.
    """
    absent = object()

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            if _MARKER in value:
                held = flat.by_name.get(str(value[_MARKER]))
                if held is None:
                    return absent
                if held.values.shape == held.entry.shape:
                    return held.values  # the same object for each name of a tied weight
                return TensorShard(held.values, held.entry.shape, held.own)
            if _ARRAY in value:
                return fill(value[_ARRAY]).numpy().copy()
            if _BYTES in value:
                return io.BytesIO(value[_BYTES])
            return {key: made for key, item in value.items() if (made := fill(item)) is not absent}
        if isinstance(value, list):
            return [made for item in value if (made := fill(item)) is not absent]
        if isinstance(value, tuple):
            return tuple(made for item in value if (made := fill(item)) is not absent)
        return value

    state: dict[str, Any] = fill(unpacked(flat.skeleton))
    return state


def merged(skeletons: Sequence[bytes]) -> bytes:
    """Return one skeleton of the skeletons of ranks that hold different parts of one state.

    The first one counts where all ranks have the same values. Layers, trained parameters and optimizer state are
    collected from all of them, in the order of the whole model.
    """
    if len(skeletons) == 1:
        return skeletons[0]
    every = [unpacked(skeleton) for skeleton in skeletons]
    first = every[0]
    place = {name: number for number, name in enumerate(first.get("shapes", {}))}

    def ordered(names: Iterable[str]) -> list[str]:
        return sorted(dict.fromkeys(names), key=lambda name: place.get(name, len(place)))

    first["model"] = {name: value for each in reversed(every) for name, value in each["model"].items()}
    first["trained"] = ordered(name for each in every for name in each["trained"])
    for number, optimizer in enumerate(first["optimizers"]):
        if "groups" not in optimizer:
            continue
        others = [each["optimizers"][number] for each in every]
        states = {name: state for other in reversed(others) for name, state in other["state"].items()}
        optimizer["state"] = {name: states[name] for name in ordered(states)}
        for group, own in enumerate(optimizer["groups"]):
            own["names"] = ordered(name for other in others for name in other["groups"][group]["names"])
    return packed(first)


def _marker(entry: Entry) -> dict[str, Any]:
    return {
        _MARKER: entry.name,
        "shape": list(entry.shape),
        "dtype": str(entry.dtype),
        "of": entry.of,
        "divided": entry.divided,
    }


def _order(entry: Entry) -> int:
    return -entry.dtype.itemsize


def _shown(path: Iterable[Any]) -> str:
    return "state" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise HeterotrainError(f"a state's skeleton names an unknown dtype {name!r}")
    return found
