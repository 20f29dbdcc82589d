"""Builders for the operator's tests: a job, its pods, nodes and plans, with defaults for all that a test leaves out."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import replace
from typing import Any

from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Cause, Ending, Outcome, encode_outcome
from heterotrain_operator.api.status import as_body
from heterotrain_operator.cluster_state.node_changes import NodeChanges
from heterotrain_operator.cluster_state.parse import parse_job, parse_node, parse_plan_object, parse_pod, rfc3339
from heterotrain_operator.cluster_state.quantity import added
from heterotrain_operator.cluster_state.store import NodeKind, Sequence
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobView, NodeView, PlanObject, PodView, ValidJob
from heterotrain_operator.decide.decision import Decision
from heterotrain_operator.decide.grant import UNLIMITED
from heterotrain_operator.decide.inputs import JobInputs
from heterotrain_operator.decide.job import decide
from heterotrain_operator.decide.learn.job_model import JobModel, learn
from heterotrain_operator.decide.lifecycle import Acceptance
from heterotrain_operator.decide.plan.plan import read_plan
from heterotrain_operator.decide.plan.stages import CoverOf
from heterotrain_operator.decide.workers.capacity import free_slots
from heterotrain_operator.engine.layout_planner import solve
from heterotrain_planner.layout.problem import Problem
from heterotrain_planner.layout.result import Cover, NoLayout

from support.plans import complete

NOW_S = 1_800_000_000.0
JOB_UID = "job-uid"
Body = dict[str, Any]
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pool(name: str, **fields: Any) -> Body:
    """Return a worker pool of one-core workers on the nodes of its name."""
    defaults: Body = {"name": name, "nodeSelector": {"pool": name}, "resources": {"limits": {"cpu": "1"}}}
    return {**defaults, **fields}


def job_body(*pools: Body, spec: Body | None = None, template: Body | None = None, **metadata: Any) -> Body:
    """Return a job as the API server returns it; by default with three pools of one worker each."""
    given = spec or {}
    own_batch = "adaptiveBatch" in given.get("training", {}) or given.get("runtime") == "Torchrun"
    batch = {} if own_batch else {"globalBatchSize": 100}
    return {
        "apiVersion": f"{keys.GROUP}/{keys.VERSION}",
        "kind": keys.KIND,
        "metadata": {
            "name": "job",
            "namespace": "ns",
            "uid": JOB_UID,
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": rfc3339(NOW_S),
            **metadata,
        },
        "spec": {
            "training": {**batch, **given.get("training", {})},
            "workerPools": list(pools) or [pool("a"), pool("b"), pool("c", capacityType="Spot")],
            "template": template
            or {"spec": {"containers": [{"name": "main", "image": "image", "command": ["train"]}]}},
            **{name: value for name, value in given.items() if name != "training"},
        },
    }


def node_body(
    name: str, pool_name: str, *, ready: str = "True", taints: AbstractSequence[str] = (), cpu: str = "4", **spec: Any
) -> Body:
    """Return a node; taints are written ``key:effect``."""
    return {
        "metadata": {"name": name, "resourceVersion": "1", "labels": {"pool": pool_name}},
        "spec": {"taints": [dict(zip(("key", "effect"), taint.split(":"), strict=True)) for taint in taints], **spec},
        "status": {
            "allocatable": {"cpu": cpu, "memory": "8Gi", "pods": "10"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def remembering_planner() -> CoverOf:
    """Return a layout planner that answers at once, and the same question only once."""
    known: dict[str, Cover | NoLayout] = {}

    def cover_of(problem: Problem) -> Cover | NoLayout:
        key = repr(problem)
        if key not in known:
            known[key] = solve(None, problem)[1]
        return known[key]

    return cover_of


class FakeCluster:
    """A cluster in memory with one job: it carries decisions out like the API server and the kubelets.

    Decisions change API bodies, and the next pass parses these bodies. So each test makes the same round trip as in a
    real cluster.
    """

    def __init__(self, *pools: Body, spec: Body | None = None, template: Body | None = None) -> None:
        self.now_s = NOW_S
        self.job = job_body(*pools, spec=spec, template=template)
        self.nodes: dict[str, Body] = {}
        self.pods: dict[str, Body] = {}
        self.plan: Body | None = None
        self.telemetry = Telemetry()
        self.acceptance = Acceptance(known=True)
        self.refusal = ""
        self.may_create = True
        """Whether the API server takes pods; ``refusal`` says why not."""
        self.blocked = ""
        self.grant = UNLIMITED
        self.model = JobModel()
        self.learns = True
        """Whether passes find what the telemetry of now shows; otherwise what was learned before."""
        self.cover_of: CoverOf = remembering_planner()
        self.foreign: dict[str, dict[str, float]] = {}
        self.moved_tags: dict[str, str] = {}
        self.deleted_job = False
        self.events: list[str] = []
        self.node_kind = NodeKind(Sequence(), NodeChanges())
        self._version = 1
        self._job_read: tuple[str, JobView | None] = ("", None)
        self._plan_read: tuple[str, PlanObject | None] = ("", None)
        self._pods_read: dict[str, PodView | None] = {}

    def with_nodes(self, *names: str, **fields: Any) -> FakeCluster:
        """Add a node of each pool; ``a2`` is a second node of pool ``a``."""
        for name in names:
            self.nodes[name] = node_body(name, name.rstrip("0123456789"), **fields)
        return self

    # --- views ---

    @property
    def job_view(self) -> JobView:
        """The job; as in the operator, an unchanged spec is not checked again."""
        text = json.dumps([self.job.get("spec"), self.job["metadata"]])
        known = self._job_read[1] if self._job_read[0] == text else None
        view = parse_job(self.job, known)
        self._job_read = (text, view)
        return view

    @property
    def pod_views(self) -> tuple[PodView, ...]:
        """The job's pods; an unchanged one is not read again."""
        known, self._pods_read = self._pods_read, {}
        for body in self.pods.values():
            text = json.dumps(body)
            self._pods_read[text] = known[text] if text in known else parse_pod(body)
        views = self._pods_read.values()
        return tuple(sorted((view for view in views if view is not None), key=lambda view: view.index))

    @property
    def node_views(self) -> dict[str, NodeView]:
        """The nodes as the operator's store has them."""
        self._version += 1
        for name in [name for name in self.node_kind.all() if name not in self.nodes]:
            self.node_kind.discard(name)
        for body in self.nodes.values():
            body["metadata"]["resourceVersion"] = str(self._version)
            self.node_kind.put(parse_node(body))
        return dict(self.node_kind.all())

    @property
    def plan_view(self) -> PlanObject | None:
        """The plan's ConfigMap; as in the operator, an unchanged one is not decoded again."""
        text = json.dumps(self.plan)
        if text != self._plan_read[0]:
            self._plan_read = (text, parse_plan_object(self.plan) if self.plan else None)
        return self._plan_read[1]

    @property
    def plan_json(self) -> Body:
        assert self.plan is not None
        return complete(self.plan["data"][keys.PLAN_KEY])

    @property
    def status(self) -> Body:
        found: Body = self.job.get("status") or {}
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition."""
        return next((c["status"], c["reason"]) for c in self.status["conditions"] if c["type"] == kind)

    def message(self, kind: str) -> str:
        """Return the message of a condition."""
        return next(str(c["message"]) for c in self.status["conditions"] if c["type"] == kind)

    def used(self) -> Mapping[str, Mapping[str, float]]:
        """Return what pods on each node request."""
        own: dict[str, dict[str, float]] = copy.deepcopy(self.foreign)
        for view in self.pod_views:
            if view.node and not view.phase_ended:
                own[view.node] = added([own.get(view.node, {}), view.requests])
        return own

    def learn(self) -> None:
        """Learn from the present telemetry, as the operator does next to the passes."""
        if isinstance(job := self.job_view, ValidJob):
            self.model = learn(job, read_plan(job, self.plan_view).plan, self.telemetry, self.model)

    def observe(self) -> JobInputs:
        """Return the inputs of the next pass."""
        if self.learns:
            self.learn()
        nodes = self.node_views
        return JobInputs(
            job=self.job_view,
            pods=self.pod_views,
            nodes=nodes,
            slots_of=lambda shape: free_slots(shape, nodes.values(), self.used()),
            used=self.used,
            plan=self.plan_view,
            telemetry=self.telemetry,
            model=self.model,
            acceptance=self.acceptance,
            refusal=self.refusal,
            blocked=self.blocked,
            keep_pods=not self.may_create,
            gather_s=5.0,
            now_s=self.now_s,
            grant=self.grant,
            cover_of=self.cover_of,
        )

    # --- the operator ---

    def step(self) -> Decision:
        """Make one pass: decide once and carry the decision out."""
        decision = decide(self.observe())
        self._act(decision)
        return decision

    def settle(self, *, rounds: int = 10) -> Decision:
        """Make passes until nothing changes; fail after too many rounds."""
        for _ in range(rounds):
            before = self._everything()
            decision = self.step()
            if self._everything() == before:
                return decision
        raise AssertionError(f"the job still changes after {rounds} rounds")

    def _act(self, decision: Decision) -> None:
        if decision.plan is not None:
            assert decision.plan["metadata"].get("resourceVersion") == (
                self.plan["metadata"]["resourceVersion"] if self.plan else None
            )
            self.plan = copy.deepcopy(decision.plan)
            self.plan["metadata"]["resourceVersion"] = self._next()
        for pod in decision.touch:
            self.pods[pod.name]["metadata"]["annotations"][keys.ANNOTATION_PLAN] = decision.plan_version
        for body in decision.create:
            name = body["metadata"]["name"]
            assert name not in self.pods, f"{name} exists"
            created = copy.deepcopy(body)
            uid = f"uid-{name}-{self._next()}"
            created["metadata"] |= {
                "uid": uid,
                "resourceVersion": self._next(),
                "creationTimestamp": rfc3339(self.now_s),
            }
            created["status"] = {"phase": "Pending"}
            self.pods[name] = created
        if decision.status is not None:
            self.job["status"] = json.loads(json.dumps(as_body(decision.status)))
        for pod in decision.remove:
            body = self.pods[pod.name]
            if body["spec"].get("nodeName") and body["status"]["phase"] == "Running":
                body["metadata"]["deletionTimestamp"] = rfc3339(self.now_s)
            else:
                del self.pods[pod.name]
        self.deleted_job = self.deleted_job or decision.delete_job
        self.events += [*(["WorkersCreated"] if decision.create else []), *(e.reason for e in decision.events)]

    def _everything(self) -> str:
        return json.dumps([self.job, self.pods, self.plan], sort_keys=True)

    def _next(self) -> str:
        self._version += 1
        return str(self._version)

    # --- the cluster ---

    def schedule(self) -> FakeCluster:
        """Bind every pod that fits a node of its pool; mark the others as unschedulable.

        Pods with claims of devices get none: there are no devices here, and only the scheduler knows that.
        """
        for body in self.pods.values():
            if body["spec"].get("nodeName") or body["status"]["phase"] != "Pending":
                continue
            view = parse_pod(body)
            assert view is not None
            used = self.used()
            for node in self.node_views.values():
                taken = used.get(node.name, {})
                terms = (((body["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED) or {}).get(
                    "nodeSelectorTerms"
                ) or [{}]
                allowed = any(
                    all(node.name not in field["values"] for field in term.get("matchFields", ())) for term in terms
                )
                fits = allowed and all(
                    node.allocatable.get(r, 0) - taken.get(r, 0) >= n for r, n in view.requests.items()
                )
                fits = fits and not body["spec"].get("resourceClaims")
                open_ = not node.cordoned and node.readiness == "True" and not node.taints
                if fits and open_ and all(node.labels.get(k) == v for k, v in body["spec"]["nodeSelector"].items()):
                    body["spec"]["nodeName"] = node.name
                    body["status"].pop("conditions", None)
                    break
            else:
                refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
                if body["spec"].get("resourceClaims"):
                    refused["message"] = "0/3 nodes are available: 3 cannot allocate all claims."
                body["status"].setdefault("conditions", [{**refused, "lastTransitionTime": rfc3339(self.now_s)}])
        return self

    def run(self, *names: str, ready: bool = True) -> FakeCluster:
        """Start the containers of bound pods: all, or those named."""
        for name, body in self.pods.items():
            if (
                (names and name not in names)
                or not body["spec"].get("nodeName")
                or body["status"]["phase"] != "Pending"
            ):
                continue
            self.set_ready(name, ready=ready)
        return self

    def set_ready(self, name: str, *, ready: bool = True) -> FakeCluster:
        """Start a pod, ready or not."""
        self.pods[name]["status"] = {
            "phase": "Running",
            "podIP": f"10.0.0.{sum(name.encode()) % 250}",
            "conditions": [
                {"type": "Ready", "status": str(ready), "lastTransitionTime": rfc3339(self.now_s)},
            ],
            "containerStatuses": [{"name": "main", "state": {"running": {}}, "imageID": self._image_of(name)}],
        }
        return self

    def _image_of(self, name: str) -> str:
        """Return the image that a pod runs: the one that its tag names now, by ``moved_tags``."""
        image = self.pods[name]["spec"]["containers"][0].get("image", "")
        image = self.moved_tags.get(image, image)
        return f"registry/image@sha256:{hashlib.sha256(image.encode()).hexdigest()}"

    def start(self) -> FakeCluster:
        """Bring the job from no workers to all workers training."""
        self.settle()
        self.schedule().run()
        self.settle()
        return self

    def end(
        self,
        name: str,
        ending: Ending | None = None,
        *,
        exit_code: int = 0,
        reason: str = "",
        pod_reason: str = "",
        told: bool = False,
        cause: Cause | None = None,
        saved: tuple[int, float] | None = None,
    ) -> FakeCluster:
        """End a pod's container, with an outcome or without; ``saved`` are step and time of its newest checkpoint."""
        message = ""
        if ending:
            step, time_s = saved or (None, None)
            outcome = Outcome(
                ending=ending, reason=reason, epoch=1, step=2, told=told, cause=cause,
                checkpoint_step=step, checkpoint_time_s=time_s,
            )  # fmt: skip
            message = encode_outcome(outcome)
        terminated = {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", "message": message}
        terminated |= {"finishedAt": rfc3339(self.now_s)}
        if not ending and reason:
            terminated["reason"] = reason
        status = self.pods[name]["status"]
        status["phase"] = "Failed" if exit_code else "Succeeded"
        status["containerStatuses"] = [{"name": "main", "state": {"terminated": terminated}}]
        status["conditions"] = [c for c in status.get("conditions", []) if c["type"] != "Ready"]
        if pod_reason:
            status["reason"] = pod_reason
        return self

    def vanish(self, name: str) -> FakeCluster:
        """Remove a pod from the API."""
        del self.pods[name]
        return self

    def taint(self, node: str, taint: str) -> FakeCluster:
        """Taint a node with ``key:effect``."""
        self.nodes[node]["spec"]["taints"].append(dict(zip(("key", "effect"), taint.split(":"), strict=True)))
        return self

    def set_node(self, node: str, ready: str) -> FakeCluster:
        """Set a node's condition Ready."""
        self.nodes[node]["status"]["conditions"] = [{"type": "Ready", "status": ready}]
        return self

    def pass_time(self, seconds: float) -> FakeCluster:
        """Let time pass."""
        self.now_s += seconds
        return self

    def edit(self, change: Callable[[Body], None]) -> FakeCluster:
        """Change the spec as a user would."""
        change(self.job["spec"])
        self.job["metadata"]["generation"] += 1
        return self

    def members(self) -> list[str]:
        """Return the names of the pods that the plan names."""
        return list(dict.fromkeys(rank["worker"] for rank in self.plan_json["ranks"]))

    def version(self) -> tuple[int, int]:
        """Return the plan's generation and revision."""
        return self.plan_json["generation"], self.plan_json["revision"]


def without_times(decision: Decision) -> Decision:
    """Return a decision without the fields that change by time alone."""
    return replace(decision, again_s=None)


def a_running_job(**spec: object) -> FakeCluster:
    return FakeCluster(spec=dict(spec)).with_nodes("a", "b", "c").start()
