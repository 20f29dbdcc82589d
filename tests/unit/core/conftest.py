"""A long form of the random tests: ``HETEROTRAIN_SEEDS_TIMES=10`` gives each of them ten times as many seeds.

It counts for tests whose parameter ``seed`` is a range from 0. `make test-oracles` sets it.
"""

from __future__ import annotations

import os

import pytest

TIMES = "HETEROTRAIN_SEEDS_TIMES"
MOST_TIMES = 1000


def seeds_times() -> int:
    """Return how many times as many seeds there are.

    Raises:
        pytest.UsageError: if the variable is not a whole number from 1 to ``MOST_TIMES``.
    """
    text = os.environ.get(TIMES, "1")
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TIMES:
        raise pytest.UsageError(f"{TIMES} is {text!r}: write a whole number from 1 to {MOST_TIMES}")
    return int(text)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the test more seeds, before pytest reads its marks."""
    times = seeds_times()
    markers = metafunc.definition.own_markers
    for at, mark in enumerate(markers):
        if mark.name != "parametrize" or mark.args[:1] != ("seed",) or times == 1:
            continue
        values = mark.args[1]
        if isinstance(values, range) and (values.start, values.step) == (0, 1):
            markers[at] = pytest.mark.parametrize("seed", range(len(values) * times)).mark
