"""A worker's pod: the user's complete template, the pool's nodes and resources, and the additions of the contract."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from heterotrain_core.contract import env, keys
from heterotrain_core.contract.config import decode_config
from heterotrain_operator.cluster_state.parse import parse_job, parse_pod
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.objects import build_network_policy
from heterotrain_operator.decide.objects.pods import (
    build_pod,
    num_proc_per_worker,
    template_problem,
)
from support import pod_security
from support.fake_cluster import Body, job_body, pool


def a_template(**spec: Any) -> Body:
    return {"spec": {"containers": [{"name": "main", "image": "image"}], **spec}}


def built(template: Body | None = None, pool_body: Body | None = None, **spec: Any) -> Body:
    job = parse_job(job_body(pool_body or pool("a"), template=template, spec=spec))
    assert job.spec is not None, job.problem
    return build_pod(job, job.spec.worker_pools[0], 3, plan_version="2.7")


def main_of(pod: Body) -> Body:
    found: Body = pod["spec"]["containers"][0]
    return found


def test_labels_annotations_and_owner_identify_the_job() -> None:
    template = a_template() | {"metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}}}
    metadata = built(template, pool("a", capacityType="Spot"))["metadata"]
    assert metadata["name"] == "job-w3"
    assert (
        metadata["labels"]
        | {
            "team": "x",
            keys.LABEL_JOB: "job",
            keys.LABEL_POOL: "a",
            keys.LABEL_WORKER_INDEX: "3",
            keys.LABEL_CAPACITY_TYPE: "Spot",
            keys.LABEL_MANAGED_BY: keys.MANAGED_BY,
        }
        == metadata["labels"]
    )
    assert metadata["annotations"]["note"] == "y"
    assert metadata["annotations"][keys.ANNOTATION_PLAN] == "2.7"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (keys.KIND, "job-uid", True)


def test_the_operator_s_labels_override_those_of_the_template() -> None:
    template = a_template() | {"metadata": {"labels": {keys.LABEL_JOB: "other"}}}
    assert built(template)["metadata"]["labels"][keys.LABEL_JOB] == "job"


def test_the_pool_s_nodes_tolerations_and_resources_are_merged_into_the_template_s() -> None:
    template = a_template(
        nodeSelector={"zone": "z", "pool": "other"}, tolerations=[{"key": "mine", "operator": "Exists"}]
    )
    template["spec"]["containers"][0]["resources"] = {
        "limits": {"cpu": "9", "memory": "1Gi"},
        "claims": [{"name": "c"}],
    }
    body = pool(
        "a",
        nodeSelector={"pool": "a"},
        tolerations=[{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        resources={"limits": {"cpu": "2", "nvidia.com/gpu": 1}},
    )
    pod = built(template, body)
    assert pod["spec"]["nodeSelector"] == {"zone": "z", "pool": "a"}
    assert [each["key"] for each in pod["spec"]["tolerations"]] == [
        "mine",
        "gpu",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]
    assert main_of(pod)["resources"] == {
        "limits": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": 1},
        "claims": [{"name": "c"}],
    }


def test_the_user_s_toleration_of_unreachable_nodes_stays() -> None:
    mine = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "tolerationSeconds": 600}
    tolerations = built(a_template(tolerations=[mine]))["spec"]["tolerations"]
    assert [each for each in tolerations if each["key"] == mine["key"]] == [mine]


def test_the_user_s_environment_comes_after_the_operator_s() -> None:
    template = a_template()
    template["spec"]["containers"][0]["env"] = [{"name": "A", "value": "$(HETEROTRAIN_JOB_NAME)"}]
    entries = main_of(built(template))["env"]
    assert entries[-1] == {"name": "A", "value": "$(HETEROTRAIN_JOB_NAME)"}
    names = [entry["name"] for entry in entries]
    defined = {value for value in vars(env).values() if isinstance(value, str) and value.startswith(env.PREFIX)}
    set_elsewhere = {env.PREFIX, env.SECRET, env.LOCAL_RANK, env.RUNTIME, env.PRICES, *env.USER_SETTABLE}
    assert defined - set_elsewhere == {name for name in names if name.startswith(env.PREFIX)}
    assert len(names) == len(set(names))


def test_workers_get_the_prices_of_all_pools() -> None:
    pools = [pool("a", pricePerHour="3.67"), pool("b", pricePerHour="0.30"), pool("c")]
    assert json.loads(values_of(built(workerPools=pools))[env.PRICES]) == {"a": "3.67", "b": "0.30"}
    assert env.PRICES not in values_of(built())


def test_the_fixed_configuration_comes_from_the_spec() -> None:
    pod = built(
        a_template(terminationGracePeriodSeconds=90),
        training={
            "globalBatchSize": 100,
            "epochs": 7,
            "seed": 3,
            "precision": "BF16",
            "learningRateWarmupSamples": 4000,
            "onNonFinite": "Skip",
            "onDivergence": "Resync",
            "communication": {"backend": "Gloo", "compression": "FP16"},
        },
        elasticPolicy={"minReplicas": 1, "peerTimeoutSeconds": 10},
        checkpoint={"uri": "file:///x", "intervalSeconds": 120, "maxToKeep": 5},
    )
    value = next(entry["value"] for entry in main_of(pod)["env"] if entry["name"] == env.CONFIG)
    config = decode_config(value)
    assert (config.epochs, config.seed, config.precision, config.base_batch_samples) == (7, 3, "BF16", 100)
    assert config.learning_rate_warmup_samples == 4000
    assert (config.on_non_finite, config.on_divergence) == ("Skip", "Resync")
    assert (config.backend, config.compression) == ("Gloo", "FP16")
    assert (config.checkpoint_uri, config.checkpoint_interval_s, config.checkpoint_max_to_keep) == (
        "file:///x",
        120.0,
        5,
    )
    assert (config.grace_s, config.peer_timeout_s) == (90, 10.0)


def test_a_folder_for_the_plan_and_memory_for_shm() -> None:
    pod = built()
    mounts = {each["mountPath"]: each["name"] for each in main_of(pod)["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    plan, secret = volumes[mounts[env.DEFAULT_PLAN_DIR]]["projected"]["sources"]
    assert plan == {"configMap": {"name": "job-plan"}}
    assert secret == {"secret": {"name": "job-secret", "items": [{"key": "key", "path": "key"}]}}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    assert all("subPath" not in each for each in main_of(pod)["volumeMounts"]), "a subPath is never refreshed"


def test_the_user_s_own_shm_mount_stays() -> None:
    template = a_template(volumes=[{"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}])
    template["spec"]["containers"][0]["volumeMounts"] = [{"name": "mine", "mountPath": "/dev/shm"}]
    pod = built(template)
    assert [each["name"] for each in pod["spec"]["volumes"]] == ["mine", keys.CONTAINER_PLAN_VOLUME]


def test_the_annotated_container_trains_and_sidecars_are_left_alone() -> None:
    side = {"name": "side", "image": "side", "env": [{"name": "B", "value": "c"}]}
    template = {
        "metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "main"}},
        "spec": {"containers": [side, {"name": "main", "image": "image"}]},
    }
    first, second = built(template)["spec"]["containers"]
    assert first == {**side, "terminationMessagePolicy": "FallbackToLogsOnError"}
    assert second["readinessProbe"]["httpGet"]["path"] == keys.READY_PATH


def test_each_rank_has_a_named_port() -> None:
    pod = built(pool_body=pool("a", numProcPerWorker=3))
    ports = {each["name"]: each["containerPort"] for each in main_of(pod)["ports"]}
    assert ports == {"ht-metrics-0": 9400, "ht-metrics-1": 9401, "ht-metrics-2": 9402}
    value = next(entry["value"] for entry in main_of(pod)["env"] if entry["name"] == env.NUM_PROC_PER_WORKER)
    assert value == "3"


@pytest.mark.parametrize(
    ("limits", "ranks"),
    [
        ({"nvidia.com/gpu": 4}, 4),
        ({"amd.com/gpu": "2", "cpu": "8"}, 2),
        ({"cpu": "8", "memory": "1Gi"}, 1),
        ({"hugepages-2Mi": "4Mi", "example.kubernetes.io/thing": 3}, 1),
        ({"example.com/accelerator": 2, "cpu": "8"}, 2),
        ({"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 4, "rdma/hca": 1}, 8),
        ({"nvidia.com/mig-1g.5gb": 2, "nvidia.com/mig-2g.10gb": 1}, 3),
        ({"nvidia.com/gpu": "1000000000"}, 16),
        ({"nvidia.com/gpu": "9e99"}, 16),
    ],
)
def test_ranks_are_the_accelerators_unless_declared(limits: Body, ranks: int) -> None:
    job = parse_job(job_body(pool("a", resources={"limits": limits})))
    assert job.spec is not None
    assert num_proc_per_worker(job.spec.worker_pools[0], job.template) == ranks


def test_building_a_pod_leaves_the_template_as_it_was() -> None:
    body = job_body(pool("a"), template=a_template(tolerations=[{"key": "mine"}]))
    before = copy.deepcopy(body)
    job = parse_job(body)
    assert job.spec is not None
    build_pod(job, job.spec.worker_pools[0], 0, plan_version="")
    assert body == before


PROBLEMS: dict[str, tuple[Body, str]] = {
    "no container": ({"spec": {"containers": []}}, "containers is empty"),
    "restart policy": (a_template(restartPolicy="OnFailure"), "leave spec.template.spec.restartPolicy out"),
    "unknown main container": (
        a_template() | {"metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "x"}}},
        "names 'x', but the containers are ['main']",
    ),
    "readiness probe": (
        {"spec": {"containers": [{"name": "main", "readinessProbe": {}}]}},
        "container main has a readinessProbe",
    ),
    "port name": (
        {"spec": {"containers": [{"name": "main", "ports": [{"name": "ht-metrics-0"}]}]}},
        "the port name ht-metrics-0 belongs to the operator",
    ),
    "a quantity that is none": (
        {"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": True}}}]}},
        "spec.template requests resources that cannot be read: True is not a quantity",
    ),
    "a node of its own": (a_template(nodeName="n"), "nodeName out: choose nodes by nodeSelector"),
    "a limit of its own": (a_template(activeDeadlineSeconds=5), "limit the job by spec.activeDeadlineSeconds"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_unusable_templates(case: str) -> None:
    template, sentence = PROBLEMS[case]
    assert sentence in template_problem(template)


def test_a_good_template_has_no_problem() -> None:
    assert template_problem(a_template(restartPolicy="Never")) == ""


def test_too_many_accelerators_are_reported_and_never_started() -> None:
    body = pool("a", resources={"limits": {"nvidia.com/gpu": "1000000000"}})
    job = parse_job(job_body(body))
    assert job.spec is not None
    problem = template_problem(job.template, job.spec.worker_pools)
    assert problem.startswith("a worker of pool a requests 1000000000 accelerators, but runs at most 16 ranks: lower")
    assert len(main_of(built(pool_body=body))["ports"]) == 16
    declared = parse_job(job_body({**body, "numProcPerWorker": 2}))
    assert declared.spec is not None
    assert template_problem(declared.template, declared.spec.worker_pools) == ""


def spoiled(**main: Any) -> Body:
    return {"spec": {"containers": [{"name": "main", "image": "image", **main}]}}


MISSHAPEN: dict[str, Body] = {
    "node selector": a_template(nodeSelector="gpu=a100"),
    "tolerations": a_template(tolerations={"key": "gpu"}),
    "toleration": a_template(tolerations=["gpu"]),
    "volumes": a_template(volumes={"name": "data"}),
    "grace period": a_template(terminationGracePeriodSeconds="half a minute"),
    "no grace period": a_template(terminationGracePeriodSeconds=0),
    "init containers": a_template(initContainers=[{"image": "image"}]),
    "overhead": a_template(overhead={"cpu": "much"}),
    "containers": {"spec": {"containers": {"name": "main"}}},
    "resources": spoiled(resources="2 GPUs"),
    "limits": spoiled(resources={"limits": ["nvidia.com/gpu"]}),
    "amount": spoiled(resources={"limits": {"nvidia.com/gpu": "two"}}),
    "infinite amount": spoiled(resources={"limits": {"cpu": "1e400"}}),
    "amount of many digits": spoiled(resources={"limits": {"cpu": "9" * 400}}),
    "negative amount": spoiled(resources={"requests": {"cpu": -1}}),
    "ports": spoiled(ports="8080"),
    "port": spoiled(ports=[8080]),
    "mounts": spoiled(volumeMounts="/data"),
    "environment": spoiled(env={"A": "b"}),
    "labels": a_template() | {"metadata": {"labels": ["a"]}},
    "no spec": {"metadata": {}},
    "a text": "the template",  # type: ignore[dict-item]  # that is the mistake
}


@pytest.mark.parametrize("case", MISSHAPEN)
def test_a_malformed_template_is_a_problem_of_its_job_not_an_exception(case: str) -> None:
    job = parse_job(job_body(template=MISSHAPEN[case]))
    assert job.spec is None
    assert job.problem.startswith("spec.template")


def test_a_pod_is_plain_json() -> None:
    assert json.loads(json.dumps(built())) == built()


def test_a_worker_of_a_restricted_template_stays_within_restricted_pod_security() -> None:
    """What the operator adds needs no privilege: neither under the restricted standard nor under OpenShift."""
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    template = {
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "main", "image": "image", "securityContext": own}],
        }
    }
    job = parse_job(job_body(template=template))
    assert isinstance(job, ValidJob)
    pod = build_pod(job, job.spec.worker_pools[0], 0, plan_version="", avoid=("n",))
    assert pod_security.problems(pod["spec"]) == []


def with_network(template: Body | None = None, **network: Any) -> Body:
    return built(template, network=network)


def values_of(pod: Body) -> dict[str, Any]:
    return {each["name"]: each.get("value") or each["valueFrom"]["fieldRef"] for each in main_of(pod)["env"]}


def test_a_policy_with_egress_lets_workers_reach_each_other_dns_and_what_the_rules_name() -> None:
    job = parse_job(job_body(pool("a")))
    assert build_network_policy(job)["spec"]["policyTypes"] == ["Ingress"]
    store = {"ports": [{"port": 443, "protocol": "TCP"}]}
    spec = build_network_policy(job, [store])["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    peers, dns, further = spec["egress"]
    assert peers == {"to": [{"podSelector": spec["podSelector"]}]}
    assert {(each["protocol"], each["port"]) for each in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert further == store


def test_ports_are_those_of_the_job_everywhere() -> None:
    """Environment, container ports, probe, NetworkPolicy, and the plan's port by way of the pod."""
    network = {"metricsPort": 9500, "peerPort": 20000}
    job = parse_job(job_body(pool("a", numProcPerWorker=2), spec={"network": network}))
    assert isinstance(job, ValidJob)
    pod = build_pod(job, job.spec.worker_pools[0], 0, plan_version="1.1")
    found = values_of(pod)
    assert (found[env.METRICS_PORT], found[env.PEER_PORT]) == ("9500", "20000")
    assert [port["containerPort"] for port in main_of(pod)["ports"]] == [9500, 9501]
    assert main_of(pod)["readinessProbe"]["httpGet"]["port"] == 9500
    assert build_network_policy(job)["spec"]["ingress"][1]["ports"] == [
        {"protocol": "TCP", "port": 9500, "endPort": 9515}
    ]
    view = parse_pod(as_stored(pod))
    assert view is not None
    assert view.peer_port == 20000


def as_stored(pod: Body, **status: Any) -> Body:
    """Return a pod as the API server stores it."""
    return {**pod, "metadata": {**pod["metadata"], "uid": "u", "resourceVersion": "1"}, "status": status}


def test_a_pod_of_a_job_without_ports_of_its_own_is_as_before() -> None:
    """Jobs that an older operator began have such pods; the port is read as the default one."""
    pod = built()
    assert keys.ANNOTATION_PEER_PORT not in pod["metadata"]["annotations"]
    assert values_of(pod)[env.WORKER_ADDRESS] == {"fieldPath": "status.podIP"}
    for text in ("x", "99999", "²", "1" * 5000):
        pod["metadata"]["annotations"][keys.ANNOTATION_PEER_PORT] = text
        view = parse_pod(as_stored(pod))
        assert view is not None
        assert view.peer_port == keys.PEER_PORT


def test_on_the_node_s_network_the_scheduler_knows_all_ports() -> None:
    """The API server makes them the node's ports; the scheduler then keeps two jobs with the same port apart."""
    ports = main_of(with_network(a_template(hostNetwork=True), peerPort=20000))["ports"]
    assert [(port["name"], port["containerPort"]) for port in ports] == [("ht-metrics-0", 9400), ("ht-peer-0", 20000)]


def test_on_the_node_s_network_workers_find_services_of_the_cluster() -> None:
    """By default such a pod asks the node's DNS; a policy of the user's own stays."""
    assert with_network(a_template(hostNetwork=True))["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert with_network(a_template(hostNetwork=True, dnsPolicy="Default"))["spec"]["dnsPolicy"] == "Default"
    assert "dnsPolicy" not in with_network(a_template())["spec"]


def test_rdma_devices_of_a_pool_reach_its_pods_and_are_no_ranks() -> None:
    """The devices, the capability to lock memory, and NCCL's variables, beside GPUs that make the ranks."""
    rdma = {
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "resources": {"limits": {"nvidia.com/gpu": 2, "rdma/hca": 1}},
        "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
    }
    main = main_of(built(pool_body=pool("a", template={"spec": {"containers": [{"name": "main", **rdma}]}})))
    assert main["resources"]["limits"] == {"cpu": "1", "nvidia.com/gpu": 2, "rdma/hca": 1}
    assert main["securityContext"] == rdma["securityContext"]
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in main["env"]
    assert len(main["ports"]) == 2


@pytest.mark.parametrize(
    ("port", "sentence"),
    [
        ({"containerPort": 9415}, "container proxy uses port 9415, and workers use 9400 to 9415: give it another port"),
        ({"containerPort": 29599}, "or change spec.network.peerPort"),
        ({"containerPort": 9416}, ""),
        ({"containerPort": 9400, "protocol": "UDP"}, ""),
    ],
)
def test_ports_of_other_containers_may_not_be_those_of_the_workers(port: Body, sentence: str) -> None:
    """All containers of a pod share its ports. The training container may name the workers' own."""
    main = {"name": "main", "image": "image", "ports": [{"containerPort": 9400}]}
    found = template_problem({"spec": {"containers": [main, {"name": "proxy", "ports": [port]}]}})
    assert sentence in found
    assert bool(found) is bool(sentence)
