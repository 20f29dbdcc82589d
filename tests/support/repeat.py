"""How often tests repeat: ``REPEAT=gate`` (the default) is what every change has to pass, ``REPEAT=all`` explores.

A test takes its counts and seeds from here and names both: ``range(times(gate=6, every=300))``. A test, or a parameter
of one, that only the long run needs is marked ``thorough``. What is drawn at random starts at ``first_seed``: the gate
draws the same each time, a long run draws anew, and ``SEED`` repeats it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any, Final

import pytest

VARIABLE: Final = "REPEAT"
SEED: Final = "SEED"
MOST_SEED: Final = 2**31
GATE: Final = "gate"
ALL: Final = "all"


def is_thorough(environment: os._Environ[str] | dict[str, str] = os.environ) -> bool:
    """Return whether this is the long run.

    Raises:
        ValueError: if the variable is neither ``gate`` nor ``all``.
    """
    value = environment.get(VARIABLE) or GATE
    if value not in {GATE, ALL}:
        raise ValueError(f"{VARIABLE} is {value!r}: write {GATE} or {ALL}")
    return value == ALL


def times(*, gate: int, every: int) -> int:
    """Return one of two counts: that of the gate, or that of the long run."""
    return every if is_thorough() else gate


def first_seed(*, gate: int) -> int:
    """Return the seed to start at: this one in the gate, that of the variable ``SEED`` in a long run.

    It is printed, so that the report of a failed test has it.
    """
    first = int(os.environ[SEED]) if is_thorough() else gate
    print(f"the first seed is {first}")
    return first


def choose_seed(environment: os._Environ[str] | dict[str, str] = os.environ) -> None:
    """Choose the seed of a long run, unless the variable ``SEED`` has one; processes of the run inherit it.

    Raises:
        ValueError: if it is no whole number from 0 to 2147483647.
    """
    if not is_thorough(environment):
        return
    text = environment.setdefault(SEED, str(random.SystemRandom().randrange(MOST_SEED)))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_SEED)) and int(text) < MOST_SEED):
        raise ValueError(f"{SEED} is {text!r}: write a whole number from 0 to {MOST_SEED - 1}")


def part_of(values: Iterable[Any], *, of: int) -> list[Any]:
    """Return parameters of a test: the gate runs the first of each ``of`` values, the long run all.

    A tuple holds the values of several parameters.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.thorough if number % of else ()
        )
        for number, value in enumerate(values)
    ]
