"""Parse API objects (plain JSON) into views."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import LATEST_S

from heterotrain_operator.api.network import MOST_PORT
from heterotrain_operator.api.reading import SpecError, read_spec
from heterotrain_operator.api.status import read_status
from heterotrain_operator.api.types import MAX_NUM_PROC_PER_WORKER
from heterotrain_operator.cluster_state.announcements import announcement_of
from heterotrain_operator.cluster_state.containers import PodContainers
from heterotrain_operator.cluster_state.quantity import MORE_REQUESTS, more_requests, pod_requests, quantities
from heterotrain_operator.cluster_state.views import (
    Departed,
    Ended,
    JobKey,
    JobView,
    NodeReadiness,
    NodeView,
    PlanObject,
    PodView,
    Taint,
    ValidJob,
    packed,
)
from heterotrain_operator.cluster_state.worker_defaults import WorkerDefaults

_REQUEST_CHARS = 16
NO_DEFAULTS = WorkerDefaults()
RANKS_ANNOTATION = f"{keys.GROUP}/ranks"
AVOIDS_ANNOTATION = f"{keys.GROUP}/avoids"
"""Nodes that the operator has excluded for a pod, because they were held down; separated by commas."""
TEMPLATE_ANNOTATION = f"{keys.GROUP}/template"
"""Digest of what the user wrote about the pod when it was made."""
RESTART_ANNOTATION = f"{keys.GROUP}/restarted-for"
"""The job's request for a restart when the pod was made."""
_PROJECTS, _NOTED_CHARACTERS = ".x-k8s.io/", 256
"""Part of the labels and annotations of Kubernetes' projects, which plugins read, and how much of their values."""
MOST_PLAN_CHARACTERS = 1_000_000
"""The API server takes 1 MiB in a ConfigMap, so no longer plan is written or read: 1,700 ranks fit, or up to 4,800 with
short names and no measurements."""

MOST_GATES = 8
MOST_CONDITIONS = 32
MOST_AVOIDS = 5000
"""Characters of the annotation with the nodes that a pod excludes."""

# Reasons in a pod's status, by the kubelet or the garbage collector, for a pod that is lost with its node.
_LOST_WITH_NODE = frozenset({"Terminated", "NodeShutdown", "NodeAffinity", "NodeLost", "Preempting", "Shutdown"})


EVICTED = "Evicted"


def seconds(text: str | None) -> float:
    """Return a Kubernetes time as seconds since the epoch; 0 when there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def rfc3339(time_s: float) -> str:
    """Return seconds since the epoch as a Kubernetes time, in whole seconds; times beyond its years are clamped."""
    return datetime.fromtimestamp(int(max(0.0, min(time_s, LATEST_S))), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(time_s: float) -> str:
    """Return seconds since the epoch as a Kubernetes MicroTime."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def key_of(body: Mapping[str, Any]) -> JobKey:
    """Return the key of a job's own object."""
    return JobKey(body["metadata"]["namespace"], body["metadata"]["name"])


def owner_key(body: Mapping[str, Any]) -> JobKey | None:
    """Return the job that an object belongs to by its label; ``None`` without the label."""
    metadata = body["metadata"]
    job = (metadata.get("labels") or {}).get(keys.LABEL_JOB)
    return JobKey(metadata["namespace"], job) if job else None


def controller_uid(body: Mapping[str, Any]) -> str:
    """Return the uid of the object that controls this one; empty without one."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((each["uid"] for each in owners if each.get("controller")), "")


def template_patches(spec: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the pools' template patches of a spec that was read."""
    return {pool["name"]: pool["template"] for pool in spec["workerPools"] if pool.get("template")}


def parse_job(body: Mapping[str, Any], known: JobView | None = None, defaults: WorkerDefaults = NO_DEFAULTS) -> JobView:
    """Return the view of a job; an invalid spec becomes its ``problem``.

    Args:
        body: the job.
        known: an earlier view of it. Its spec is taken over while the generation is the same, because checking a spec
            takes longer than everything else, and a job's status changes all the time.
        defaults: what its template gets besides.
    """
    metadata = body["metadata"]
    if known is not None and _has_spec_of(known, metadata):
        return replace(
            known,
            resource_version=metadata["resourceVersion"],
            deleting="deletionTimestamp" in metadata,
            labels=metadata.get("labels") or {},
            status=read_status(body),
            packed_status=packed(body.get("status") or {}),
            checkpoint_request=_request(metadata, keys.ANNOTATION_CHECKPOINT),
            restart_request=_request(metadata, keys.ANNOTATION_RESTART),
            retry_request=_request(metadata, keys.ANNOTATION_RETRY),
        )
    spec, problem = None, ""
    try:
        spec = read_spec(body)
    except SpecError as error:
        problem = str(error)
    kind: type[JobView] = JobView if spec is None else ValidJob
    return kind(
        key=key_of(body),
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        resource_version=metadata["resourceVersion"],
        created_s=seconds(metadata.get("creationTimestamp")),
        deleting="deletionTimestamp" in metadata,
        labels=metadata.get("labels") or {},
        spec=spec,
        problem=problem,
        template=defaults.in_template((body.get("spec") or {}).get("template") or {}),
        patches={} if spec is None else template_patches(body["spec"]),
        status=read_status(body),
        packed_status=packed(body.get("status") or {}),
        checkpoint_request=_request(metadata, keys.ANNOTATION_CHECKPOINT),
        restart_request=_request(metadata, keys.ANNOTATION_RESTART),
        retry_request=_request(metadata, keys.ANNOTATION_RETRY),
    )


def _has_spec_of(known: JobView, metadata: Mapping[str, Any]) -> bool:
    """Return whether a view has the same spec: the API server counts a generation for each change of it."""
    generation = metadata.get("generation", 0)
    return generation > 0 and (known.uid, known.generation) == (metadata["uid"], generation)


def _request(metadata: Mapping[str, Any], annotation: str) -> str:
    """Return a short text for an annotation's value, whatever it is; empty without one."""
    value = (metadata.get("annotations") or {}).get(annotation)
    return hashlib.sha256(value.encode()).hexdigest()[:_REQUEST_CHARS] if value else ""


def parse_pod(body: Mapping[str, Any]) -> PodView | None:
    """Return the view of a worker's pod; ``None`` for a pod of no job.

    A pod with a job's labels and no valid index is nobody's worker. It uses its node all the same.
    """
    metadata, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    key, index = owner_key(body), labels.get(keys.LABEL_WORKER_INDEX, "")
    if key is None:
        return None
    valid = index.isdecimal()
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    containers = PodContainers(body)
    waiting_reason, waiting_message = containers.why_waiting
    is_ready, since = containers.ready_since
    return PodView(
        key=key,
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        pool=labels.get(keys.LABEL_POOL, ""),
        index=int(index) if valid else -1,
        on_demand=labels.get(keys.LABEL_CAPACITY_TYPE) != keys.CAPACITY_SPOT,
        owner_uid=controller_uid(body) if valid else "",
        ranks=_ranks(annotations.get(RANKS_ANNOTATION, "")),
        phase=status.get("phase") or "Pending",
        node=spec.get("nodeName") or "",
        address=str(status.get("podIP") or ""),
        peer_port=_peer_port(annotations.get(keys.ANNOTATION_PEER_PORT, "")),
        created_s=seconds(metadata.get("creationTimestamp")),
        deleting="deletionTimestamp" in metadata,
        deletion_s=seconds(metadata.get("deletionTimestamp")),
        ready=is_ready,
        ready_since_s=seconds(since),
        gates=tuple(str(gate.get("name") or "") for gate in (spec.get("schedulingGates") or ())[:MOST_GATES]),
        template=annotations.get(TEMPLATE_ANNOTATION, "")[:_REQUEST_CHARS],
        restart=annotations.get(RESTART_ANNOTATION, "")[:_REQUEST_CHARS],
        main_started=containers.main.get("name") in containers.started,
        all_started=bool(containers.names) and containers.started >= containers.names,
        avoids=tuple(filter(None, annotations.get(AVOIDS_ANNOTATION, "")[:MOST_AVOIDS].split(","))),
        finalizers=tuple(metadata.get("finalizers") or ()),
        noted=_noted({**annotations, **labels}),
        creating=containers.creating,
        refused=": ".join(filter(None, (str(status.get("reason") or ""), str(status.get("message") or "")))),
        **_scheduling(conditions.get("PodScheduled") or {}),
        waiting_reason=waiting_reason,
        waiting_message=waiting_message,
        ended=_ended(containers.end),
        trouble_beside=containers.trouble_beside,
        disruption=_disruption(conditions, status),
        requests={**pod_requests(spec), **more_requests(annotations.get(MORE_REQUESTS, ""))},
        priority=int(spec.get("priority") or 0),
        plan_version=annotations.get(keys.ANNOTATION_PLAN, ""),
        fatal_probes=containers.fatal_probes,
        all_ended=containers.all_ended,
        image=str(containers.main.get("image") or ""),
        image_digest=containers.image_digest,
        conditions=_conditions(conditions) if status.get("phase") in ("Succeeded", "Failed") else (),
    )


def _scheduling(condition: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a pod's view that tell what the scheduler has said, by the condition ``PodScheduled``."""
    reason = condition.get("reason") if condition.get("status") == "False" else None
    since_s = seconds(condition.get("lastTransitionTime"))
    refused = reason == "Unschedulable"
    return {
        "gated": reason == "SchedulingGated",
        "unschedulable": condition.get("message") or reason if refused else "",
        "unschedulable_since_s": since_s if refused else 0.0,
        "scheduled_s": since_s if condition.get("status") == "True" else 0.0,
    }


def _noted(marks: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the labels and annotations of Kubernetes' projects (``*.x-k8s.io``), in order."""
    found = sorted((key, value[:_NOTED_CHARACTERS]) for key, value in marks.items() if _PROJECTS in key)
    return tuple(found)


def _peer_port(text: str) -> int:
    """Return the port in an annotation; the default one for an invalid one."""
    valid = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_PORT)) and int(text) <= MOST_PORT
    return int(text) if valid else keys.PEER_PORT


def _conditions(found: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return types and statuses of the first ``MOST_CONDITIONS`` conditions."""
    return tuple((name, str(each.get("status") or "")) for name, each in islice(found.items(), MOST_CONDITIONS))


def _ranks(text: str) -> int:
    """Return the number of ranks in an annotation; 1 for an invalid one."""
    return int(text) if len(text) <= len(str(MAX_NUM_PROC_PER_WORKER)) and text.isdecimal() and int(text) else 1


def parse_node(body: Mapping[str, Any], announcements: Collection[str] = ()) -> NodeView:
    """Return the view of a node.

    Args:
        body: the node.
        announcements: taint keys and types of conditions that announce its end, in addition to the known ones.
    """
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    ready = next((each["status"] for each in status.get("conditions") or () if each["type"] == "Ready"), "Unknown")
    return NodeView(
        name=metadata["name"],
        resource_version=metadata["resourceVersion"],
        labels=dict(metadata.get("labels") or {}),
        taints=tuple(
            Taint(key=each["key"], value=each.get("value") or "", effect=each.get("effect") or "")
            for each in spec.get("taints") or ()
        ),
        allocatable=quantities(status.get("allocatable")),
        readiness=NodeReadiness(ready),
        cordoned=bool(spec.get("unschedulable")),
        announced=announcement_of(body, announcements),
    )


def parse_plan_object(body: Mapping[str, Any]) -> PlanObject | None:
    """Return the view of a plan's ConfigMap; ``None`` for any other ConfigMap."""
    key = owner_key(body)
    if key is None or body["metadata"]["name"] != keys.plan_name(key.name):
        return None
    text = (body.get("data") or {}).get(keys.PLAN_KEY, "")
    return PlanObject(
        key=key,
        owner_uid=controller_uid(body),
        resource_version=body["metadata"]["resourceVersion"],
        text=text if len(text) <= MOST_PLAN_CHARACTERS else "",
        departed=_departed(body),
    )


def _departed(body: Mapping[str, Any]) -> tuple[Departed, ...]:
    """Return the members in the annotation; none from an invalid one."""
    text = (body["metadata"].get("annotations") or {}).get(keys.ANNOTATION_DEPARTED, "[]")
    try:
        return tuple(Departed(str(uid), str(name), str(pool)) for uid, name, pool in json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return ()


def _ended(found: tuple[str, Mapping[str, Any]] | None) -> Ended | None:
    if found is None:
        return None
    init_container, state = found
    return Ended(
        exit_code=state.get("exitCode", -1),
        reason=state.get("reason") or "",
        message=state.get("message") or "",
        finished_s=seconds(state.get("finishedAt")),
        init_container=init_container,
    )


def _disruption(conditions: Mapping[str, Mapping[str, Any]], status: Mapping[str, Any]) -> str:
    target = conditions.get("DisruptionTarget") or {}
    if target.get("status") == "True":
        return str(target.get("reason") or "DisruptionTarget")
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    # An eviction for the node's sake says so; any other one is for the pod's own limits, without DisruptionTarget.
    return reason if reason in _LOST_WITH_NODE or (reason == EVICTED and message.startswith("The node ")) else ""
