"""``status.internal``: what the operator keeps for its next start. Not part of the API; bounded like the status."""

from __future__ import annotations

from typing import Annotated, Any, cast

from heterotrain_core.contract.keys import MOST_SIZES
from pydantic import Field, ValidatorFunctionWrapHandler, WithJsonSchema, WrapValidator

from heterotrain_operator.api.schema import PRESERVE, Model
from heterotrain_operator.api.tolerant import read_tolerantly
from heterotrain_operator.api.types import MAX_COUNT, Count, Number, TimestampText


class PoolSpeed(Model):
    """Time model of a rank: ``a(b) = q b + s`` before backward and ``P(b) = k b + m`` in backward, for ``b`` samples.

    Attributes:
        samples: share near which it was measured.
        per_sample_seconds: q.
        fixed_seconds: s.
        backward_per_sample_seconds: k.
        backward_fixed_seconds: m.
        update_seconds: seconds of the optimizer, once a step.
    """

    samples: int = Field(ge=1, le=MAX_COUNT)
    per_sample_seconds: Number = Field(ge=0)
    fixed_seconds: Number = Field(ge=0)
    backward_per_sample_seconds: Number = Field(ge=0)
    backward_fixed_seconds: Number = Field(ge=0)
    update_seconds: Number = Field(default=0.0, ge=0)


class PoolMemory(Model):
    """What a device of a pool is planned with, once parts of the model did not fit there.

    Attributes:
        limit_bytes: for training state and activations; 0 for a pool that holds nothing any more.
        tries: how many times the limit became smaller.
        usable_bytes: what the pool's workers reported when it last did.
    """

    limit_bytes: Count
    tries: Count
    usable_bytes: Count


class InternalPool(Model):
    """What a new operator needs to know of a pool that has no worker.

    Attributes:
        name: of the pool.
        speed: of its median rank, as last known.
        exhausted_since: since when the pool has given no node to workers that were granted there.
        exhausted_why: what keeps its workers from starting; empty where it gave them no node.
        exhausted_tries: how many times in a row it gave none; each time it is left alone for twice as long.
        memory: what its devices are planned with, once planned parts of the model did not fit there.
    """

    name: str
    speed: PoolSpeed | None = None
    exhausted_since: TimestampText | None = None
    exhausted_tries: Count = 0
    exhausted_why: str = ""
    memory: PoolMemory | None = None


class InternalCost(Model):
    """What the job has cost.

    Attributes:
        amount: up to ``until``, in the currency of the pools' prices.
        until: time up to which the amount counts.
        per_hour: rate since then.
    """

    amount: Number = Field(ge=0)
    until: TimestampText
    per_hour: Number = Field(ge=0)


class ExchangeSize(Model):
    """The exchange as measured with one number of members (``perf.exchange_sizes.ExchangeSeen``)."""

    members: int = Field(ge=2, le=MAX_COUNT)
    across: bool
    seconds: Number = Field(gt=0)
    steps: int = Field(ge=1, le=MAX_COUNT)


class InternalExchange(Model):
    """What the job's gradient exchange takes.

    Attributes:
        members: in the measurement of the three that follow.
        overlapped_seconds: T_o.
        last_bucket_seconds: T_u.
        gamma: fraction of backward until the first bucket is ready.
        sizes: as measured with each number of members, the newest last.
    """

    members: int = Field(ge=2, le=MAX_COUNT)
    overlapped_seconds: Number = Field(ge=0)
    last_bucket_seconds: Number = Field(ge=0)
    gamma: Number = Field(ge=0, le=1)
    sizes: tuple[ExchangeSize, ...] = Field(default=(), max_length=MOST_SIZES)


class InternalDisruptions(Model):
    """Disruptions between which no step was committed (``decide.workers.disruptions``).

    Attributes:
        incidents: how many; workers that are lost together count once.
        last_time: when the newest incident was noticed.
        step: committed steps by then; ``None`` where they are not known.
        node: of all the newest ones that may be a node's fault; empty without one.
        on_node: how many of them in a row were there.
        reason: the newest one in a sentence.
    """

    incidents: Count
    last_time: TimestampText
    step: Count | None = None
    node: str = ""
    on_node: Count = 0
    reason: str = ""


class InternalStatus(Model):
    """Values that the operator persists for itself, written together with the counts that they belong to.

    Attributes:
        accounted_workers: uids of ended workers that ``restarts`` and ``disruptions`` already contain.
        pools: by name.
        cost: what the job has cost so far; absent where no pool has a price.
        exchange: of gradients; absent before it was measured.
        common_parts: of the pods, as running workers have them (``decide.objects.common_parts``).
        stores: where the running workers keep checkpoints and, if they did so elsewhere before, there.
        retried: the newest request to try a failed job again that was followed.
        disruptions: in a row; absent without any.
    """

    cost: InternalCost | None = None
    accounted_workers: tuple[str, ...] = ()
    pools: tuple[InternalPool, ...] = ()
    exchange: InternalExchange | None = None
    common_parts: str | None = None
    stores: tuple[str, ...] = ()
    retried: str | None = None
    disruptions: InternalDisruptions | None = None

    def pool(self, name: str) -> InternalPool:
        """Return what is known of a pool."""
        return next((pool for pool in self.pools if pool.name == name), InternalPool(name=name))


def _readable(value: Any, read: ValidatorFunctionWrapHandler) -> InternalStatus:
    """Return the persisted values; those of another version that this one cannot read are left out."""
    return cast("InternalStatus", read(value)) if isinstance(value, Model) else read_tolerantly(InternalStatus, value)


# Without a schema of its own: nothing in it is part of the API.
Internal = Annotated[
    InternalStatus,
    WrapValidator(_readable),
    WithJsonSchema({"type": "object", PRESERVE: True}),
]
