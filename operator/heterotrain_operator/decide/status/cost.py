"""Accounts for a job's cost, in total and by step: prices of the pools, over the time in which workers had nodes.

The amount is kept with the time up to which it counts and the rate since then. It is written again when the rate
changes, and otherwise once a minute: an amount that grows would rewrite the status in every pass.
"""

from __future__ import annotations

from decimal import Decimal

from heterotrain_operator.api.internal_status import InternalCost
from heterotrain_operator.api.text import LARGEST, rounded
from heterotrain_operator.cluster_state.parse import rfc3339, seconds
from heterotrain_operator.decide.lifecycle import ENDED_STAGES
from heterotrain_operator.decide.status.context import JobContext
from heterotrain_operator.decide.workers.state import Worker, WorkerState

WRITTEN_EVERY_S = 60.0
_HOUR_S = 3600.0
_MOST_LENGTH = 32


def price_per_hour(context: JobContext) -> Decimal | None:
    """Return the sum of the prices of all workers on nodes; ``None`` where no pool has a price."""
    pools = context.spec.worker_pools if context.spec is not None else ()
    prices = {pool.name: Decimal(pool.price_per_hour) for pool in pools if pool.price_per_hour}
    if not prices:
        return None
    return sum((prices.get(worker.pod.pool, Decimal(0)) for worker in context.workers if _occupies(worker)), Decimal(0))


def cost_so_far(context: JobContext, price: Decimal | None) -> InternalCost | None:
    """Return the amount up to now, or up to the last minute; ``None`` for a job that never had a price.

    The time for which no operator ran counts at the rate before it, because workers train on.
    """
    before, rate, now_s = context.job.status.internal.cost, float(min(price or 0, Decimal(LARGEST))), context.now_s
    if before is None:
        return None if price is None else InternalCost(amount=0.0, until=rfc3339(now_s), per_hour=rate)
    since_s = min(now_s, seconds(before.until))
    ended = context.life.stage in ENDED_STAGES
    due = before.per_hour > 0 and (ended or int(now_s / WRITTEN_EVERY_S) > int(since_s / WRITTEN_EVERY_S))
    if rate == before.per_hour and not due:
        return before
    amount = before.amount + before.per_hour * (now_s - since_s) / _HOUR_S
    return InternalCost(amount=min(amount, LARGEST), until=rfc3339(now_s), per_hour=rate)


def price_text(price: Decimal | None) -> str | None:
    """Return a price as a decimal number."""
    if price is None:
        return None
    text = str(price)
    return text if len(text) <= _MOST_LENGTH else f"{price:.12g}"


def cost_text(cost: InternalCost | None) -> str | None:
    """Return an amount as a decimal number, with four digits after the point; very large ones are abbreviated."""
    if cost is None:
        return None
    text = f"{cost.amount:.4f}"
    return text if len(text) <= _MOST_LENGTH else f"{cost.amount:.12g}"


def step_cost_text(price: Decimal | None, step_s: float | None) -> str | None:
    """Return what a step costs at the present price and step time; ``None`` while either is unknown."""
    if price is None or step_s is None:
        return None
    cost = rounded(float(min(price, Decimal(LARGEST))) * step_s / _HOUR_S, digits=3)
    text = f"{Decimal(str(cost)):f}"
    return text if len(text) <= _MOST_LENGTH else f"{cost:.6g}"


def _occupies(worker: Worker) -> bool:
    return worker.placed or worker.state is WorkerState.LEAVING
