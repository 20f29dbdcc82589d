"""The CustomResourceDefinition, made from the models: ``python -m heterotrain_operator.api.crd > crds/…``."""

from __future__ import annotations

import sys
from typing import Any

import yaml
from heterotrain_core.contract import keys

from heterotrain_operator.api.schema import structural
from heterotrain_operator.api.status import HeteroTrainJobStatus
from heterotrain_operator.api.v1alpha1 import NAME_RULE, HeteroTrainJobSpec

HEADER = "# Made by `make generate` from operator/heterotrain_operator/api; do not edit.\n"

COLUMNS = (
    ("State", "string", ".status.state", 0, "Summary in one word."),
    ("Ready", "string", ".status.ready", 0, "Workers that are ready to train, out of the desired number."),
    ("Epoch", "integer", ".status.epoch", 0, "Completed epochs."),
    ("Progress", "string", ".status.progress", 0, "Completed part of all samples."),
    ("Restarts", "integer", ".status.restarts", 0, "Workers that failed by their own fault."),
    ("Age", "date", ".metadata.creationTimestamp", 0, "Time since the job was created."),
    ("Reason", "string", ".status.reason", 1, "Why the job is in its state."),
)


SCALE = {
    "specReplicasPath": ".spec.elasticPolicy.maxReplicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition of ``HeteroTrainJob``."""
    spec = {**structural(HeteroTrainJobSpec), "description": "Desired state of the training job."}
    status = {
        **structural(HeteroTrainJobStatus),
        "description": "Observed state of the training job. Only the operator writes it.",
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{keys.PLURAL}.{keys.GROUP}"},
        "spec": {
            "group": keys.GROUP,
            "names": {
                "kind": keys.KIND,
                "listKind": f"{keys.KIND}List",
                "plural": keys.PLURAL,
                "singular": keys.KIND.lower(),
                "shortNames": [keys.SHORT_NAME],
                "categories": ["ml"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": keys.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, "scale": SCALE},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority, "description": text}
                        for name, kind, path, priority, text in COLUMNS
                    ],
                    "schema": {
                        "openAPIV3Schema": {
                            "description": "One PyTorch training job on mixed accelerators. Each worker gets a share "
                            "of the batch that fits its speed, and training continues when workers join or leave.",
                            "type": "object",
                            "required": ["spec"],
                            "x-kubernetes-validations": [{"rule": NAME_RULE.cel, "message": NAME_RULE.message}],
                            "properties": {
                                "apiVersion": {"type": "string", "description": f"Always {keys.GROUP}/{keys.VERSION}."},
                                "kind": {"type": "string", "description": f"Always {keys.KIND}."},
                                "metadata": {"type": "object"},
                                "spec": spec,
                                "status": status,
                            },
                        }
                    },
                }
            ],
        },
    }


def rendered() -> str:
    """Return the text of the file in ``crds/``."""
    return HEADER + yaml.safe_dump(crd(), sort_keys=False, width=160)


if __name__ == "__main__":
    sys.stdout.write(rendered())
