"""What every worker's pod is made from: ``spec.template``.

Typed is what the operator itself reads or adds to: a mistake there is refused when the job is applied, and can never
surprise a decision. All else is kept as it is, and tried out by a dry run.
"""

from __future__ import annotations

from typing import Annotated

from heterotrain_core.contract import env, keys
from pydantic import Field

from heterotrain_operator.api.schema import CEL, MapList, Model
from heterotrain_operator.api.types import EnvName, LabelValue, Quantity


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


class ContainerResources(Model, preserve=True):
    """Requests and limits of a container."""

    limits: dict[str, Quantity] | None = Field(default=None, max_length=32, description="Most that it may use.")
    requests: dict[str, Quantity] | None = Field(
        default=None, max_length=32, description="What the scheduler sets aside."
    )


class ContainerPort(Model, preserve=True):
    """A port of a container."""

    name: str | None = Field(default=None, max_length=63, description="Name of the port.")


class VolumeMount(Model, preserve=True):
    """Where a volume is mounted."""

    mount_path: str | None = Field(default=None, max_length=4096, description="Path in the container.")


class Container(Model, preserve=True):
    """A container; everything that Kubernetes knows is allowed."""

    name: str = Field(min_length=1, max_length=63, description="Name of the container.")
    env: tuple[EnvVar, ...] | None = Field(
        default=None, max_length=200, description="Environment; the operator adds its own variables."
    )
    resources: ContainerResources | None = Field(
        default=None, description="Resources; those of the pool win in the container that trains."
    )
    ports: tuple[ContainerPort, ...] | None = Field(
        default=None, max_length=100, description="Ports; the operator adds those of the metrics."
    )
    volume_mounts: tuple[VolumeMount, ...] | None = Field(
        default=None, max_length=100, description="Mounts; the operator adds the plan's and /dev/shm."
    )
    restart_policy: str | None = Field(
        default=None, max_length=16, description="Always makes an init container a sidecar."
    )
    termination_message_path: str | None = Field(
        default=None, max_length=4096, description="File that receives the worker's outcome."
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


class PodToleration(Model, preserve=True):
    """A toleration."""

    key: str | None = Field(default=None, max_length=316, description="Taint key; empty matches all.")


REPLACED_BY_US = "spec.template.spec.restartPolicy has to be left out: the operator replaces workers itself"
SCHEDULED_BY_POOL = (
    "spec.template.spec.nodeName has to be left out: choose nodes by nodeSelector in spec.workerPools, because a worker that "
    "passes the scheduler by is refused by a node that is full"
)
LIMITED_BY_JOB = (
    "spec.template.spec.activeDeadlineSeconds has to be left out: limit the job by spec.activeDeadlineSeconds, because workers "
    "that end one by one are only made again"
)


class PodSpec(
    Model,
    preserve=True,
    rules=(
        CEL(rule="!has(self.restartPolicy) || self.restartPolicy == 'Never'", message=REPLACED_BY_US),
        CEL(rule="!has(self.nodeName) || self.nodeName == ''", message=SCHEDULED_BY_POOL),
        CEL(rule="!has(self.activeDeadlineSeconds)", message=LIMITED_BY_JOB),
    ),
):
    """A pod's specification; everything that Kubernetes knows is allowed and kept."""

    containers: tuple[Container, ...] = Field(
        min_length=1,
        max_length=10,
        description="Containers; the first one trains, unless the annotation kubectl.kubernetes.io/default-container names another.",
        json_schema_extra=MapList("name"),
    )
    init_containers: tuple[Container, ...] | None = Field(
        default=None, max_length=10, description="Containers that run before.", json_schema_extra=MapList("name")
    )
    volumes: tuple[Volume, ...] | None = Field(
        default=None,
        max_length=64,
        description="Volumes; the operator adds the plan and, unless one is mounted there, /dev/shm.",
        json_schema_extra=MapList("name"),
    )
    node_selector: dict[str, LabelValue] | None = Field(
        default=None, max_length=32, description="Labels of nodes; those of the pool are added."
    )
    tolerations: tuple[PodToleration, ...] | None = Field(
        default=None, max_length=64, description="Tolerations; those of the pool are added."
    )
    overhead: dict[str, Quantity] | None = Field(
        default=None, max_length=32, description="What the runtime class takes besides."
    )
    termination_grace_period_seconds: int | None = Field(
        default=None, ge=1, le=86_400, description="Seconds between the request to leave and the kill; 30 by default."
    )
    restart_policy: str | None = Field(default=None, max_length=16, description="Left out, or Never.")
    node_name: str | None = Field(default=None, max_length=253, description="Left out: the scheduler places workers.")
    active_deadline_seconds: int | None = Field(default=None, description="Left out: the job has a limit of its own.")


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
