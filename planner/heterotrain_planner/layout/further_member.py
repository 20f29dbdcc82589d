"""Finds the devices that one more member lacks: the fewest that let some devices form a member more than they do.

Legend: ``K`` kinds of devices, ``J`` templates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from heterotrain_core.contract.plan import LayoutKind

from heterotrain_planner.layout.costs import Ints
from heterotrain_planner.layout.level import Search, TemplateOptions, template_options
from heterotrain_planner.layout.result import Template
from heterotrain_planner.layout.template_table import TemplateTable

MOST_TRIED = 200
"""Additions of one size that are tried; where there are more, only those of single templates count."""


def lacking_devices(
    templates: TemplateTable,
    devices: Sequence[int],
    most: Sequence[int],
    *,
    kinds: frozenset[LayoutKind],
    further: Sequence[Template] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return all smallest additions to ``devices`` that allow one member more, each by kind.

    Members may be put together otherwise with the additional devices, so an addition may be smaller than what any
    template lacks.

    Args:
        templates: those of the job.
        devices: by kind, those that there are.
        most: by kind, as many as there can be; devices beyond those of the table are not used.
        kinds: layouts that members may have.
        further: as in ``cover``.

    Returns:
        Nothing where no further devices within ``most`` allow another member.
    """
    counts = [kind.count for kind in templates.problem.kinds]
    have_K = np.array([min(pair) for pair in zip(devices, counts, strict=True)], dtype=np.int64)
    room_K = np.maximum(0, np.array([min(pair) for pair in zip(most, counts, strict=True)], dtype=np.int64) - have_K)
    options = template_options(templates, further, kinds, 1)
    members, used_K = Search(options, have_K, 0).most_members()
    known = _by_templates(options, have_K - used_K, room_K)
    if not known or not sum(known[0]):  # nothing helps, or it is not devices that a further member lacks
        return ()
    for size in range(1, sum(known[0]) + 1):
        tried = list(itertools.islice(_additions(room_K.tolist(), size), MOST_TRIED + 1))
        if len(tried) > MOST_TRIED:
            break
        found = [each for each in tried if Search(options, have_K + np.array(each), 0).most_members()[0] > members]
        if found:
            return tuple(found)
    return known


def _by_templates(options: TemplateOptions, unused_K: Ints, room_K: Ints) -> tuple[tuple[int, ...], ...]:
    """Return the smallest additions that make one more template possible beside the members that there are."""
    possible = np.isfinite(options.first_BJ).any(axis=0)
    lacking_JK = np.maximum(0, options.need_JK - unused_K)
    possible &= (lacking_JK <= room_K).all(axis=1)
    if not possible.any():
        return ()
    size_J = lacking_JK.sum(axis=1)
    least = size_J[possible].min()
    rows = lacking_JK[possible & (size_J == least)].tolist()
    return tuple(sorted({tuple(row) for row in rows}, reverse=True))


def _additions(room: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield every addition of ``size`` devices within the room, first those of the first kinds."""
    if not room:
        if not size:
            yield ()
        return
    for number in range(min(room[0], size), -1, -1):
        for rest in _additions(room[1:], size - number):
            yield (number, *rest)
