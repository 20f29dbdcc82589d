"""A profile: how fast each member is and what the exchange costs, as people write it (``docs/forecast.md``)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heterotrain_core.contract.plan import CommunicationTime, ComputeTime
from heterotrain_core.split.member import SplitMember, TableTime

from heterotrain_cli.documents import check_document
from heterotrain_cli.errors import InputError

SCHEMA = "profile"
MAX_MEMBERS = 100_000
"""Single members of one profile; a decision over more than this is no longer a matter of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMember:
    """One entry: ``count`` equal members.

    Attributes:
        name: as given; with a job, its pool.
        count: single members that the entry stands for.
        curve: time and limits of one of them.
        price_per_hour: of one of them, in any currency; ``None`` when not stated.
    """

    name: str
    count: int
    curve: SplitMember
    price_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A whole profile."""

    communication: CommunicationTime
    members: tuple[ProfileMember, ...]


def read_profile(document: Any, *, where: str) -> Profile:
    """Return the profile that a document holds; ``where`` names the document in errors.

    Raises:
        InputError: it does not keep the schema, a table contradicts itself, or a member needs no time at all.
    """
    check_document(document, schema=SCHEMA, where=where)
    exchange = document.get("communication", {})
    profile = Profile(
        communication=CommunicationTime(
            overlapped_s=float(exchange.get("overlappedSeconds", 0)),
            last_bucket_s=float(exchange.get("lastBucketSeconds", 0)),
            gamma=float(exchange.get("gamma", 0)),
        ),
        members=tuple(_member(raw, f"{where}: members[{i}]") for i, raw in enumerate(document["members"])),
    )
    if (total := sum(member.count for member in profile.members)) > MAX_MEMBERS:
        raise InputError(f"{where}: the counts add up to {total} members, but at most {MAX_MEMBERS} are possible")
    return profile


def _member(raw: Mapping[str, Any], where: str) -> ProfileMember:
    compute = _table(raw["measured"], where) if "measured" in raw else _coefficients(raw, where)
    price = raw.get("pricePerHour")
    return ProfileMember(
        name=raw["name"],
        count=int(raw.get("count", 1)),
        curve=SplitMember(
            compute=compute,
            floor_samples=int(raw.get("minSamples", 1)),
            cap_samples=_whole(raw.get("maxSamples")),
            micro_cap_samples=_whole(raw.get("maxMicroBatchSamples")),
            granularity_samples=int(raw.get("granularity", 1)),
        ),
        price_per_hour=None if price is None else float(price),
    )


def _table(pairs: Sequence[Sequence[float]], where: str) -> TableTime:
    points = tuple(sorted((int(samples), float(seconds)) for samples, seconds in pairs))
    for (samples, _), (following, _) in itertools.pairwise(points):
        if samples == following:
            raise InputError(f"{where}.measured gives {samples} samples twice: keep one of the two times")
    if zero := next((samples for samples, seconds in points if samples > 0 and seconds <= 0), None):
        raise InputError(f"{where}.measured gives 0 seconds for {zero} samples: a share that has samples takes time")
    if points[-1][0] < 1:
        raise InputError(f"{where}.measured allows no share: add a point with at least 1 sample")
    return TableTime(points=points)


def _coefficients(raw: Mapping[str, Any], where: str) -> ComputeTime:
    compute = ComputeTime(
        per_sample_s=float(raw.get("perSampleSeconds", 0)),
        fixed_s=float(raw.get("fixedSeconds", 0)),
        backward_per_sample_s=float(raw.get("backwardPerSampleSeconds", 0)),
        backward_fixed_s=float(raw.get("backwardFixedSeconds", 0)),
    )
    if compute == _NO_TIME:
        raise InputError(f"{where} needs no time at all: at least one of its coefficients has to be more than 0")
    return compute


_NO_TIME = ComputeTime(per_sample_s=0.0, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)


def _whole(value: float | None) -> int | None:
    """Return an integer of the document as one: JSON schema also calls 64.0 an integer."""
    return None if value is None else int(value)
