"""One table of jobs, good and bad: the forecast and a real API server have to agree on each of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Body = dict[str, Any]

GOOD: Body = {
    "apiVersion": "heterotrain.dev/v1alpha1",
    "kind": "HeteroTrainJob",
    "metadata": {"name": "digits", "labels": {"team": "vision"}},
    "spec": {
        "training": {"globalBatchSize": 448, "epochs": 3},
        "elasticPolicy": {"minReplicas": 2, "maxReplicas": 3},
        "workerPools": [
            {"name": "a100", "maxReplicas": 2, "pricePerHour": "3.67", "resources": {"limits": {"nvidia.com/gpu": 1}}},
            {"name": "t4", "maxReplicas": 3, "capacityType": "Spot", "pricePerHour": "0.30"},
        ],
        "checkpoint": {"uri": "file:///checkpoints"},
        "template": {
            "spec": {
                "containers": [{"name": "trainer", "image": "x", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
                "volumes": [{"name": "data", "emptyDir": {}}],
            }
        },
    },
}

POOL: Body = {"name": "a100", "maxReplicas": 2}

Change = Callable[[Body], object]


def job(change: Change) -> Body:
    """Return the good job with a change."""
    body = copy.deepcopy(GOOD)
    change(body)
    return body


def metadata(**fields: Any) -> Change:
    return lambda body: body["metadata"].update(fields)


def spec(**fields: Any) -> Change:
    return lambda body: body["spec"].update(fields)


def training(**fields: Any) -> Change:
    return lambda body: body["spec"]["training"].update(fields)


def elastic(**fields: Any) -> Change:
    return lambda body: body["spec"]["elasticPolicy"].update(fields)


def failures(*rules: Body) -> Change:
    return spec(failurePolicy={"rules": list(rules)})


def pool(**fields: Any) -> Change:
    return lambda body: body["spec"]["workerPools"][0].update(fields)


def pod(**fields: Any) -> Change:
    return lambda body: body["spec"]["template"]["spec"].update(fields)


def network(**fields: Any) -> Change:
    return spec(network=fields)


def on_host(**fields: Any) -> Change:
    """Return the change to a job with the node's network and these ports."""

    def change(body: Body) -> None:
        body["spec"]["template"]["spec"]["hostNetwork"] = True
        body["spec"]["network"] = fields

    return change


def container(**fields: Any) -> Change:
    return lambda body: body["spec"]["template"]["spec"]["containers"][0].update(fields)


def torchrun(**fields: Any) -> Change:
    """Return the change to a good job for torchrun, with further fields."""

    def change(body: Body) -> None:
        del body["spec"]["training"], body["spec"]["checkpoint"]
        body["spec"].update({"runtime": "Torchrun", **fields})

    return change


ACCEPTED: dict[str, Change] = {
    "an empty pool": lambda body: body["spec"]["workerPools"][1].update(maxReplicas=0),
    "a script for torchrun": torchrun(),
    "a script for torchrun with prices": torchrun(objective="Cost", workerPools=[{**POOL, "pricePerHour": "3.67"}]),
    "as it is": metadata(name="digits"),
    "a generated name": lambda body: body.update(metadata={"generateName": "digits-"}),
    "annotations": metadata(annotations={"example.com/owner": "vision, room 7"}),
    "null for no value": elastic(maxReplicas=None),
    "null for the default": training(seed=None),
    "fields of a container that Kubernetes has": container(workingDir="/work", tty=True),
    "fields of a pod that Kubernetes has": pod(hostNetwork=False, dnsPolicy="Default"),
    "the restart policy that the operator sets": pod(restartPolicy="Never"),
    "an empty node name": pod(nodeName=""),
    "a quantity as a number": pool(resources={"limits": {"nvidia.com/gpu": 2, "cpu": 4}}),
    "a quantity as text": pool(resources={"limits": {"cpu": "500m", "memory": "1Gi"}}),
    "an adaptive batch": spec(training={"adaptiveBatch": {"min": 64, "max": 4096}}),
    "a limit of cost": spec(maxCost="250.50"),
    "a small limit of cost": spec(maxCost="0.01"),
    "a deadline": spec(objective="Deadline", deadline="2099-01-31T18:00:00Z"),
    "a deadline with an offset and fractions": spec(objective="Deadline", deadline="2099-01-31T18:00:00.5+02:00"),
    "steps as boundary": training(rebalance={"boundary": "Steps", "everySteps": 100}),
    "a variable of the operator that users may set": container(
        env=[{"name": "HETEROTRAIN_LOG_FORMAT", "value": "json"}]
    ),
    "a label of a node": pool(nodeSelector={"gpu": "a100"}),
    "an empty label": metadata(labels={"team": ""}),
    "a pool with an image of its own": pool(
        template={
            "spec": {"runtimeClassName": "amd", "containers": [{"name": "trainer", "image": "x:rocm", "tty": True}]}
        }
    ),
    "a pool with volumes, init containers and tolerations of its own": pool(
        template={
            "spec": {
                "initContainers": [{"name": "drivers", "image": "x", "restartPolicy": "Always"}],
                "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
                "tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}],
                "containers": [{"name": "trainer", "resources": {"limits": {"amd.com/gpu": 2}}}],
            }
        }
    ),
    "rules about failures": failures(
        {"action": "Fail", "onExitCodes": {"operator": "NotIn", "values": [1, 2]}},
        {"action": "AvoidNode", "onReasons": ["OOMKilled"]},
        {"action": "Restart", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ),
    "a group of Volcano": spec(podGroup={"scheduler": "Volcano"}),
    "a group of KAI": spec(podGroup={"scheduler": "KAI", "queue": "research"}),
    "a group of the coscheduling plugin": spec(podGroup={"scheduler": "Coscheduling"}),
    "other ports": network(metricsPort=9500, peerPort=20000),
    "the lowest and the highest ports": network(metricsPort=1024, peerPort=65336),
    "ports that touch": network(metricsPort=1224, peerPort=1024),
    "the node's network with the default ports": on_host(),
    "the node's network just below and above the node's own ports": on_host(metricsPort=10260, peerPort=29800),
}

REFUSED: dict[str, tuple[Change, str]] = {
    "unknown field of the job": (lambda body: body.update(specs={}), "specs is not a field: did you mean spec?"),
    "unknown field of the metadata": (
        metadata(label={"a": "b"}),
        "metadata.label is not a field: did you mean labels?",
    ),
    "unknown field of the spec": (spec(checkpoints={}), "spec.checkpoints is not a field: did you mean checkpoint?"),
    "singular": (elastic(minReplica=2), "spec.elasticPolicy.minReplica is not a field: did you mean minReplicas?"),
    "wrong case": (training(globalBatchsize=448), "globalBatchsize is not a field: did you mean globalBatchSize?"),
    "unknown field of a pool": (pool(gpu=1), "spec.workerPools[0].gpu is not a field: known are"),
    "unknown field of the template": (
        lambda body: body["spec"]["template"].update(containers=[]),
        "spec.template.containers is not a field",
    ),
    "no spec": (lambda body: body.pop("spec"), "spec is missing"),
    "no template": (lambda body: body["spec"].pop("template"), "spec.template is missing"),
    "no containers": (pod(containers=[]), "spec.template.spec.containers has 0 entries, but needs at least 1"),
    "container without a name": (pod(containers=[{"image": "x"}]), "spec.template.spec.containers[0].name is missing"),
    "capital in the name": (metadata(name="Digits"), "metadata.name has to start with a letter"),
    "underscore in the name": (metadata(name="digits_1"), "metadata.name has to start with a letter"),
    "digit at the start": (metadata(name="1digits"), "metadata.name has to start with a letter"),
    "long name": (metadata(name="d" * 49), "at most 48 characters"),
    "number as a label": (
        metadata(labels={"run": 7}),
        'metadata.labels.run must be text, not 7: put it in quotes, "7"',
    ),
    "label with a blank": (metadata(labels={"run": "a b"}), 'metadata.labels.run is "a b"'),
    "number as text": (training(globalBatchSize="448"), 'must be a whole number, not "448": remove the quotes, 448'),
    "fraction as a whole number": (training(globalBatchSize=44.5), "globalBatchSize must be a whole number, not 44.5"),
    "truth as a number": (training(epochs=True), "spec.training.epochs must be a whole number, not true"),
    "text as a truth": (spec(suspend="true"), 'spec.suspend must be true or false, not "true"'),
    "a limit of cost of zero": (spec(maxCost="0.00"), "maxCost"),
    "a limit of cost with a currency": (spec(maxCost="250 EUR"), "maxCost"),
    "a limit of cost without a price": (
        spec(maxCost="5", workerPools=[POOL]),
        "maxCost adds up prices: give every pool",
    ),
    "price as a number": (pool(pricePerHour=3.67), 'pricePerHour must be text, not 3.67: put it in quotes, "3.67"'),
    "price with a currency": (pool(pricePerHour="$3.67"), 'must be a number such as "3.67", without a currency'),
    "path as a URI": (spec(checkpoint={"uri": "/checkpoints"}), "must be a URI such as file:///checkpoints"),
    "duration as a number": (
        spec(activeDeadlineSeconds="1h"),
        'activeDeadlineSeconds must be a whole number, not "1h"',
    ),
    "unit of an amount": (pool(resources={"limits": {"memory": "512MB"}}), "'512MB' is not a quantity"),
    "fraction of a quantity": (pool(resources={"limits": {"cpu": 0.5}}), "must be a whole number or text, not 0.5"),
    "only empty pools": (
        lambda body: [each.update(maxReplicas=0) for each in body["spec"]["workerPools"]],
        "elasticPolicy.minReplicas is larger than the sum of the pools' maxReplicas",
    ),
    "negative workers": (pool(maxReplicas=-1), "maxReplicas is -1, but must be at least 0"),
    "negative batch": (training(globalBatchSize=-1), "globalBatchSize is -1, but must be at least 1"),
    "too many epochs of a kind": (training(epochs=0), "spec.training.epochs is 0, but must be at least 1"),
    "no step": (training(epochs=None, steps=0), "spec.training.steps is 0, but must be at least 1"),
    "epochs and steps": (training(steps=100), "epochs and steps both say when the training ends"),
    "steps of no one size": (
        training(epochs=None, steps=9, globalBatchSize=None, adaptiveBatch={"min": 64, "max": 128}),
        "training.steps needs steps of one size",
    ),
    "torchrun with steps": (torchrun(training={"steps": 9}), "the script counts its steps itself"),
    "no batch": (training(globalBatchSize=None), "exactly one of globalBatchSize"),
    "two batches": (training(adaptiveBatch={"min": 64, "max": 128}), "exactly one of globalBatchSize"),
    "no training": (lambda body: body["spec"].pop("training"), "exactly one of globalBatchSize"),
    "an unknown runtime": (torchrun(runtime="MPI"), 'spec.runtime is "MPI", but must be one of HeteroTrain, Torchrun'),
    "encryption between workers": (
        training(communication={"encryption": "TLS"}),
        "workers do not encrypt their connections: remove training.communication.encryption, and encrypt the network",
    ),
    "torchrun with a batch": (
        torchrun(training={"globalBatchSize": 448}),
        "with runtime: Torchrun the script chooses its own batch: remove training.globalBatchSize",
    ),
    "torchrun with an adaptive batch": (
        torchrun(training={"adaptiveBatch": {"min": 64, "max": 4096}}),
        "with runtime: Torchrun the script chooses its own batch",
    ),
    "torchrun with a checkpoint": (
        torchrun(checkpoint={"uri": "file:///checkpoints"}),
        "with runtime: Torchrun the script writes and reads its own checkpoints: remove checkpoint",
    ),
    "torchrun with a divided model": (
        torchrun(parallelism={"mode": "Sharded"}),
        "with runtime: Torchrun the script divides its model itself: remove parallelism",
    ),
    "torchrun with a deadline": (
        torchrun(objective="Deadline", deadline="2099-01-31T18:00:00Z"),
        "with runtime: Torchrun no progress is reported: choose another objective than Deadline",
    ),
    "choice in another case": (pool(capacityType="spot"), "but must be one of OnDemand, Spot"),
    "a list as a mapping": (spec(workerPools={"name": "a"}), "spec.workerPools must be a list, not a mapping"),
    "a mapping as a list": (spec(training=[]), "spec.training must be a mapping, not a list"),
    "null in a list": (spec(workerPools=[None]), "spec.workerPools[0] must be a mapping, not null"),
    "no pools": (spec(workerPools=[]), "spec.workerPools has 0 entries, but needs at least 1"),
    "a pool twice": (
        lambda body: body["spec"]["workerPools"].append({"name": "t4", "maxReplicas": 1}),
        'spec.workerPools names "t4" twice: give every entry its own name',
    ),
    "a container twice": (
        lambda body: body["spec"]["template"]["spec"]["containers"].append({"name": "trainer", "image": "y"}),
        'spec.template.spec.containers names "trainer" twice',
    ),
    "pool in capitals": (pool(name="A100"), 'spec.workerPools[0].name is "A100", but must be lower-case letters'),
    "minimum above maximum": (elastic(minReplicas=4), "minReplicas is larger than maxReplicas"),
    "minimum above the pools": (elastic(minReplicas=9, maxReplicas=9), "larger than the sum of the pools'"),
    "deadline without a date": (spec(objective="Deadline", deadline="tomorrow"), "a time such as 2027-01-31T18:00:00Z"),
    "deadline without a time": (
        spec(objective="Deadline", deadline="2099-01-31"),
        "a time such as 2027-01-31T18:00:00Z",
    ),
    "deadline without its objective": (
        spec(deadline="2099-01-31T18:00:00Z"),
        "deadline and objective: Deadline belong",
    ),
    "restart policy": (pod(restartPolicy="OnFailure"), "leave spec.template.spec.restartPolicy out"),
    "node name": (pod(nodeName="node-1"), "leave spec.template.spec.nodeName out"),
    "deadline of a pod": (pod(activeDeadlineSeconds=60), "leave spec.template.spec.activeDeadlineSeconds out"),
    "variable of the operator": (
        container(env=[{"name": "HETEROTRAIN_PLAN_DIR", "value": "/x"}]),
        "names that start with HETEROTRAIN_ belong to the operator",
    ),
    "a pool's template with a node name": (
        pool(template={"spec": {"nodeName": "node-1"}}),
        "leave spec.template.spec.nodeName out",
    ),
    "a pool's template with a variable of the operator": (
        pool(template={"spec": {"containers": [{"name": "trainer", "env": [{"name": "HETEROTRAIN_PLAN_DIR"}]}]}}),
        "names that start with HETEROTRAIN_ belong to the operator",
    ),
    "a pool's template with a volume of the operator": (
        pool(template={"spec": {"volumes": [{"name": "heterotrain-shm", "emptyDir": {}}]}}),
        "the volume names heterotrain-plan and heterotrain-shm belong to the operator",
    ),
    "a pool's template with a malformed selector": (
        pool(template={"spec": {"nodeSelector": 7}}),
        "spec.workerPools[0].template.spec.nodeSelector must be a mapping, not 7",
    ),
    "a pool's template with a malformed amount": (
        pool(template={"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"cpu": "much"}}}]}}),
        "'much' is not a quantity",
    ),
    "unknown field of a pool's template": (
        pool(template={"containers": []}),
        "spec.workerPools[0].template.containers is not a field",
    ),
    "a rule about failures without a pattern": (failures({"action": "Fail"}), "needs exactly one of onExitCodes"),
    "a rule about failures with two patterns": (
        failures({"action": "Ignore", "onReasons": ["Error"], "onExitCodes": {"values": [1]}}),
        "needs exactly one of onExitCodes",
    ),
    "an unknown action": (failures({"action": "Retry", "onReasons": ["Error"]}), "must be one of"),
    "exit code 0": (failures({"action": "Ignore", "onExitCodes": {"values": [0]}}), "values[0]"),
    "a group without a scheduler": (spec(podGroup={}), "spec.podGroup.scheduler is missing"),
    "a group of an unknown scheduler": (spec(podGroup={"scheduler": "Slurm"}), "must be one of Volcano, KAI"),
    "a group of KAI without a queue": (spec(podGroup={"scheduler": "KAI"}), "places pods of queues only"),
    "a queue where there is none": (
        spec(podGroup={"scheduler": "Coscheduling", "queue": "research"}),
        "the coscheduling plugin has no queues",
    ),
    "a queue in capitals": (spec(podGroup={"scheduler": "Volcano", "queue": "Research"}), "podGroup.queue"),
    "a port that needs a privilege": (network(metricsPort=80), "metricsPort is 80, but must be at least 1024"),
    "ports beyond the last one": (network(peerPort=65337), "peerPort is 65337, but must be at most 65336"),
    "ports that overlap": (network(metricsPort=29599), "the ports overlap: workers use 16 ports"),
    "ports that overlap from below": (network(metricsPort=29385), "the ports overlap: workers use 16 ports"),
    "the node's network with ports of its kubelet": (
        on_host(peerPort=10049),
        "with hostNetwork the workers' ports are the node's",
    ),
    "the node's network with node ports": (
        on_host(metricsPort=30000),
        "with hostNetwork the workers' ports are the node's",
    ),
    "a pool on the node's network with node ports": (
        lambda body: (
            network(peerPort=29801)(body),
            pool(template={"spec": {"hostNetwork": True}})(body),
        ),
        "with hostNetwork the workers' ports are the node's",
    ),
    "volume of the operator": (
        pod(volumes=[{"name": "heterotrain-plan", "emptyDir": {}}]),
        "the volume names heterotrain-plan and heterotrain-shm belong to the operator",
    ),
}
"""Bad jobs, each with a part of the forecast's sentence."""
