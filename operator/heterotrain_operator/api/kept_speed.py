"""The speed of a program on a pool as a ConfigMap has it (``decide.kept_speeds``): bounded, since users may edit it."""

from __future__ import annotations

from typing import Literal

from heterotrain_core.contract.plan import ComputeTime
from heterotrain_planner.perf.counters import LONGEST_STEP_S, SHORTEST_STEP_S
from heterotrain_planner.planning.kept_speed import MOST_SHAPES, MOST_STEPS, KeptSpeed, SharesSeen
from pydantic import Field, ValidationError

from heterotrain_operator.api.schema import Model
from heterotrain_operator.api.text import quoted
from heterotrain_operator.api.types import MAX_BATCH, MAX_NAME_LENGTH, LabelValue, Number

LARGEST_VARIATION = 10.0
_MOST_CHARACTERS = 4000


class KeptShare(Model):
    """Steps at one share."""

    samples: int = Field(ge=1, le=MAX_BATCH)
    micro_batches: int = Field(default=1, ge=1, le=MAX_BATCH)
    steps: int = Field(ge=1, le=MOST_STEPS)


class KeptEntry(Model):
    """The speed of one program on one pool, as the ConfigMap has it; ``job`` measured it until ``written_s``."""

    version: Literal[1] = 1
    pool: LabelValue
    job: str = Field(default="", max_length=MAX_NAME_LENGTH, pattern=r"^[-a-z0-9.]*$")
    written_s: Number = Field(ge=0, le=1e12)
    per_sample_seconds: Number = Field(ge=0, le=LONGEST_STEP_S)
    fixed_seconds: Number = Field(ge=0, le=LONGEST_STEP_S)
    backward_per_sample_seconds: Number = Field(ge=0, le=LONGEST_STEP_S)
    backward_fixed_seconds: Number = Field(ge=0, le=LONGEST_STEP_S)
    update_seconds: Number = Field(ge=0, le=LONGEST_STEP_S)
    variation: Number = Field(ge=0, le=LARGEST_VARIATION)
    shares: tuple[KeptShare, ...] = Field(min_length=1, max_length=MOST_SHAPES)

    @property
    def speed(self) -> KeptSpeed:
        """The speed as a value."""
        return KeptSpeed(
            compute=ComputeTime(
                per_sample_s=self.per_sample_seconds,
                fixed_s=self.fixed_seconds,
                backward_per_sample_s=self.backward_per_sample_seconds,
                backward_fixed_s=self.backward_fixed_seconds,
                update_s=self.update_seconds,
            ),
            variation=self.variation,
            seen=tuple(SharesSeen(each.samples, each.micro_batches, each.steps) for each in self.shares),
        )


def read_entry(text: str) -> KeptEntry | str:
    """Return an entry, or what is wrong with it."""
    if len(text) > _MOST_CHARACTERS:
        return f"it has more than {_MOST_CHARACTERS} characters"
    try:
        entry = KeptEntry.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return quoted(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": "))
    seconds = [entry.speed.seconds(each.share_samples, each.micro_batches) for each in entry.speed.seen]
    return entry if all(SHORTEST_STEP_S <= s <= LONGEST_STEP_S for s in seconds) else "its steps have no usable length"
