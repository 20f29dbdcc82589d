"""The plan as strict JSON, and the rules by which a reader accepts or refuses it.

Unknown fields are refused rather than ignored: if one side wrote a field that the other dropped, both would silently
disagree about the gradient. A change of fields is a change of ``SCHEMA_VERSION``. Fields with their default are left
out, because a ConfigMap is small and a plan may name thousands of ranks.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from heterotrain_core.contract.consistency import problems
from heterotrain_core.contract.plan import SCHEMA_VERSION, Plan

MAX_VERSION = 2**52
"""Limit of generations and revisions: no job reaches it, and a number written by hand must allow newer plans."""
MAX_INTEGER = 2**63 - 1
"""Limit of all whole numbers: larger ones do not fit arrays."""
_MOST_NUMBER = sys.float_info.max
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A plan that must not be used, with the reason in one sentence."""

    reason: str


def encode_plan(plan: Plan) -> str:
    """Return the plan as JSON with sorted keys: the same plan gives the same bytes.

    Raises:
        ValueError: the plan contradicts itself (see ``plan.problems``).
    """
    if found := problems(plan):
        raise ValueError(f"refusing to write a plan that contradicts itself: {'; '.join(found)}")
    return json.dumps({"schema": SCHEMA_VERSION, **_plain(plan)}, sort_keys=True, separators=(",", ":"))


def decode_plan(text: str, *, job_uid: str, newest: tuple[int, int] = (-1, -1)) -> Plan | Refused:
    """Return the plan if it is for the job ``job_uid`` and not older than ``newest``, otherwise why it is refused."""
    try:
        raw: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Refused(reason=f"the plan is not JSON: {error}")
    if not isinstance(raw, dict):
        return Refused(reason="the plan is not a JSON object")
    schema = raw.pop("schema", None)
    if type(schema) is not int or schema != SCHEMA_VERSION:
        return Refused(
            reason=f"the plan has schema {schema!r}, this image reads {SCHEMA_VERSION}: use matching versions"
        )
    try:
        plan = _read(Plan, raw, "plan")
    except (TypeError, ValueError) as error:
        return Refused(reason=str(error))
    if plan.job_uid != job_uid:
        return Refused(reason=f"the plan is for job {plan.job_uid}, not for {job_uid}")
    if max(plan.version) >= MAX_VERSION:
        return Refused(reason=f"plan {plan.version} has a version beyond {MAX_VERSION}: no newer plan could follow")
    if plan.version < newest:
        return Refused(reason=f"plan {plan.version} is older than {newest}")
    if found := problems(plan):
        return Refused(reason=f"the plan contradicts itself: {'; '.join(found)}")
    return plan


def _plain(value: Any) -> Any:
    """Return the JSON form of a value of the plan."""
    if is_dataclass(value):
        known = _defaults(type(value))  # type: ignore[arg-type]  # every class is hashable
        found = ((name, getattr(value, name)) for name in known)
        return {name: _plain(own) for name, own in found if known[name] is MISSING or own != known[name]}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@cache
def _defaults(kind: type[Any]) -> Mapping[str, Any]:
    """Return the default of each field, ``MISSING`` where there is none."""
    return {field.name: field.default for field in fields(kind)}


def _read(kind: type[_T], raw: Any, path: str) -> _T:
    """Build a dataclass from JSON by its own type hints, strictly."""
    if not isinstance(raw, Mapping):
        raise TypeError(f"{path} has to be an object, not {type(raw).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]  # every class is hashable
    if unknown := sorted(set(raw) - set(hints)):
        raise ValueError(f"{path} has unknown fields {unknown}")
    try:
        return kind(**{name: _value(hints[name], value, f"{path}.{name}") for name, value in raw.items()})
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    """Return the type of each field; cached, because a plan holds thousands of values of a few types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(hint: Any, raw: Any, path: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if raw is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), raw, path)
    if origin is tuple:
        if not isinstance(raw, list):
            raise TypeError(f"{path} has to be a list, not {type(raw).__name__}")
        return tuple(_value(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(raw))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(raw)
    if is_dataclass(hint) and isinstance(hint, type):
        return _read(hint, raw, path)
    if hint is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        if not -_MOST_NUMBER <= raw <= _MOST_NUMBER:  # NaN is refused as well
            raise ValueError(f"{path} is not a finite number")
        return float(raw)
    if hint is int and isinstance(raw, int) and not -MAX_INTEGER <= raw <= MAX_INTEGER:
        raise ValueError(f"{path} is beyond {MAX_INTEGER}")
    if not isinstance(raw, hint) or (hint is int and isinstance(raw, bool)):
        raise TypeError(f"{path} has to be {hint.__name__}, not {type(raw).__name__}")
    return raw
