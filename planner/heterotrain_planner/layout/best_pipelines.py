"""The reach table: for every multiset of devices, the best pipeline over all orders and all cuts.

A pipeline grows from its end. Let the suffix of units from edge s be on the devices of a multiset u, with a device of
kind k in front and a link of class c in front of that. Whatever stages come before, their times depend on the suffix
only through (u, k, c, s), and their memory only through the size of u: the stage that is p-th from the end keeps p
micro-batches (1F1B). So a suffix may be exchanged for the best one of the same state, and one pass over all multisets,
the small ones first, is exact: every order of kinds is tried, because each multiset tries each of its kinds in front.

A stage is busy for its forward and backward pass and for two transfers: it waits for its input, and for the gradient
of its output. Receiving does not overlap with computing, sending does.

Legend: ``U`` multisets, ``N`` multisets of one size that have a kind, ``C`` classes of links, ``E`` edges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from heterotrain_planner.layout.costs import Costs, Floats, Ints
from heterotrain_planner.layout.family import Multisets

_FEW = 48
"""Multisets below which arrays are so small that calls cost more than numbers."""


class Least(Enum):
    """The quantity that a pass minimises; the other one decides among equals."""

    SLOWEST = "slowest"
    """Seconds of the slowest stage."""
    FILL = "fill"
    """Seconds of all stages together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Suffixes:
    """The best suffixes of one size with one kind in front.

    The last column stands for suffixes that do not exist: it is infinite.

    Attributes:
        first_CEN, second_CEN: the two quantities.
        column_U: column of each multiset of the size, counted from the first one.
    """

    first_CEN: Floats
    second_CEN: Floats
    column_U: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestPipelines:
    """The best whole pipeline of each multiset, each device in use.

    Attributes:
        slowest_U: seconds of its slowest stage; infinite where there is none.
        fill_U: seconds of all its stages together.
        layers: suffixes by size and kind, where they were kept.
    """

    slowest_U: Floats
    fill_U: Floats
    layers: list[dict[int, _Suffixes]] = field(default_factory=list)


def best_pipelines(
    costs: Costs, family: Multisets, *, least: Least = Least.SLOWEST, level_s: float = np.inf, keep: bool = False
) -> BestPipelines:
    """Return the best pipeline of each multiset, exact over all orders and cuts.

    Args:
        costs: of one size of micro-batch.
        family: the multisets.
        least: what to minimise. With ``SLOWEST``, the fill is that of one such pipeline, not always the least.
        level_s: no stage may take longer.
        keep: keep all suffixes, so that ``trace`` can find the stages; for small families only.
    """
    size = len(family.counts_UK)
    first_U, second_U = np.full(size, np.inf), np.full(size, np.inf)
    layers: list[dict[int, _Suffixes]] = []
    before: dict[int, _Suffixes] = {}
    for position in range(1, len(family.starts)):
        layer = _layer(costs, family, position, before, least=least, level_s=level_s, whole=(first_U, second_U))
        if keep:
            layers.append(layer)
        before = layer
    pair = (first_U, second_U) if least is Least.SLOWEST else (second_U, first_U)
    return BestPipelines(slowest_U=pair[0], fill_U=pair[1], layers=layers)


def trace(
    costs: Costs, family: Multisets, found: BestPipelines, *, least: Least, level_s: float = np.inf, index: int = -1
) -> list[tuple[int, int, int]]:
    """Return the stages of a multiset's best pipeline as (kind, first edge, end edge), in the order of computation.

    ``found`` has to come from ``reach`` with ``keep`` and the same arguments. The last multiset is the largest one.
    """
    multiset = index % len(family.counts_UK)
    wanted = (float(found.slowest_U[multiset]), float(found.fill_U[multiset]))
    wanted = wanted if least is Least.SLOWEST else (wanted[1], wanted[0])
    stages: list[tuple[int, int, int]] = []
    edge, front, link = 0, -1, 0
    last = len(costs.unit_E) - 1
    while edge < last:
        kinds = [front] if front >= 0 else np.flatnonzero(family.counts_UK[multiset]).tolist()
        step = None
        for kind in kinds:
            step = _step(costs, family, found, (multiset, kind, link, edge), wanted, least=least, level_s=level_s)
            if step is not None:
                stages.append((kind, edge, step[0]))
                multiset = int(family.before_UK[multiset, kind])
                edge, front, link, wanted = step
                break
        assert step is not None, "the table holds no such pipeline"  # noqa: S101  # reach and trace use one formula
    return stages


def _layer(
    costs: Costs,
    family: Multisets,
    position: int,
    before: dict[int, _Suffixes],
    *,
    least: Least,
    level_s: float,
    whole: tuple[Floats, Floats],
) -> dict[int, _Suffixes]:
    """Return the best suffixes of so many stages, and write whole pipelines into ``whole``."""
    start, stop = family.starts[position - 1], family.starts[position]
    counts = family.counts_UK[start:stop]
    classes, edges = costs.receive_CE.shape
    layer = {}
    for kind in np.flatnonzero(counts.any(axis=0)).tolist():
        rows = np.flatnonzero(counts[:, kind])
        columns = np.full(stop - start, len(rows), dtype=np.int64)
        columns[rows] = np.arange(len(rows))
        first, second = (np.full((classes, edges, len(rows) + 1), np.inf) for _ in range(2))
        backs, one, two = _behind(costs, family, before, kind, start + rows)
        ends = costs.ends(kind, position).tolist()
        stage_EE = costs.stage_s(kind, position)
        fronts = sorted(set(costs.class_KK[kind].tolist()))
        received_EC = costs.receive_CE[backs].T
        busy_GEC = stage_EE[..., None] + received_EC[None]  # from edge G to edge E
        # Few multisets: all edges at once. Many: one after the other, only the ends that are possible.
        chunk = edges if len(rows) <= _FEW else 1
        for edge in range(0, edges - 1, chunk):
            from_ = slice(edge, edge + chunk)
            behind = slice(edge + 1, max(ends[from_]) + 1)
            busy = busy_GEC[from_, behind] + costs.receive_CE[fronts][:, from_, None, None]
            busy = np.where(busy <= level_s, busy, np.inf)
            if busy.shape[2]:
                busy = busy.reshape(*busy.shape[:2], -1, 1)
                pair = (one[behind].reshape(-1, len(rows)), two[behind].reshape(-1, len(rows)))
                first[fronts, from_, :-1], second[fronts, from_, :-1] = _best(*pair, busy, least)
        now = (whole[0][start + rows], whole[1][start + rows])
        _keep_less(now, (first[fronts[0], 0, :-1], second[fronts[0], 0, :-1]))
        whole[0][start + rows], whole[1][start + rows] = now
        layer[kind] = _Suffixes(first, second, columns)
    return layer


def _behind(
    costs: Costs, family: Multisets, before: dict[int, _Suffixes], kind: int, multisets: Ints
) -> tuple[list[int], Floats, Floats]:
    """Return classes of links, and for each of them the best suffixes behind a stage of this kind, ``_ECN``."""
    edges = costs.receive_CE.shape[1]
    position = int(family.counts_UK[multisets[0]].sum())
    if position == 1:  # nothing but the end of the model
        nothing = np.full((edges, 1, len(multisets)), np.inf)
        nothing[-1] = 0.0
        return [0], nothing, nothing
    rest = family.before_UK[multisets, kind] - family.starts[position - 2]
    links = sorted({int(costs.class_KK[kind, other]) for other in before})
    first, second = (np.full((edges, len(links), len(multisets)), np.inf) for _ in range(2))
    for other, suffixes in before.items():
        link = int(costs.class_KK[kind, other])
        columns = suffixes.column_U[rest]
        place = links.index(link)
        pair = (suffixes.first_CEN[link][:, columns], suffixes.second_CEN[link][:, columns])
        _keep_less((first[:, place], second[:, place]), pair)
    return links, first, second


def _best(first: Floats, second: Floats, busy: Floats, least: Least) -> tuple[Floats, Floats]:
    """Return the best of all ends (last axis but one) of a stage that takes ``busy`` seconds, before given suffixes."""
    if least is Least.SLOWEST:
        ones, twos = np.maximum(first, busy), second + busy
    else:
        ones, twos = first + busy, np.maximum(second, busy)
    best = ones.min(axis=-2)
    return best, np.where(ones == best[..., None, :], twos, np.inf).min(axis=-2)


def _keep_less(kept: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> None:
    """Put the smaller pair of each column into ``kept``, by the first quantity, then by the second."""
    less = (other[0] < kept[0]) | ((other[0] == kept[0]) & (other[1] < kept[1]))
    np.copyto(kept[0], other[0], where=less)
    np.copyto(kept[1], other[1], where=less)


def _step(
    costs: Costs,
    family: Multisets,
    found: BestPipelines,
    state: tuple[int, int, int, int],
    wanted: tuple[float, float],
    *,
    least: Least,
    level_s: float,
) -> tuple[int, int, int, tuple[float, float]] | None:
    """Return the end of the front stage, then kind, link and quantities of the suffix behind it."""
    multiset, kind, link, edge = state
    rest = int(family.before_UK[multiset, kind])
    position = int(family.counts_UK[multiset].sum())
    last = len(costs.unit_E) - 1
    front_s = float(costs.receive_CE[link, edge])
    stage_E = costs.stage_s(kind, position)[edge]
    for end in range(edge + 1, int(costs.ends(kind, position)[edge]) + 1):
        compute = float(stage_E[end])
        others = [] if position == 1 else list(found.layers[position - 2].items())
        options = [(-1, 0, (0.0, 0.0))] if position == 1 and end == last else []
        for other, suffixes in others:
            back = int(costs.class_KK[kind, other])
            column = suffixes.column_U[rest - family.starts[position - 2]]
            options.append(
                (
                    other,
                    back,
                    (float(suffixes.first_CEN[back, end, column]), float(suffixes.second_CEN[back, end, column])),
                )
            )
        for other, back, behind in options:
            busy = compute + float(costs.receive_CE[back, end]) + front_s
            if busy > level_s:
                continue
            pair = (max(behind[0], busy), behind[1] + busy)
            if least is Least.FILL:
                pair = (behind[0] + busy, max(behind[1], busy))
            if pair == wanted:
                return end, other, back, behind
    return None
