"""Expressions that select devices, evaluated as the scheduler does (CEL), with Kubernetes' quantities and versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from heterotrain_operator.cluster_state.quantity import parse_quantity
from heterotrain_operator.decide.plugins.claimed_devices.devices import Device

_VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?:\+.*)?", re.ASCII)


class UnknownExpressionError(Exception):
    """An expression that cannot be evaluated here: a function of the API server that the library does not have."""


class Expressions:
    """Evaluates expressions; the library takes 30 MiB, so it is loaded for the first of them.

    The API server has bounded the cost of each expression before it stored it.
    """

    def __init__(self) -> None:
        self._programs: dict[str, Any] = {}

    def all_true(self, expressions: Iterable[str], device: Device) -> bool:
        """Return whether a device satisfies all expressions; one that asks for what the device lacks is false.

        Raises:
            UnknownExpressionError: one cannot be evaluated.
        """
        return all(self._value(expression, device) for expression in expressions)

    def _value(self, expression: str, device: Device) -> bool:
        import cel  # noqa: PLC0415  # 30 MiB that most clusters do not need

        try:
            program = self._programs.get(expression)
            if program is None:
                program = self._programs[expression] = cel.compile(expression)
            return program.execute(_context(cel.Context, device)) is True
        except KeyError:
            return False
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnknownExpressionError(f"{expression!r}: {error}") from error


def _context(make: Callable[..., Any], device: Device) -> Any:
    capacity = {
        domain: {name: _quantity(value) for name, value in values.items()} for domain, values in device.capacity.items()
    }
    attributes = {domain: dict(values) for domain, values in device.attributes.items()}
    context = make({"device": {"driver": device.key[0], "attributes": attributes, "capacity": capacity}})
    context.add_function("quantity", _quantity)
    context.add_function("semver", _semver)
    context.add_function("compareTo", _compare)
    context.add_function("isGreaterThan", lambda one, other: _compare(one, other) > 0)
    context.add_function("isLessThan", lambda one, other: _compare(one, other) < 0)
    return context


def _quantity(text: str) -> float:
    return parse_quantity(text)


def _semver(text: str) -> str:
    _version(text)
    return text


def _compare(one: Any, other: Any) -> int:
    """Return 1, 0 or −1 for two quantities or two versions.

    Raises:
        ValueError: a version is not three numbers; others have rules of their own, so the scheduler has to decide.
    """
    if isinstance(one, str) or isinstance(other, str):
        one, other = _version(str(one)), _version(str(other))
    return int(one > other) - int(one < other)


def _version(text: str) -> tuple[int, ...]:
    if (found := _VERSION.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is no plain version")
    return tuple(map(int, found.groups()))
