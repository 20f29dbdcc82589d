"""Linear and mixed-integer programmes, by HiGHS (Huangfu and Hall 2018). The same input gives the same answer.

Limits are numbers of nodes and not seconds, and one thread works, so neither load nor processors change a decision.

Legend: ``C`` columns, ``R`` rows, ``E`` entries of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import highspy
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_WHOLE = 1
"""HiGHS' number for a column that takes whole amounts."""


class _Quiet(highspy.Highs):
    """HiGHS on one thread, without the lines that its own constructor prints."""

    def __init__(self, *, gap: float, most_nodes: int) -> None:
        super(highspy.Highs, self).__init__()
        for name, value in (
            ("output_flag", False),
            ("threads", 1),
            ("parallel", "off"),
            ("mip_rel_gap", 0.0),
            ("mip_abs_gap", max(gap, 1e-9)),
            ("mip_max_nodes", most_nodes),
        ):
            self.setOptionValue(name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Programme:
    """Maximise ``Σ gain x`` with ``least ≤ A x ≤ most`` for every row and ``0 ≤ x ≤ upper`` for every column.

    ``row_E``, ``column_E`` and ``value_E`` are the entries of ``A`` that are not zero, each place at most once.
    """

    gain_C: Floats
    upper_C: Floats
    least_R: Floats
    most_R: Floats
    row_E: Ints
    column_E: Ints
    value_E: Floats


class Solution(NamedTuple):
    """An answer.

    Attributes:
        value: sum of gains.
        amounts_C: of the columns.
        bound: no amounts have a larger value.
        price_R: of the rows, for amounts that need not be whole; otherwise zeros.
    """

    value: float
    amounts_C: Floats
    bound: float
    price_R: Floats


def maximise(
    programme: Programme,
    *,
    whole: bool = False,
    start_C: Floats | None = None,
    gap: float = 0.0,
    most_nodes: int = 1000,
) -> Solution | None:
    """Return the best amounts found; ``None`` where no amounts keep the limits, or none were found.

    Args:
        programme: bounded.
        whole: whether amounts are whole numbers.
        start_C: amounts that keep the limits, NaN for those to be found; the answer is at least as good.
        gap: difference of value and bound that is good enough, besides rounding.
        most_nodes: nodes of the search tree, if amounts are whole.
    """
    columns, rows = len(programme.gain_C), len(programme.most_R)
    order_E = np.lexsort((programme.row_E, programme.column_E))
    first_C = np.searchsorted(programme.column_E[order_E], np.arange(columns))
    solver = _Quiet(gap=gap, most_nodes=most_nodes)
    solver.passModel(
        columns,
        rows,
        len(order_E),
        int(highspy.MatrixFormat.kColwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        -programme.gain_C,
        np.zeros(columns),
        programme.upper_C,
        programme.least_R,
        programme.most_R,
        first_C.astype(np.int32),
        programme.row_E[order_E].astype(np.int32),
        programme.value_E[order_E],
        np.full(columns, _WHOLE if whole else 0, np.int32),
    )
    if start_C is not None:
        known = np.flatnonzero(~np.isnan(start_C))
        solver.setSolution(len(known), known.astype(np.int32), start_C[known])
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    found = solver.getSolution()
    amounts_C = np.array(found.col_value)
    value = float(programme.gain_C @ amounts_C)
    if not whole:
        return Solution(value, amounts_C, value, -np.array(found.row_dual))
    amounts_C = np.round(amounts_C)
    value = float(programme.gain_C @ amounts_C)
    return Solution(value, amounts_C, max(value, -float(info.mip_dual_bound)), np.zeros(rows))
