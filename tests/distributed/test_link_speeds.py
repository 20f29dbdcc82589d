"""Workers of planned members export the links that their steps have used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from distributed.harness import Operator
from heterotrain_core.contract import metrics
from heterotrain_core.contract.plan import Layout, LayoutKind

BATCH = 16


@pytest.mark.parametrize(
    "layout", [(2,), Layout(kind=LayoutKind.SHARDED, shards=2, state_weights=(2, 1), sample_weights=(1, 1))]
)
def test_both_ranks_of_a_member_export_their_link(
    operate: Callable[..., Operator], layout: tuple[int, ...] | Layout
) -> None:
    operator = operate(batch_samples=BATCH, parallelism="Auto", epochs=1000)
    script = "distributed.link_scripts:train"
    workers = operator.start_workers(2, script=script, samples=20 * BATCH)
    operator.plan_members([(workers, layout, BATCH, BATCH)])
    for worker in workers:
        for name, low, high in ((metrics.LINK_BANDWIDTH, 1e5, 1e12), (metrics.LINK_LATENCY, 1e-7, 10.0)):
            if name == metrics.LINK_LATENCY and isinstance(layout, Layout):
                continue  # its messages are all large
            operator.until(lambda w=worker, n=name: w.metric(n) is not None, f"{worker.name} exports {name}")  # type: ignore[misc]  # default arguments bind the loop's variables
            assert low < (worker.metric(name) or 0.0) < high
