"""The chart's README and the manifest without Helm: current, complete, and as usable as the chart."""

from __future__ import annotations

import yaml
from lab import chart_files
from support.helm import CHART, of_kind


def test_every_value_of_the_chart_has_a_meaning() -> None:
    found = list(chart_files.values((CHART / "values.yaml").read_text()))
    assert len(found) > 40
    assert [each.path for each in found if not each.meaning] == []


def test_comments_belong_to_the_value_below_them() -> None:
    text = "# Of the section.\nsection:\n  # First.\n  one: 1\n  two: {a: b}\n# Last.\nthree: []\n"
    found = [(each.path, each.default, each.meaning) for each in chart_files.values(text)]
    assert found == [
        ("section.one", 1, "Of the section. First."), ("section.two", {"a": "b"}, ""), ("three", [], "Last."),
    ]  # fmt: skip


def test_the_manifest_can_be_applied_as_it_is() -> None:
    """Its namespace comes first, every other object names it, and nothing is left that only Helm understands."""
    objects = list(yaml.safe_load_all(chart_files.MANIFEST.read_text()))
    assert objects[0]["kind"] == "Namespace"
    (deployment,) = of_kind(objects, "Deployment")
    (account,) = of_kind(objects, "ServiceAccount")
    assert deployment["metadata"]["namespace"] == account["metadata"]["namespace"] == objects[0]["metadata"]["name"]
    assert {s["namespace"] for b in of_kind(objects, "ClusterRoleBinding") for s in b["subjects"]} == {
        objects[0]["metadata"]["name"]
    }
    assert "helm.sh/hook" not in chart_files.MANIFEST.read_text()
