"""``make generate``: every file of the repository that is made from others, and what makes it.

A test compares each with its source. The manifest needs helm, which `make images` fetches or compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from heterotrain_operator.api import admission
from heterotrain_operator.api.crd import rendered
from heterotrain_operator.api.schema import structural
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec

from lab import chart_files, fields_reference, metrics_reference
from lab.cluster import REPOSITORY


def spec_schema() -> str:
    """Return the schema of a spec as JSON, without what is for people and without the rules, which have twins."""
    return json.dumps(_bare(structural(HeteroTrainJobSpec)), indent=1, sort_keys=True) + "\n"


def _bare(node: Any, *, names: bool = False) -> Any:
    if isinstance(node, dict):
        left_out = () if names else ("default", "description", "x-kubernetes-validations")
        return {
            key: _bare(each, names=key == "properties" and not names)
            for key, each in node.items()
            if key not in left_out
        }
    return node


_CRD: Final = "heterotrain.dev_heterotrainjobs.yaml"
FILES: Final[Mapping[Path, Callable[[], str]]] = {
    REPOSITORY / "crds" / _CRD: rendered,
    chart_files.CHART / "files" / _CRD: rendered,
    admission.SCHEMA: spec_schema,
    chart_files.README: chart_files.readme,
    metrics_reference.PATH: metrics_reference.text,
    fields_reference.PATH: fields_reference.text,
    chart_files.MANIFEST: chart_files.manifest,
}
"""In an order in which each file comes after those that it is made from."""


def main() -> None:
    """Write all files."""
    for path, made in FILES.items():
        if made is chart_files.manifest and not Path(chart_files.helm()).exists():
            print(f"{path.relative_to(REPOSITORY)}: not made, because helm is missing; `make images` brings it")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(made(), encoding="utf-8")
        print(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
