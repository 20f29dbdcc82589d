"""Sources of a worker's pod, and their digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heterotrain_operator.cluster_state.parse import RESTART_ANNOTATION, TEMPLATE_ANNOTATION


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSource:
    """What a worker's pod is made from.

    Attributes:
        template: pod template of its pool, with the parts that running workers hold in force.
        settings: of the training, as the pod's variable holds them; empty for those of the spec.
        digest: of what the user wrote about the pod, see ``common_parts.pod_digest``.
        restart: the request for a restart that it answers; empty without one.
    """

    template: Mapping[str, Any]
    settings: str = ""
    digest: str = ""
    restart: str = ""

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations by which the pod tells later what it was made from."""
        marks = {TEMPLATE_ANNOTATION: self.digest, RESTART_ANNOTATION: self.restart}
        return {key: value for key, value in marks.items() if value}
