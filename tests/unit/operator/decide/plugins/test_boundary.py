"""The operator names extensions of the cluster inside their plugins only: a further one is a folder, not branches."""

from __future__ import annotations

import re
from pathlib import Path

import heterotrain_operator

ROOT = Path(heterotrain_operator.__file__).parent
NAMES = re.compile(
    r"kueue|volcano|\bkai\b|coscheduling|pod_?group|resource_?(?:claim|slice)|device_?class|claimed_dev", re.IGNORECASE
)
PLUGINS = ("decide/plugins/", "engine/plugins/")
ALLOWED = {
    "api/pod_group.py": "the fields of spec.podGroup",
    "api/v1alpha1.py": "spec.podGroup, and the value of spec.managedBy that is refused",
    "cluster_state/quantity.py": "the prefix by which Kubernetes names the resources of device classes",
    "decide/objects/pool_template.py": "a list in Kubernetes' own pods",
    "decide/workers/scheduler_words.py": "messages of Kubernetes' own scheduler",
}


def naming() -> set[str]:
    paths = (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    return {path for path in paths if NAMES.search((ROOT / path).read_text(encoding="utf-8"))}


def test_extensions_of_the_cluster_are_named_in_their_plugins_only() -> None:
    outside = {path for path in naming() if not path.startswith(PLUGINS)}
    assert outside == ALLOWED.keys()


def test_a_plugin_s_folder_is_imported_by_the_registry_only() -> None:
    own = re.compile(r"(?:decide|engine)\.plugins\.(?!registry\b|interface\b| import)(\w+)")
    found = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if own.search(path.read_text(encoding="utf-8")) and not path.relative_to(ROOT).as_posix().startswith(PLUGINS)
    }
    assert found == set()
