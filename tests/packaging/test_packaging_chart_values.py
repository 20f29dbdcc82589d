"""The Helm chart's values: each changes what is rendered, and wrong ones are refused. Needs helm."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from heterotrain_operator.cluster_state.worker_defaults import worker_defaults
from heterotrain_operator.settings import egress_rules, namespace_weights
from support.helm import CHART, EVERYTHING, HELM, helm, of_kind, render

pytestmark = pytest.mark.needs_program("helm")


def test_common_labels_and_annotations_are_on_every_object_and_on_the_pod() -> None:
    objects = render(*EVERYTHING, "commonLabels.team=ml", "commonAnnotations.owner=ml-platform")
    (deployment,) = of_kind(objects, "Deployment")
    metadata = [each["metadata"] for each in (*objects, deployment["spec"]["template"])]
    assert [each["name"] for each in metadata if each["labels"].get("team") != "ml"] == []
    assert [each["name"] for each in metadata if each["annotations"].get("owner") != "ml-platform"] == []


def test_annotations_and_labels_of_one_object_win_over_common_ones_but_not_over_the_charts_own() -> None:
    common = ("commonAnnotations.a=common", "commonLabels.l=common")
    for kind, value in (("ServiceAccount", "serviceAccount"), ("Service", "service")):
        own = (f"{value}.annotations.a=own", f"{value}.labels.m=own", f"{value}.labels.app\\.kubernetes\\.io/name=own")
        (found,) = of_kind(render(*common, *own), kind)
        assert found["metadata"]["annotations"] == {"a": "own"}
        labels = found["metadata"]["labels"]
        assert (labels["l"], labels["m"]) == ("common", "own")
        assert labels["app.kubernetes.io/name"] == "heterotrain-operator"
    (deployment,) = of_kind(render(*common, "deploymentAnnotations.a=own", "podAnnotations.a=pod"), "Deployment")
    assert deployment["metadata"]["annotations"] == {"a": "own"}
    assert deployment["spec"]["template"]["metadata"]["annotations"] == {"a": "pod"}
    (test,) = of_kind(render("commonAnnotations.helm\\.sh/hook=post-install"), "Pod")
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("team-b", ("nameOverride=trainer",), "team-b-trainer-operator"),
        ("trainer", ("nameOverride=trainer",), "trainer-operator"),
        ("team-b", ("nameOverride=trainer", "fullnameOverride=full"), "full-operator"),
        ("a" * 53, (f"nameOverride={'n' * 30}",), f"{'a' * 23}-{'n' * 30}-operator"),
    ],
)
def test_names_are_overridden_and_labels_stay(release: str, values: tuple[str, ...], name: str) -> None:
    """By these labels, releases find each other and the Service its pods."""
    objects = render(*EVERYTHING, *values, release=release)
    (deployment,) = of_kind(objects, "Deployment")
    assert deployment["metadata"]["name"] == name
    assert len(name) <= 63
    assert deployment["metadata"]["labels"]["app.kubernetes.io/name"] == "heterotrain-operator"
    own = [each["metadata"]["name"] for each in objects if each["kind"] != "CustomResourceDefinition"]
    assert [each for each in own if not each.startswith(name.removesuffix("-operator"))] == []


def test_more_objects_are_rendered_as_mappings_or_templates() -> None:
    text = "apiVersion: v1\nkind: Secret\nmetadata: {name: of-{{ .Release.Name }}}"
    document = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "at-{{ .Release.Namespace }}"}}
    assert HELM is not None
    command = [HELM, "template", "rel", str(CHART), "-n", "ops", "--kube-version", "1.36.0", "--values", "-"]
    values = yaml.safe_dump({"extraObjects": [document, text]})
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=True)
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    assert [each["metadata"]["name"] for each in of_kind(objects, "Secret")] == ["at-ops", "of-rel"]


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ((), {"maxUnavailable": 1}),
        (("podDisruptionBudget.maxUnavailable=50%",), {"maxUnavailable": "50%"}),
        (("podDisruptionBudget.minAvailable=0",), {"minAvailable": 0}),
    ],
)
def test_a_disruption_budget_has_exactly_one_limit(values: tuple[str, ...], limits: dict[str, Any]) -> None:
    (budget,) = of_kind(render("podDisruptionBudget.enabled=true", *values), "PodDisruptionBudget")
    assert {name: value for name, value in budget["spec"].items() if name.endswith("vailable")} == limits


@pytest.mark.parametrize(
    "value",
    [
        *("nameOverride=Name", "commonAnnotations.a=1", "strategy.type=Rolling", "extraObjects[0].kind=Secret"),
        *("dnsPolicy=None_", "hostAliases[0].hostnames={a}", "podDisruptionBudget.minAvailable=half"),
        *("service.type=NodePort", "rbac.enabled=true", "namespaceWeights.Team=2", "global.imageRegistry=a/"),
        *("monitoring.podMonitor.interval=0s", "image.repository=mirror:5000/team/operator:v1"),
        *("monitoring.podMonitor.scrapeTimeout=0s", "monitoring.podMonitor.scrapeTimeout=10s"),
        *("monitoring.serviceMonitor.scrapeTimeout=1m", "monitoring.serviceMonitor.relabelings[0].targetlabel=a"),
        *("jobs.networkPolicy=false", "jobs.egress.rules[0].port=443", "jobs.egress.rules[0].ports[0].protocol=HTTP"),
        *("jobs.defaults.env[0].name=A", "jobs.defaults.labels.heterotrain\\.dev/job=a", "jobs.defaults.labels.a b=c"),
        *("operator.leaseSeconds=1", "jobs.default.labels.a=b"),
        *("monitoring.podMonitor.relabelings[0].action=kep", "monitoring.prometheusRule.namespace=Monitoring"),
        *("podDisruptionBudget.minAvailable=100%", "podDisruptionBudget.maxUnavailable=0"),
    ],
)
def test_wrong_values_are_refused(value: str) -> None:
    everything = [part for each in (*EVERYTHING, value) for part in ("--set", each)]
    done = helm("template", "r", str(CHART), "--kube-version", "1.36.0", *everything)
    assert done.returncode != 0
    assert value.partition("[")[0].partition("=")[0].partition(".")[0] in done.stderr


def test_global_values_of_an_umbrella_chart_are_used_where_the_chart_has_none() -> None:
    settings = ("global.imageRegistry=mirror.example/hub", "global.priorityClassName=high", "global.other=1")
    secrets = ("global.imagePullSecrets[0].name=one", "global.imagePullSecrets[1]=two", "imagePullSecrets[0].name=own")
    objects = render(*settings, *secrets, "image.repository=team/operator", "image.tag=v1")
    pods = [each["spec"]["template"]["spec"] for each in of_kind(objects, "Deployment")]
    pods += [each["spec"] for each in of_kind(objects, "Pod")]
    for pod in pods:
        assert [each["name"] for each in pod["imagePullSecrets"]] == ["own", "one", "two"]
        assert {each["image"] for each in pod["containers"]} == {"mirror.example/hub/team/operator:v1"}
    assert pods[0]["priorityClassName"] == "high"
    (deployment,) = of_kind(render("global.imageRegistry=a", "image.registry=b"), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].startswith("b/")


def test_every_object_of_a_namespace_names_it() -> None:
    """Rendered manifests are applied by tools that know nothing of the release's namespace."""
    wide = ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "ValidatingAdmissionPolicy",
            "ValidatingAdmissionPolicyBinding")  # fmt: skip
    for each in render(*EVERYTHING):
        assert ("namespace" in each["metadata"]) is (each["kind"] not in wide), each["kind"]


def test_monitors_and_rules_may_be_in_another_namespace_and_have_rules_of_the_user() -> None:
    rule = "relabelings[0].targetLabel=cluster", "relabelings[0].replacement=one", "scrapeTimeout=2s", "namespace=mon"
    own = [f"monitoring.{kind}.{each}" for kind in ("podMonitor", "serviceMonitor") for each in rule]
    objects = render(*EVERYTHING, "monitoring.prometheusRule.namespace=mon", *own)
    (pods,), (service,), (rules,) = (of_kind(objects, k) for k in ("PodMonitor", "ServiceMonitor", "PrometheusRule"))
    assert {each["metadata"]["namespace"] for each in (pods, service, rules)} == {"mon"}
    assert service["spec"]["namespaceSelector"] == {"matchNames": ["operators"]}
    for endpoint in (*pods["spec"]["podMetricsEndpoints"], *service["spec"]["endpoints"]):
        assert endpoint["relabelings"][-1] == {"targetLabel": "cluster", "replacement": "one"}
        assert endpoint["scrapeTimeout"] == "2s"


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


SAMPLES: dict[str, Any] = {
    "pullPolicy": "Always",
    "digest": f"sha256:{0:064}",
    "logLevel": "debug",
    "url": "https://metrics.example:8428/select",
    "interval": "7s",
    "watchNamespaces": ["other"],
    "imagePullSecrets": [{"name": "s"}],
    "extraEnv": [{"name": "A", "value": "b"}],
    "namespaceWeights": {"team-a": 3},
    "nodeAnnouncements": ["example.com/retiring"],
    "tolerations": [{"key": "x"}],
    "extraArgs": ["--workers=3"],
    "runbookUrl": "https://docs.example/operations",
    "affinity": {"nodeAffinity": {"a": "b"}},
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "extraVolumes": [{"name": "v", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    "memory": "777Mi",
    "cpu": "777m",
    "drop": ["NET_RAW"],
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more"}}],
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}},
    "dnsPolicy": "Default",
    "dnsConfig": {"nameservers": ["10.0.0.10"]},
    "hostAliases": [{"ip": "10.1.2.3", "hostnames": ["prometheus.example.com"]}],
    "minAvailable": "50%",
    "scrapeTimeout": "3s",
    "rules": [{"ports": [{"port": 443}]}],
    "env": [{"name": "A", "value": "b"}],
    "relabelings": [{"targetLabel": "cluster", "replacement": "one"}],
    "metricRelabelings": [{"regex": "le", "action": "labeldrop"}],
}


def another(name: str, value: Any) -> Any:
    """Return a value of the same type other than the default."""
    if name in SAMPLES:
        return SAMPLES[name]
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case dict():
            return {"a": "b"}
        case _:
            return "other"


def test_every_value_changes_the_rendered_objects() -> None:
    """A value without any effect would be a broken promise."""
    everything: dict[str, Any] = {}
    for setting in EVERYTHING:
        put(everything, tuple(setting.partition("=")[0].split(".")), yaml.safe_load(setting.partition("=")[2]))
    before = rendered_with(everything)
    for path, default in leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        values = copy.deepcopy(everything)
        known: Any = everything
        for name in path:
            known = known.get(name, default) if isinstance(known, dict) else default
        put(values, path, another(path[-1], known))
        if path == ("serviceAccount", "create"):
            put(values, ("serviceAccount", "name"), "other")
        if path == ("jobs", "networkPolicy"):
            put(values, ("jobs", "egress", "enabled"), False)
        assert rendered_with(values) != before, path


def test_a_limit_of_memory_may_be_a_number() -> None:
    """A file gives Helm a float, whose text has an exponent."""
    rendered = rendered_with(
        {"monitoring": {"prometheusRule": {"enabled": True}}, "resources": {"limits": {"memory": 1000000000}}}
    )
    assert "> 0.8 * 1000000000 and" in rendered


def put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def rendered_with(values: dict[str, Any]) -> str:
    assert HELM is not None
    command = [HELM, "template", "release", str(CHART), "--kube-version", "1.36.0", "--values", "-"]
    return subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("seconds", ["0.5", "2", "1.5"])
def test_a_fraction_of_a_second_may_be_set_on_the_command_line(seconds: str) -> None:
    """Helm's option --set makes a string of 0.5."""
    (deployment,) = of_kind(render(f"prometheus.pollSeconds={seconds}"), "Deployment")
    given = {each["name"]: each.get("value") for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert given["HETEROTRAIN_OPERATOR_PROMETHEUS_POLL_SECONDS"] == seconds


def test_weights_of_namespaces_reach_the_operator() -> None:
    (deployment,) = of_kind(render("namespaceWeights.team-b=0.5,namespaceWeights.team-a=3"), "Deployment")
    given = {each["name"]: each.get("value") for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert namespace_weights(given["HETEROTRAIN_OPERATOR_NAMESPACE_WEIGHTS"]) == {"team-a": 3.0, "team-b": 0.5}


@pytest.mark.parametrize(
    "value",
    [
        "namespaceWeights.team-a=0",
        "namespaceWeights.team-a=-1",
        "nodeAnnouncements[0]=a b",
        "nodeAnnouncements[0]=Ready",
        "prometheus.url=prometheus:9090",
        "replicas=-1",
        "operator.workers=0",
        "image.digest=latest",
        "no.such.value=1",
        "prometheus.pollSeconds=0.1",
        "prometheus.staleSeconds=0",
        "resources.limit.memory=1Gi",
        "resources.limits.memory=lots",
        "tolerations[0].operater=Exists",
        "affinity.nodeAffinty.a=b",
        "operator.extraEnv[0].name=A",
        "prometheus.auth.secretName=Not_a_name",
        "podLabels.a=1",
        "livenessProbe.httpGet.path=/",
        "fullnameOverride=Heterotrain",
    ],
)
def test_a_wrong_value_is_refused(value: str) -> None:
    done = helm("template", "release", str(CHART), "--kube-version", "1.36.0", "--set", value)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_rules_and_defaults_for_workers_reach_the_operator_as_it_reads_them() -> None:
    ports = ("jobs.egress.rules[0].ports[0].port=443", "jobs.egress.rules[0].ports[0].protocol=TCP")
    defaults = ("jobs.defaults.labels.team=ml", "jobs.defaults.env[0].name=A", "jobs.defaults.env[0].value=1b")
    (deployment,) = of_kind(render(*EVERYTHING, *ports, *defaults), "Deployment")
    found = {each["name"]: each.get("value") for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert egress_rules(found["HETEROTRAIN_OPERATOR_EGRESS"]) == [{"ports": [{"port": 443, "protocol": "TCP"}]}]
    read = worker_defaults(found["HETEROTRAIN_OPERATOR_WORKER_DEFAULTS"])
    assert (read.labels, read.env) == ({"team": "ml"}, ({"name": "A", "value": "1b"},))


def test_labels_of_users_never_replace_those_by_which_the_deployment_selects_its_pods() -> None:
    own = "app\\.kubernetes\\.io/name=mine"
    objects = render(f"podLabels.{own}", f"commonLabels.{own}", "podLabels.team=a", "commonLabels.tier=b")
    (deployment,) = of_kind(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["app.kubernetes.io/name"] == "heterotrain-operator"
    assert (labels["team"], labels["tier"]) == ("a", "b")
    unlabelled = [each["kind"] for each in objects if each["metadata"].get("labels", {}).get("tier") != "b"]
    assert set(unlabelled) <= {"CustomResourceDefinition"}
