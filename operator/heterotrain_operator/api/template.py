"""``spec.template``: the template of the workers' pods.

Typed are the fields that the operator reads or adds to, so that mistakes there are rejected when the job is applied.
All other fields are kept as they are and checked by a dry run of the pod.
"""

from __future__ import annotations

from typing import Annotated

from heterotrain_core.contract import env, keys
from pydantic import Field

from heterotrain_operator.api.schema import MapList, Model, SpecRule
from heterotrain_operator.api.types import EnvName, LabelValue, Quantity


class EnvVar(
    Model,
    preserve=True,
    rules=(
        SpecRule(
            cel=f"!self.name.startsWith('{env.PREFIX}') || self.name in {sorted(env.USER_SETTABLE)}",
            admits=lambda self: not self.name.startswith(env.PREFIX) or self.name in env.USER_SETTABLE,
            message=f"names that start with {env.PREFIX} belong to the operator: rename the variable",
        ),
    ),
):
    """An environment variable."""

    name: EnvName = Field(description="Name of the variable. Example: NCCL_DEBUG.")


class ContainerResources(Model, preserve=True):
    """Requests and limits of a container."""

    limits: dict[str, Quantity] | None = Field(default=None, max_length=32, description="Limits. Example: {cpu: 2}.")
    requests: dict[str, Quantity] | None = Field(
        default=None, max_length=32, description="Requests. Example: {cpu: 500m}."
    )


class ContainerPort(Model, preserve=True):
    """A port of a container."""

    name: str | None = Field(default=None, max_length=63, description="Name of the port. Example: debug.")


class VolumeMount(Model, preserve=True):
    """Where a volume is mounted."""

    mount_path: str | None = Field(default=None, max_length=4096, description="Path in the container. Example: /data.")


class _ContainerFields(Model, preserve=True):
    """What containers of the template and of a pool's patch have in common."""

    name: str = Field(min_length=1, max_length=63, description="Name of the container. Example: trainer.")
    resources: ContainerResources | None = Field(
        default=None, description="Resources. The pool's resources take precedence in the training container."
    )
    restart_policy: str | None = Field(
        default=None, max_length=16, description="For init containers only: Always makes it a sidecar. Example: Always."
    )
    termination_message_path: str | None = Field(
        default=None,
        max_length=4096,
        description="File for the worker's final result, which the operator reads. Example: /dev/termination-log.",
    )


class Container(_ContainerFields, preserve=True):
    """A container as in a pod; all fields of Kubernetes are allowed."""

    env: tuple[EnvVar, ...] | None = Field(
        default=None, max_length=200, description="Environment variables. The operator adds its own."
    )
    ports: tuple[ContainerPort, ...] | None = Field(
        default=None, max_length=100, description="Ports. The operator adds the ports of the metrics."
    )
    volume_mounts: tuple[VolumeMount, ...] | None = Field(
        default=None, max_length=100, description="Volume mounts. The operator adds the plan and /dev/shm."
    )


class Volume(
    Model,
    preserve=True,
    rules=(
        SpecRule(
            cel=f"!(self.name in {sorted([keys.CONTAINER_PLAN_VOLUME, keys.CONTAINER_SHM_VOLUME])})",
            admits=lambda self: self.name not in (keys.CONTAINER_PLAN_VOLUME, keys.CONTAINER_SHM_VOLUME),
            message=f"the volume names {keys.CONTAINER_PLAN_VOLUME} and {keys.CONTAINER_SHM_VOLUME} belong to the "
            "operator: rename the volume",
        ),
    ),
):
    """A volume as in a pod; all fields of Kubernetes are allowed."""

    name: str = Field(min_length=1, max_length=63, description="Name of the volume. Example: data.")


class PodToleration(Model, preserve=True):
    """A toleration as in a pod."""

    key: str | None = Field(
        default=None,
        max_length=316,
        description="Key of the taint. Empty with operator Exists: all taints. Example: nvidia.com/gpu.",
    )


REPLACED_BY_US = "leave spec.template.spec.restartPolicy out: the operator replaces workers itself"
SCHEDULED_BY_POOL = (
    "leave spec.template.spec.nodeName out: choose nodes by nodeSelector in spec.workerPools, because a full node "
    "rejects a worker that bypasses the scheduler"
)
LIMITED_BY_JOB = (
    "leave spec.template.spec.activeDeadlineSeconds out: limit the job by spec.activeDeadlineSeconds, because the "
    "operator replaces workers that end one by one"
)


_POD_RULES = (
    SpecRule(
        cel="!has(self.restartPolicy) || self.restartPolicy == 'Never'",
        admits=lambda self: self.restart_policy in (None, "Never"),
        message=REPLACED_BY_US,
    ),
    SpecRule(
        cel="!has(self.nodeName) || self.nodeName == ''",
        admits=lambda self: not self.node_name,
        message=SCHEDULED_BY_POOL,
    ),
    SpecRule(
        cel="!has(self.activeDeadlineSeconds)",
        admits=lambda self: self.active_deadline_seconds is None,
        message=LIMITED_BY_JOB,
    ),
)


class _PodFields(Model, preserve=True):
    """What the specification of a pod and that of a pool's patch have in common."""

    node_selector: dict[str, LabelValue] | None = Field(
        default=None,
        max_length=32,
        description="Labels of the nodes, in addition to the pool's nodeSelector, which takes precedence. "
        "Example: {zone: a}.",
    )
    tolerations: tuple[PodToleration, ...] | None = Field(
        default=None,
        max_length=64,
        description="Tolerations, in addition to the pool's. A pool's template replaces them.",
    )
    overhead: dict[str, Quantity] | None = Field(
        default=None, max_length=32, description="Additional resources of the runtime class. Example: {memory: 64Mi}."
    )
    termination_grace_period_seconds: int | None = Field(
        default=None, ge=1, le=86_400, description="Seconds between SIGTERM and SIGKILL. Unset: 30. Example: 60."
    )
    restart_policy: str | None = Field(
        default=None, max_length=16, description="Leave it out: the operator replaces workers. Example: Never."
    )
    node_name: str | None = Field(
        default=None, max_length=253, description="Leave it out: the scheduler places workers."
    )
    active_deadline_seconds: int | None = Field(
        default=None, description="Leave it out: use spec.activeDeadlineSeconds."
    )
    host_network: bool | None = Field(
        default=None,
        description="true: the workers use the node's network, as some drivers of RDMA need. Their ports are then the "
        "node's.",
    )


class PodSpec(_PodFields, preserve=True, rules=_POD_RULES):
    """Specification of the pod; all fields of Kubernetes are allowed and kept."""

    containers: tuple[Container, ...] = Field(
        min_length=1,
        max_length=10,
        description="Containers. The first one runs the training, unless the annotation "
        "kubectl.kubernetes.io/default-container names another.",
        json_schema_extra=MapList("name"),
    )
    init_containers: tuple[Container, ...] | None = Field(
        default=None,
        max_length=10,
        description="Containers that run before the others.",
        json_schema_extra=MapList("name"),
    )
    volumes: tuple[Volume, ...] | None = Field(
        default=None,
        max_length=64,
        description="Volumes. The operator adds the plan and, unless a volume is mounted there, /dev/shm.",
        json_schema_extra=MapList("name"),
    )


class TemplateMetadata(Model):
    """Labels and annotations of the workers, in addition to the operator's."""

    creation_timestamp: str | None = Field(
        default=None,
        max_length=64,
        description="Leave it out. It is accepted because programs that generate manifests write null here.",
    )
    labels: dict[str, LabelValue] = Field(
        default_factory=dict, max_length=64, description="Labels. Example: {team: vision}."
    )
    annotations: dict[str, Annotated[str, Field(max_length=65_536)]] = Field(
        default_factory=dict, max_length=64, description="Annotations. Example: {example.com/owner: vision}."
    )


class PodTemplate(Model):
    """Template of the workers' pods."""

    metadata: TemplateMetadata = Field(
        default_factory=TemplateMetadata, description="Labels and annotations of the pods."
    )
    spec: PodSpec = Field(
        description="Specification of the pod. After a change, pods that never ran are made again at once. Running "
        "workers keep theirs until `heterotrain restart`; the condition TemplateApplied names them."
    )


class ContainerPatch(_ContainerFields, preserve=True):
    """Changes of a container, or another container; all fields of Kubernetes are allowed."""

    env: tuple[EnvVar, ...] | None = Field(
        default=None, max_length=32, description="Environment variables; one of the same name is replaced."
    )
    ports: tuple[ContainerPort, ...] | None = Field(default=None, max_length=32, description="Ports, merged by number.")
    volume_mounts: tuple[VolumeMount, ...] | None = Field(
        default=None, max_length=32, description="Volume mounts; one at the same path is replaced."
    )


class PodSpecPatch(_PodFields, preserve=True, rules=_POD_RULES):
    """Changes of the pod's specification; all fields of Kubernetes are allowed."""

    containers: tuple[ContainerPatch, ...] | None = Field(
        default=None,
        max_length=4,
        description="Containers, merged by name. Example: [{name: trainer, image: my/training:rocm}].",
        json_schema_extra=MapList("name"),
    )
    init_containers: tuple[ContainerPatch, ...] | None = Field(
        default=None,
        max_length=4,
        description="Init containers, merged by name.",
        json_schema_extra=MapList("name"),
    )
    volumes: tuple[Volume, ...] | None = Field(
        default=None,
        max_length=16,
        description="Volumes; one of the same name is replaced.",
        json_schema_extra=MapList("name"),
    )


class PodTemplatePatch(Model):
    """What is different in the pods of one pool."""

    metadata: TemplateMetadata = Field(
        default_factory=TemplateMetadata, description="Labels and annotations, in addition to the template's."
    )
    spec: PodSpecPatch = Field(
        default_factory=PodSpecPatch,
        description="Changes of spec.template.spec: objects are merged, and containers by their names. Volumes, "
        "variables and mounts replace those of the same name or path; other lists replace those of the template.",
    )
