"""What every worker's pod is made from: ``spec.template``."""

from __future__ import annotations

from typing import Annotated

from heterotrain_core.contract import env, keys
from pydantic import Field

from heterotrain_operator.api.schema import CEL, Model
from heterotrain_operator.api.types import EnvName, LabelValue


class EnvVar(
    Model,
    preserve=True,
    rules=(
        CEL(
            rule=f"!self.name.startsWith('{env.PREFIX}') || self.name in {sorted(env.USER_SETTABLE)}",
            message=f"names that start with {env.PREFIX} belong to the operator: give the variable another name",
        ),
    ),
):
    """An environment variable."""

    name: EnvName = Field(description="Name of the variable.")


class Container(Model, preserve=True):
    """A container; everything that Kubernetes knows is allowed."""

    name: str = Field(min_length=1, max_length=63, description="Name of the container.")
    env: tuple[EnvVar, ...] = Field(
        default=(), max_length=200, description="Environment; the operator adds its own variables."
    )


class Volume(
    Model,
    preserve=True,
    rules=(
        CEL(
            rule=f"!(self.name in {sorted([keys.CONTAINER_PLAN_VOLUME, keys.CONTAINER_SHM_VOLUME])})",
            message=f"the volume names {keys.CONTAINER_PLAN_VOLUME} and {keys.CONTAINER_SHM_VOLUME} belong to the operator: "
            "give the volume another name",
        ),
    ),
):
    """A volume; everything that Kubernetes knows is allowed."""

    name: str = Field(min_length=1, max_length=63, description="Name of the volume.")


class PodSpec(Model, preserve=True):
    """A pod's specification; everything that Kubernetes knows is allowed and kept."""

    containers: tuple[Container, ...] = Field(
        min_length=1,
        max_length=10,
        description="Containers; the first one trains, unless the annotation kubectl.kubernetes.io/default-container names another.",
    )
    init_containers: tuple[Container, ...] = Field(default=(), max_length=10, description="Containers that run before.")
    volumes: tuple[Volume, ...] = Field(
        default=(),
        max_length=64,
        description="Volumes; the operator adds the plan and, unless one is mounted there, /dev/shm.",
    )


class TemplateMetadata(Model):
    """Labels and annotations that every worker carries besides the operator's own."""

    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=64, description="Labels.")
    annotations: dict[str, Annotated[str, Field(max_length=65_536)]] = Field(
        default_factory=dict, max_length=64, description="Annotations."
    )


class PodTemplate(Model):
    """What every worker's pod is made from."""

    metadata: TemplateMetadata = Field(
        default_factory=TemplateMetadata, description="Labels and annotations of the pods."
    )
    spec: PodSpec = Field(
        description="The pod. A change reaches workers that start after it; suspend and resume to renew all."
    )
