"""The chart grants the operator what its calls to the API server need, and nothing else.

Calls are read from the operator's sources, so no path is left out that a test happens not to take.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heterotrain_operator
import yaml
from heterotrain_core.contract import keys
from heterotrain_operator.engine.plugins import claimed_devices
from heterotrain_operator.kube import resources, reviews
from heterotrain_operator.kube.resources import JOBS, Resource, resource_of

Right = tuple[str, str, str]
"""API group, resource with its subresource, verb."""
SOURCES = Path(heterotrain_operator.__file__).parent
CHART = Path(__file__).parents[2] / "helm/heterotrain/templates/rbac.yaml"
FOR_USERS = ("job-viewer", "job-editor", "metrics-reader")
VERBS = {
    "get": ["get"], "list": ["list"], "create": ["create"], "replace": ["update"], "merge": ["patch"],
    "apply": ["create", "patch"], "delete": ["delete"],
}  # fmt: skip
APPLIED = [resource_of({"kind": kind}) for kind in ("PodDisruptionBudget", "NetworkPolicy")]
POD_GROUPS = [
    resource_of({"kind": "PodGroup", "apiVersion": f"{group}/v1"})
    for group in ("scheduling.volcano.sh", "scheduling.run.ai", "scheduling.x-k8s.io")
]
BY_VARIABLE = {
    ("act.py", "get"): APPLIED + POD_GROUPS,
    ("act.py", "apply"): APPLIED + POD_GROUPS,
    ("act.py", "delete"): POD_GROUPS,
    ("resync.py", "list"): [JOBS, resources.PODS, resources.CONFIG_MAPS],
}
"""By file and verb, the resources of calls that get theirs as a variable."""
WITHOUT_A_CALL = {
    (keys.GROUP, f"{keys.PLURAL}/finalizers", "update"),  # owner references that block the deletion of a job
    *(
        (group, plural, verb)  # kopf's watches
        for group, plural in ((keys.GROUP, keys.PLURAL), ("", "pods"), ("", "configmaps"), ("", "nodes"))
        for verb in ("get", "list", "watch")
    ),
}


def right(resource: Resource, verb: str, subresource: str = "") -> Right:
    group = resource.api_version.rpartition("/")[0]
    return group, f"{resource.plural}/{subresource}".strip("/"), verb


def calls() -> Iterator[tuple[str, str, str, str]]:
    """Yield file, verb, name of the resource and subresource of each call."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VERBS):
                continue
            if getattr(node.func.value, "attr", getattr(node.func.value, "id", "")) not in ("_kube", "kube"):
                continue
            sub = next((each.value for each in node.keywords if each.arg == "subresource"), None)
            yield path.name, node.func.attr, ast.unparse(node.args[0]), ast.literal_eval(sub) if sub else ""


def needed() -> set[Right]:
    found, variables = set(WITHOUT_A_CALL), set()
    for file, verb, name, subresource in calls():
        if name.isupper():
            of = [next(getattr(each, name) for each in (resources, reviews, claimed_devices) if hasattr(each, name))]
        else:
            variables.add((file, verb))
            of = BY_VARIABLE[file, verb]
        found |= {right(resource, each, subresource) for resource in of for each in VERBS[verb]}
    assert variables == BY_VARIABLE.keys()
    return found


def granted() -> set[Right]:
    found: set[Right] = set()
    for document in CHART.read_text(encoding="utf-8").split("\n---"):
        if any(f"-{name}\n" in document for name in FOR_USERS):
            continue
        for line in re.findall(r"^- \{apiGroups: .*\}", document, re.MULTILINE):
            rule: dict[str, Any] = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "name", line))[0]
            found |= {(g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    return found


def test_the_chart_grants_the_rights_that_the_calls_need_and_no_others() -> None:
    missing, superfluous = needed() - granted(), granted() - needed()
    assert not missing, f"the chart grants too little: {sorted(missing)}"
    assert not superfluous, f"no call needs these: {sorted(superfluous)}"
