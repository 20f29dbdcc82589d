"""The Helm chart: its rendered objects and refused values. Needs helm on the PATH or in the local cluster's cache."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from heterotrain_core.contract import keys
from heterotrain_operator.api.admission import read_new_job
from heterotrain_operator.api.types import MAX_NUM_PROC_PER_WORKER
from heterotrain_operator.cli import check as checks
from support import pod_security
from support.helm import CHART, EVERYTHING, helm, of_kind, render

pytestmark = pytest.mark.needs_program("helm")


def test_the_chart_passes_helm_lint_with_everything_on_and_off() -> None:
    for values in ((), EVERYTHING):
        settings = [part for value in values for part in ("--set", value)]
        done = helm("lint", str(CHART), "--strict", "--kube-version", "1.36.0", *settings)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_operator_runs_without_privileges() -> None:
    (deployment,) = of_kind(render(), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"requests", "limits"} <= set(container["resources"])


@pytest.mark.parametrize("values", [(), EVERYTHING])
def test_all_pods_fit_restricted_pod_security_and_openshift(values: tuple[str, ...]) -> None:
    """Without a fixed uid: OpenShift refuses one outside the namespace's range. The image names a numeric user."""
    objects = render(*values)
    (deployment,) = of_kind(objects, "Deployment")
    (test,) = of_kind(objects, "Pod")
    assert pod_security.problems(deployment["spec"]["template"]["spec"]) == []
    assert pod_security.problems(test["spec"]) == []
    dockerfile = (CHART.parents[1] / "operator/Dockerfile").read_text()
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", dockerfile, re.MULTILINE)


WRITES = {"create", "update", "patch", "delete"}
WRITTEN_OTHERWISE = {
    *("tokenreviews", "subjectaccessreviews"),
    *("heterotrainjobs", "heterotrainjobs/status", "heterotrainjobs/finalizers", "leases"),
}
"""Questions to the API server, the jobs themselves, and the Lease in the operator's own namespace by its name."""


@pytest.mark.parametrize("values", [(), ("watchNamespaces={team-a,team-b}",), ("serviceAccount.name=other",)])
def test_the_policies_cover_everything_that_the_operator_may_write(values: tuple[str, ...]) -> None:
    """A right without a policy would reach objects of others."""
    objects = render(*values)
    account = of_kind(objects, "Deployment")[0]["spec"]["template"]["spec"]["serviceAccountName"]
    covered: set[tuple[str, str]] = set()
    for policy in of_kind(objects, "ValidatingAdmissionPolicy"):
        spec = policy["spec"]
        assert spec["failurePolicy"] == "Fail"
        if not policy["metadata"]["name"].endswith("-authors"):
            (condition,) = spec["matchConditions"]
            assert (
                condition["expression"] == f"request.userInfo.username == 'system:serviceaccount:operators:{account}'"
            )
            covered |= {
                (group, resource)
                for rule in spec["matchConstraints"]["resourceRules"]
                for group in rule["apiGroups"]
                for resource in rule["resources"]
            }
    bound = {
        each["roleRef"]["name"] for kind in ("RoleBinding", "ClusterRoleBinding") for each in of_kind(objects, kind)
    }
    written = {
        (group, resource)
        for kind in ("Role", "ClusterRole")
        for role in of_kind(objects, kind)
        if role["metadata"]["name"] in bound
        for rule in role["rules"]
        if WRITES & set(rule["verbs"])
        for group in rule.get("apiGroups", ())
        for resource in rule.get("resources", ())
        if resource not in WRITTEN_OTHERWISE
    }
    assert written <= covered
    policies = {each["metadata"]["name"] for each in of_kind(objects, "ValidatingAdmissionPolicy")}
    bindings = of_kind(objects, "ValidatingAdmissionPolicyBinding")
    assert {each["spec"]["policyName"] for each in bindings} == policies
    assert all(each["spec"]["validationActions"] == ["Deny"] for each in bindings)


def test_the_author_of_a_job_needs_the_right_to_create_pods() -> None:
    (policy,) = [
        p for p in of_kind(render(), "ValidatingAdmissionPolicy") if p["metadata"]["name"].endswith("-authors")
    ]
    (rule,) = policy["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["heterotrainjobs"], ["CREATE", "UPDATE"])
    (validation,) = policy["spec"]["validations"]
    assert "resource('pods').namespace(request.namespace).check('create')" in validation["expression"]
    (condition,) = policy["spec"]["matchConditions"]
    assert "object.?spec.?template != oldObject.?spec.?template" in condition["expression"]
    assert "q.template == p.template" in condition["expression"], "a pool's template makes pods, too"
    assert of_kind(render("admissionPolicies.enabled=false"), "ValidatingAdmissionPolicy") == []


def test_secured_metrics_are_scraped_with_a_token_over_tls() -> None:
    objects = render(*EVERYTHING)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    (service,) = of_kind(objects, "Service")
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == f"{service['metadata']['name']}.operators.svc"
    assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": "ca", "key": "ca.crt"}}
    assert endpoint["bearerTokenFile"]
    readers = [role for role in of_kind(objects, "ClusterRole") if role["metadata"]["name"].endswith("metrics-reader")]
    assert [role["rules"] for role in readers] == [[{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]]
    (plain,) = of_kind(render("monitoring.serviceMonitor.enabled=true"), "ServiceMonitor")
    assert plain["spec"]["endpoints"] == [{"port": "metrics", "interval": "15s"}]


def test_several_namespaces_have_a_role_each_and_no_other_right_to_write() -> None:
    objects = render("watchNamespaces={team-a,team-b}", *EVERYTHING)
    roles = {role["metadata"].get("namespace"): role for role in of_kind(objects, "Role")}
    assert roles.keys() == {"operators", "team-a", "team-b"}  # the first one is for the Lease
    assert roles["team-a"]["rules"] == roles["team-b"]["rules"]
    (deployment,) = of_kind(objects, "Deployment")
    environment = {e["name"]: e.get("value") for e in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["HETEROTRAIN_OPERATOR_WATCH_NAMESPACES"] == "team-a,team-b"
    (monitor,) = of_kind(objects, "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


@pytest.mark.parametrize("value", ["watchNamespaces=team", "watchNamespaces={Team}", "watchNamespace=team"])
def test_wrong_namespaces_are_refused(value: str) -> None:
    assert helm("template", "r", str(CHART), "--kube-version", "1.36.0", "--set", value).returncode != 0


def test_no_right_is_a_wildcard() -> None:
    objects = render(*EVERYTHING)
    rules = [rule for kind in ("Role", "ClusterRole") for role in of_kind(objects, kind) for rule in role["rules"]]
    assert len(rules) > 5
    assert [rule for rule in rules if "*" in [each for part in rule.values() for each in part]] == []


def test_a_single_namespace_needs_no_cluster_wide_right_to_write() -> None:
    roles = of_kind(render("watchNamespaces={team}"), "ClusterRole")
    (bound,) = of_kind(render("watchNamespaces={team}"), "ClusterRoleBinding")
    (role,) = [role for role in roles if role["metadata"]["name"] == bound["roleRef"]["name"]]
    verbs = {verb for rule in role["rules"] for verb in rule["verbs"]}
    assert verbs <= {"get", "list", "watch"}


def names(objects: list[dict[str, Any]], namespace: str) -> set[tuple[str, str, str]]:
    """Return kind, namespace and name of every object; cluster-wide ones have an empty namespace."""
    wide = {
        "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition",
        "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding",
    }  # fmt: skip
    return {
        (each["kind"], "" if each["kind"] in wide else meta.get("namespace", namespace), meta["name"])
        for each in objects
        for meta in (each["metadata"],)
    }


@pytest.mark.parametrize(
    ("release", "namespace"),
    [("heterotrain", "ops-b"), ("team-b", "ops-a"), ("heterotrain-b", "ops-a"), ("team-b", "ops-b")],
)
def test_two_releases_share_only_the_definition_of_the_jobs(release: str, namespace: str) -> None:
    """Each watches its own namespace; they differ in name, in namespace, or in both."""
    one = names(render("watchNamespaces={team-a}", *EVERYTHING, release="heterotrain", namespace="ops-a"), "ops-a")
    two = names(render("watchNamespaces={team-b}", *EVERYTHING, release=release, namespace=namespace), namespace)
    assert one & two == {("CustomResourceDefinition", "", "heterotrainjobs.heterotrain.dev")}


def test_releases_in_one_namespace_have_leases_of_their_own() -> None:
    """With one Lease for both, the second operator would never act; neither may change that of another component."""

    def lease(release: str) -> str:
        objects = render(release=release)
        (deployment,) = of_kind(objects, "Deployment")
        environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
        name = next(each["value"] for each in environment if each["name"] == "HETEROTRAIN_OPERATOR_LEASE_NAME")
        rules = [rule for kind in ("Role", "ClusterRole") for role in of_kind(objects, kind) for rule in role["rules"]]
        of_leases = [rule for rule in rules if "leases" in rule.get("resources", ())]
        assert of_leases
        assert all(rule["verbs"] == ["create"] or rule["resourceNames"] == [name] for rule in of_leases)
        return str(name)

    assert lease("heterotrain") == "heterotrain-operator"
    assert lease("team-b") == "team-b-heterotrain-operator"


@pytest.mark.parametrize("release", ["a" * 53, f"heterotrain-{'b' * 41}"])
def test_the_longest_name_of_a_release_fits(release: str) -> None:
    (service,) = of_kind(render(release=release), "Service")
    assert len(service["metadata"]["name"]) <= 63


def test_every_bound_role_exists() -> None:
    for values in ((), ("watchNamespaces={team}",)):
        objects = render(*values)
        roles = {(each["kind"], each["metadata"]["name"]) for each in objects if each["kind"].endswith("Role")}
        bound = [each["roleRef"] for each in objects if each["kind"].endswith("RoleBinding")]
        assert len(bound) == 3
        assert {(each["kind"], each["name"]) for each in bound} <= roles


def test_uninstalling_keeps_the_crd_unless_configured_otherwise() -> None:
    (kept,) = of_kind(render(), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    (removed,) = of_kind(render("crds.keep=false"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in (removed["metadata"].get("annotations") or {})
    assert of_kind(render("crds.enabled=false"), "CustomResourceDefinition") == []


def test_one_replica_is_recreated_and_two_take_over_by_lease() -> None:
    def strategy(*values: str) -> str:
        (deployment,) = of_kind(render(*values), "Deployment")
        return str(deployment["spec"]["strategy"]["type"])

    assert strategy() == "Recreate"
    assert strategy("replicas=2") == "RollingUpdate"
    assert strategy("replicas=2", "strategy.type=Recreate") == "Recreate"


def test_without_roles_of_the_chart_nothing_is_bound() -> None:
    objects = render(*EVERYTHING, "rbac.create=false")
    assert [each for each in objects if each["kind"].endswith("Binding") and "Admission" not in each["kind"]] == []
    assert of_kind(objects, "Role") == []
    assert {each["metadata"]["name"].rpartition("operators-")[2] for each in of_kind(objects, "ClusterRole")} == {
        *("job-viewer", "job-editor", "metrics-reader"),
    }


def test_prometheus_credentials_reach_the_operator() -> None:
    (deployment,) = of_kind(render(*EVERYTHING), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    names = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert names["HETEROTRAIN_OPERATOR_PROMETHEUS_AUTH_DIR"] == "/etc/heterotrain/prometheus-auth"
    assert names["HETEROTRAIN_OPERATOR_PROMETHEUS_CA_FILE"] == "/etc/heterotrain/prometheus-ca/ca.crt"
    assert {volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume} == {
        "secret",
        "ca",
        "tls",
    }


def test_the_pod_of_helm_test_pulls_runs_and_reads_prometheus_as_the_operator_does() -> None:
    values = (*EVERYTHING, "imagePullSecrets[0].name=registry", "tolerations[0].key=system", "nodeSelector.a=b")
    objects = render(*values, "operator.extraEnv[0].name=HTTPS_PROXY", "operator.extraEnv[0].value=http://proxy")
    (test,) = of_kind(objects, "Pod")
    (deployment,) = of_kind(objects, "Deployment")
    operator, (check,) = deployment["spec"]["template"]["spec"], test["spec"]["containers"]
    for field in ("imagePullSecrets", "tolerations", "nodeSelector", "serviceAccountName", "securityContext"):
        assert test["spec"][field] == operator[field], field
    mounts = {each["mountPath"]: each["name"] for each in check["volumeMounts"]}
    volumes = {each["name"]: each["secret"]["secretName"] for each in test["spec"]["volumes"]}
    assert {path: volumes[name] for path, name in mounts.items()} == {
        "/etc/heterotrain/prometheus-auth": "secret",
        "/etc/heterotrain/prometheus-ca": "ca",
    }
    of_operator = {each["name"]: each for each in operator["containers"][0]["env"]}
    given = {each["name"]: each for each in check["env"]}
    assert {name for name in of_operator if "PROMETHEUS" in name} - given.keys() == {
        "HETEROTRAIN_OPERATOR_PROMETHEUS_POLL_SECONDS",
        "HETEROTRAIN_OPERATOR_PROMETHEUS_STALE_SECONDS",
    }
    assert {name: of_operator[name] for name in given} == given
    assert given.keys() - {option.envvar for option in checks.params} == {"HTTPS_PROXY"}  # type: ignore[attr-defined]  # click's own


def test_a_pod_of_helm_test_without_secrets_has_no_volumes() -> None:
    (test,) = of_kind(render(), "Pod")
    assert "volumes" not in test["spec"]
    assert "volumeMounts" not in test["spec"]["containers"][0]


def test_every_rank_of_a_pod_is_scraped() -> None:
    (monitor,) = of_kind(render("monitoring.podMonitor.enabled=true"), "PodMonitor")
    ports = [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]]
    assert ports == [f"{keys.METRICS_PORT_NAME_PREFIX}{rank}" for rank in range(MAX_NUM_PROC_PER_WORKER)]


@pytest.mark.parametrize(
    ("url", "port"), [("https://metrics.example:8428/select", 8428), ("", None), ("http://[::1]:9090", None)]
)
def test_the_network_policy_allows_prometheus_on_any_port(url: str, port: int | None) -> None:
    (policy,) = of_kind(render("networkPolicy.enabled=true", f"prometheus.url={url}"), "NetworkPolicy")
    ports = [each["port"] for each in policy["spec"]["egress"][1]["ports"]]
    assert ports == [443, 6443, 9090, 80, *([port] if port else [])]


def test_the_pod_of_helm_test_has_the_operator_s_volumes_and_security_context() -> None:
    values = (
        "extraVolumes[0].name=v", "extraVolumes[0].configMap.name=ca", "extraVolumeMounts[0].name=v",
        "extraVolumeMounts[0].mountPath=/v", "podSecurityContext.runAsUser=1234", "prometheus.auth.secretName=secret",
    )  # fmt: skip
    objects = render(*values)
    (test,) = of_kind(objects, "Pod")
    (deployment,) = of_kind(objects, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert test["spec"]["securityContext"] == pod["securityContext"]
    assert test["spec"]["securityContext"]["runAsUser"] == 1234
    for name in ("v", "prometheus-auth"):
        assert [v for v in test["spec"]["volumes"] if v["name"] == name] == [
            v for v in pod["volumes"] if v["name"] == name
        ]
    assert {"name": "v", "mountPath": "/v"} in test["spec"]["containers"][0]["volumeMounts"]


def test_the_metadata_for_artifact_hub_are_true() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    about = {name.partition("/")[2]: text for name, text in chart["annotations"].items()}
    (image,) = yaml.safe_load(about["images"])
    (deployment,) = of_kind(render(), "Deployment")
    assert image["image"] == deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    (known,) = yaml.safe_load(about["crds"])
    (crd,) = of_kind(render(), "CustomResourceDefinition")
    assert (known["name"], known["kind"]) == (crd["metadata"]["name"], crd["spec"]["names"]["kind"])
    assert known["version"] in [version["name"] for version in crd["spec"]["versions"]]
    (example,) = yaml.safe_load(about["crdsExamples"])
    read_new_job(example)
    assert all({"kind", "description"} <= change.keys() for change in yaml.safe_load(about["changes"]))
