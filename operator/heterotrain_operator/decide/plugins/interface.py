"""What plugins get and answer. A plugin has functions for some of the lists in ``registry``, each of them pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heterotrain_operator.api.pools import WorkerPool
from heterotrain_operator.cluster_state.views import PodView, ValidJob

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPod:
    """A worker's pod that is being built; its requests are those as admitted, or none before they are known."""

    job: ValidJob
    pool: WorkerPool
    template: Object
    requests: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPatch:
    """What a new pod gets besides. The scheduler is that of pods whose template names none."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    scheduler_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEdit:
    """A change of a pod: a finalizer to remove, empty for none, and annotations; ``None`` removes one."""

    pod: PodView
    finalizer: str = ""
    annotations: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """How many pods may be created now, and what others wait for, in one sentence; empty when nothing is in the way."""

    free: int
    reason: str = ""
