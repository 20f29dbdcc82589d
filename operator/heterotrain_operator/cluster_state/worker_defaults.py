"""What an administrator gives to all workers: labels, annotations and environment. A job's own template wins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heterotrain_operator.cluster_state.containers import training_container


@dataclass(frozen=True, slots=True)
class WorkerDefaults:
    """Labels and annotations of pods, and variables of the training container as in a pod."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    env: tuple[Mapping[str, Any], ...] = ()

    def in_template(self, template: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a job's template with what it does not have itself; the given one stays as it is."""
        if not (self.labels or self.annotations or self.env):
            return template
        metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
        marks = {
            "labels": {**self.labels, **(metadata.get("labels") or {})},
            "annotations": {**self.annotations, **(metadata.get("annotations") or {})},
        }
        main, containers = training_container(template), spec.get("containers") or ()
        found = [self._in_container(each) if each is main else each for each in containers]
        return {**template, "metadata": {**metadata, **marks}, "spec": {**spec, "containers": found}}

    def _in_container(self, container: Mapping[str, Any]) -> dict[str, Any]:
        own = container.get("env") or []
        known = {each.get("name") for each in own}
        return {**container, "env": [*(dict(each) for each in self.env if each["name"] not in known), *own]}


def worker_defaults(text: str) -> WorkerDefaults:
    """Return the defaults in a JSON text such as ``{"labels": {}, "annotations": {}, "env": []}``; empty for none.

    Raises:
        ValueError: the text is not of this form.
    """
    try:
        found = json.loads(text or "{}")
        return WorkerDefaults(
            labels={str(name): str(value) for name, value in (found.get("labels") or {}).items()},
            annotations={str(name): str(value) for name, value in (found.get("annotations") or {}).items()},
            env=tuple({**each, "name": str(each["name"])} for each in found.get("env") or ()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"worker defaults: {text!r} is not {{labels, annotations, env}} as JSON: {error!r}") from error
