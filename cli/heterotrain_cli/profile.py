"""A profile: the speed of each member and the cost of the exchange, as users write it (``docs/forecast.md``)."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Annotated

from heterotrain_core.contract.keys import MOST_SIZES
from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import SplitMember, TableTime
from heterotrain_planner.perf.exchange_sizes import ExchangeSeen, MeasuredExchange, with_seen
from pydantic import Field, model_validator

from heterotrain_cli.documents import (
    Document,
    DocumentPart,
    Flag,
    Fraction,
    Integer,
    Name,
    Price,
    Seconds,
    schema_config,
)

MAX_MEMBERS = 100_000
"""Single members of one profile; a forecast for more of them takes far longer than a second."""
_COEFFICIENTS = {"per_sample_s", "fixed_s", "backward_per_sample_s", "backward_fixed_s"}
EXCHANGES_OF_A_PROFILE = 100
"""A time in a profile counts as the mean of so many exchanges."""
_Ranks = Annotated[Integer, Field(ge=2, le=10**6)]
_Samples = Annotated[Integer, Field(ge=0, le=10**12)]
_AtLeastOne = Annotated[Integer, Field(ge=1, le=10**12)]
_Point = tuple[Annotated[Integer, Field(ge=0, le=10**8)], Seconds]


class ExchangeAmong(DocumentPart):
    """Gradient exchange among another number of ranks."""

    ranks: _Ranks
    """Ranks that exchanged gradients."""
    seconds: Annotated[Seconds, Field(gt=0)]
    """Transfer seconds of all gradient buckets (T_o + T_u)."""
    one_worker: Flag = False
    """Whether all of these ranks were in one worker, so that no network was used."""


class ProfiledExchange(DocumentPart):
    """Gradient exchange of the whole cluster, independent of the batch."""

    overlapped_s: Seconds = 0
    """T_o: transfer seconds of all gradient buckets but the last; they can hide behind backward."""
    last_bucket_s: Seconds = 0
    """T_u: transfer seconds of the last bucket; nothing can hide it."""
    gamma: Fraction = 0
    """Fraction of backward that has passed when the first bucket is ready."""
    ranks: _Ranks | None = None
    """Ranks among which these times were measured; absent, those of the job's preferred allocation."""
    one_worker: Flag = False
    """With ranks: whether all of them were in one worker, so that no network was used."""
    other_sizes: Annotated[tuple[ExchangeAmong, ...], Field(max_length=MOST_SIZES - 1)] = ()
    """The exchange among other numbers of ranks: together they show latency and transfer time."""


class ProfileMember(DocumentPart):
    """One entry: ``count`` equal members."""

    name: Name
    """Shown in the answer; with a job, the member's pool. Without a job, names need not be unique."""
    count: Annotated[Integer, Field(ge=1, le=MAX_MEMBERS)] = 1
    """Equal members that this entry stands for."""
    measured: Annotated[list[_Point], Field(min_length=1)] | None = None
    """[samples, seconds] pairs of the member's own step without exchange: linear between them, flat below the first,
    no share beyond the last; they need be neither convex nor monotone. Exchange cannot hide behind a measured member.
    """
    per_sample_s: Seconds = 0
    """q: seconds per sample of everything but backward (load, forward)."""
    fixed_s: Seconds = 0
    """s: fixed seconds of load and forward for each micro-batch."""
    backward_per_sample_s: Seconds = 0
    """k: backward seconds per sample."""
    backward_fixed_s: Seconds = 0
    """m: fixed backward seconds for each micro-batch."""
    min_samples: _Samples = 1
    """Smallest share; 0 allows the member to be left without work."""
    max_samples: _Samples | None = None
    """Largest share, whatever the micro-batches."""
    max_micro_batch_samples: _AtLeastOne | None = None
    """Largest micro-batch; a larger share is accumulated over several of nearly equal size."""
    granularity: _AtLeastOne = 1
    """Shares are multiples of it."""
    variation: Fraction | None = None
    """Standard deviation of the member's own time of a step, relative to its mean; absent, its noise is left out."""
    price_per_hour: Price | None = None
    """Price of one member for an hour, in any currency."""

    @model_validator(mode="after")
    def _one_time(self) -> ProfileMember:
        if bool(self.model_fields_set & _COEFFICIENTS) == (self.measured is not None):
            raise ValueError(
                "give either measured, or at least one of perSampleSeconds, fixedSeconds, backwardPerSampleSeconds and "
                "backwardFixedSeconds, not both"
            )
        points = sorted(self.measured or ())
        if points:
            _check_table(points)
        elif not any(getattr(self, name) for name in _COEFFICIENTS):
            raise ValueError("a step takes no time: set at least one coefficient above 0")
        return self

    @cached_property
    def curve(self) -> SplitMember:
        """Step time and limits of one of the members."""
        compute: ComputeTime | TableTime
        if self.measured is None:
            compute = ComputeTime(**self.model_dump(include=_COEFFICIENTS))
        else:
            compute = TableTime(points=tuple(sorted(self.measured)))
        return SplitMember(
            compute=compute,
            floor_samples=self.min_samples,
            cap_samples=self.max_samples,
            micro_cap_samples=self.max_micro_batch_samples,
            granularity_samples=self.granularity,
        )


def _check_table(points: list[tuple[int, float]]) -> None:
    for (samples, seconds), (following, _) in itertools.pairwise([*points, (-1, 0.0)]):
        if samples == following:
            raise ValueError(f"measured gives {samples} samples twice: keep one of the two times")
        if samples > 0 and seconds == 0:
            raise ValueError(f"measured gives 0 seconds for {samples} samples: a share with samples takes time")
    if points[-1][0] < 1:
        raise ValueError("measured allows no share: add a point with at least 1 sample")


class Profile(Document):
    """How fast each member of a job is, and what gradient exchange costs (``heterotrain forecast --profile``)."""

    model_config = schema_config("profile")

    exchange: ProfiledExchange = Field(default=ProfiledExchange(), alias="communication")
    """Gradient exchange of the whole cluster, independent of the batch."""
    members: Annotated[tuple[ProfileMember, ...], Field(min_length=1)]
    """The members; in the answer each single one has an entry, in this order."""

    @model_validator(mode="after")
    def _not_too_many(self) -> Profile:
        if (total := sum(member.count for member in self.members)) > MAX_MEMBERS:
            raise ValueError(f"the counts add up to {total} members, but at most {MAX_MEMBERS} are possible")
        return self

    @property
    def communication(self) -> CommunicationTime:
        """The gradient exchange as the core takes it."""
        e = self.exchange
        return CommunicationTime(overlapped_s=e.overlapped_s, last_bucket_s=e.last_bucket_s, gamma=e.gamma)

    @property
    def measured_exchange(self) -> MeasuredExchange:
        """The gradient exchange with the numbers of ranks at which it was measured; 0 members where that is unknown."""
        seen: tuple[ExchangeSeen, ...] = ()
        for other in self.exchange.other_sizes:
            found = ExchangeSeen(
                members=other.ranks, across=not other.one_worker, seconds=other.seconds, steps=EXCHANGES_OF_A_PROFILE
            )
            seen = with_seen(seen, found)
        exchange = MeasuredExchange(communication=self.communication, seen=seen)
        if self.exchange.ranks is None:
            return exchange
        return exchange.measured_among(
            self.exchange.ranks, across=not self.exchange.one_worker, steps=EXCHANGES_OF_A_PROFILE
        )
