"""``heterotrain init --from``: what a manifest says is in the job or in a note, and no other program is started."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_cli.convert.draft import common, differences
from heterotrain_cli.convert.launching import converted
from heterotrain_cli.main import main
from heterotrain_operator.decide.objects.pool_template import merged
from support.cli_runner import CliRunner

FOREIGN = sorted(Path(__file__).with_name("foreign").glob("*.yaml"))
_NUMBERS = ("limits", "requests", "resourcesPerNode", "accelerators", "schedulingPolicy.minResources")
_WITHOUT_MEANING = ("rayStartParams", ".env")


def told(tmp_path: Path, *documents: Any) -> tuple[dict[str, Any], str]:
    """Return the job for a file, and the notes."""
    path = tmp_path / "foreign.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    result = CliRunner().invoke(main, ["init", "--from", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout), result.stderr


def marked(value: Any, path: str = "", marks: list[str] | None = None) -> Any:
    """Return a document with a field that no one knows in each of its objects."""
    if isinstance(value, list):
        return [marked(each, path, marks) for each in value]
    if not isinstance(value, dict) or path.endswith(_WITHOUT_MEANING):
        return value
    found = {name: marked(each, f"{path}.{name}", marks) for name, each in value.items()}
    if marks is not None and not path.endswith(_NUMBERS):
        marks.append(f"marker{len(marks)}x")
        found[f"unheardOf{len(marks)}"] = marks[-1]
    return found


@pytest.mark.parametrize("manifest", FOREIGN, ids=lambda path: path.stem)
def test_a_field_that_no_one_knows_is_never_lost_in_silence(tmp_path: Path, manifest: Path) -> None:
    documents = [each for each in yaml.safe_load_all(manifest.read_text()) if each]
    marks: list[str] = []
    first = marked(documents[0], marks=marks)
    job, notes = told(tmp_path, first, *documents[1:])
    everything = yaml.safe_dump(job, width=10_000) + notes
    assert [mark for mark in marks if mark not in everything] == [], notes


def read(tmp_path: Path, name: str) -> tuple[dict[str, Any], str]:
    path = Path(__file__).with_name("foreign") / f"{name}.yaml"
    return told(tmp_path, *yaml.safe_load_all(path.read_text()))


def test_queue_group_and_differences_of_roles_are_taken_over(tmp_path: Path) -> None:
    job, notes = read(tmp_path, "pytorchjob-queue")
    spec = job["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "main"
    assert labels["kueue.x-k8s.io/pod-group-name"] == "two-roles"
    assert labels["app"] == "digits"
    assert "suspend" not in spec
    assert "Kueue holds the pods by gates" in notes
    assert job["metadata"]["labels"] == {"owner": "vision"}
    assert job["metadata"]["annotations"] == {"example.com/ticket": "42"}
    assert (spec["cleanPodPolicy"], spec["backoffLimit"]) == ("All", 5)
    assert spec["podGroup"] == {"scheduler": "Volcano", "queue": "gpu"}
    assert spec["template"]["spec"]["priorityClassName"] == "urgent"
    for line in (
        "scheduleTimeoutSeconds: 60", "Service rendezvous", "hostname of the pods", "readinessProbe",
        "Master.restartPolicy: ExitCode",
    ):  # fmt: skip
        assert line in notes
    master, worker = spec["workerPools"]
    assert master["numProcPerWorker"] == worker["numProcPerWorker"] == 4
    pods = {each["name"]: merged(spec["template"], each.get("template") or {}) for each in (master, worker)}
    of_master, of_worker = pods["master"]["spec"]["containers"], pods["worker"]["spec"]["containers"]
    assert of_master[0]["name"] == of_worker[0]["name"] == "pytorch", "the first container trains"
    assert {each["name"] for each in of_master} == {"pytorch", "tensorboard"}
    assert {each["name"] for each in of_worker} == {"pytorch"}
    assert of_master[0]["command"] == ["heterotrain-run", "/app/train.py", "--save"]
    assert of_worker[0]["command"] == ["heterotrain-run", "/app/train.py"]
    variables = [{each["name"]: each["value"] for each in pod[0]["env"]} for pod in (of_master, of_worker)]
    assert variables == [
        {"NCCL_SOCKET_IFNAME": "efa", "SHARED": "1"}, {"NCCL_SOCKET_IFNAME": "eth0", "SHARED": "1"},
    ]  # fmt: skip
    assert pods["master"]["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
    assert "annotations" not in pods["worker"]["metadata"]


def test_an_mpi_job_is_its_workers_with_the_launchers_command_and_data(tmp_path: Path) -> None:
    job, notes = read(tmp_path, "mpijob")
    (pool,) = job["spec"]["workerPools"]
    assert (pool["maxReplicas"], pool["numProcPerWorker"]) == (2, 2)
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["heterotrain-run", "/app/train.py", "--deepspeed"]
    assert pod["containers"][0]["env"] == [{"name": "DATA", "value": "/data"}]
    assert pod["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "corpus"}}]
    for line in ("MPI does not run", "sshd -De", "launcher.container.securityContext.runAsUser: 1000"):
        assert line in notes


def test_initializers_and_patches_of_a_train_job_are_taken_over(tmp_path: Path) -> None:
    job, notes = read(tmp_path, "trainjob-initializers")
    pod = job["spec"]["template"]["spec"]
    fetched = {each["name"]: each for each in pod["initContainers"]}
    assert fetched["dataset-initializer"]["env"] == [
        {"name": "STORAGE_URI", "value": "hf://data/gsm8k"}, {"name": "SPLIT", "value": "train"},
    ]  # fmt: skip
    assert fetched["dataset-initializer"]["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert pod["containers"][0]["volumeMounts"] == fetched["model-initializer"]["volumeMounts"]
    assert "FILL-IN/MODEL-INITIALIZER" in notes
    assert pod["containers"][0]["command"] == ["heterotrain-run", "-c", "import grpo; grpo.main()"]
    assert job["metadata"]["labels"] == {"cost-center": "7", "team": "rl", "stage": "train"}
    assert pod["serviceAccountName"] == "rl"
    (pool,) = job["spec"]["workerPools"]
    assert pool["resources"]["limits"] == {"nvidia.com/gpu": 1}, "the API server demands limits for devices"


def test_a_task_keeps_its_kind_of_accelerator_its_pod_and_its_folder(tmp_path: Path) -> None:
    job, notes = read(tmp_path, "skypilot-pod-config")
    (pool,) = job["spec"]["workerPools"]
    assert pool["resources"] == {"limits": {"amd.com/gpu": 4}, "requests": {"cpu": "8", "memory": "32Gi"}}
    pod = job["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["runtimeClassName"]) == ("trainer", "rocm")
    (main_container,) = pod["containers"]
    assert main_container["workingDir"] == "/app/examples"
    assert main_container["command"] == ["heterotrain-run", "main.py", "--epochs", "$(EPOCHS)"]
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in main_container["env"]
    for line in ("infra: k8s/cluster", "disk_size: 500", "setup is left out", "volumes is left out"):
        assert line in notes


@pytest.mark.parametrize(
    ("name", "resource"),
    [("MI300X", "amd.com/gpu"), ("A100-80GB", "nvidia.com/gpu"), ("tpu-v5e-8", "google.com/tpu"),
     ("Gaudi2", "habana.ai/gaudi"), ("Trainium", "aws.amazon.com/neuron")],
)  # fmt: skip
def test_accelerators_by_name(tmp_path: Path, name: str, resource: str) -> None:
    job, notes = told(tmp_path, {"resources": {"accelerators": f"{name}:8"}, "run": "torchrun train.py"})
    assert job["spec"]["workerPools"][0]["resources"]["limits"] == {resource: 8}
    assert ("GPUs of NVIDIA and AMD" in notes) == (resource not in ("amd.com/gpu", "nvidia.com/gpu"))


def test_groups_of_a_ray_job_keep_their_own_pods_and_get_what_the_head_has(tmp_path: Path) -> None:
    def group(name: str, image: str) -> dict[str, Any]:
        main_container = {
            "name": f"{name}-ray",
            "image": image,
            "lifecycle": {"preStop": {"exec": {"command": ["ray"]}}},
        }
        return {"groupName": name, "replicas": 1, "template": {"spec": {"containers": [main_container]}}}

    head = {"name": "head", "image": "ray", "volumeMounts": [{"name": "code", "mountPath": "/code"}]}
    template = {"spec": {"containers": [head], "volumes": [{"name": "code", "configMap": {"name": "code"}}]}}
    cluster = {"headGroupSpec": {"template": template}, "workerGroupSpecs": [group("a", "x"), group("b", "y")]}
    document = {"kind": "RayJob", "spec": {"entrypoint": "python /code/train.py", "rayClusterSpec": cluster}}
    job, notes = told(tmp_path, document)
    base = job["spec"]["template"]
    pods = [merged(base, pool["template"])["spec"] for pool in job["spec"]["workerPools"]]
    assert [pod["containers"][0]["image"] for pod in pods] == ["x", "y"]
    assert all(pod["volumes"] == template["spec"]["volumes"] for pod in pods)
    assert all(pod["containers"][0]["volumeMounts"] == head["volumeMounts"] for pod in pods)
    assert "left out: lifecycle of a" in notes


RIGHT = {
    "torchrun --nproc_per_node=4 train.py --lr 1": (["train.py", "--lr", "1"], 4),
    "python -m torch.distributed.run --nproc-per-node 2 -m digits.train": (["-m", "digits.train"], 2),
    "torchrun --no-python --nproc_per_node 8 python3 -u train.py": (["train.py"], 8),
    "accelerate launch --num_processes 8 --mixed_precision bf16 train.py": (["train.py"], None),
    "deepspeed --num_gpus 4 train.py --deepspeed_config ds.json": (["train.py", "--deepspeed_config", "ds.json"], 4),
    "horovodrun -np 4 -H a:2,b:2 python train.py": (["train.py"], None),
    "python3 -c 'import a; a.b()'": (["-c", "import a; a.b()"], None),
    "pip install x; python -m pip install y && python train.py > log 2>&1": (["train.py"], None),
    "python prepare.py\ntorchrun train.py\npython eval.py": (["train.py"], None),
    "if [ -n x ]; then echo a; fi; exec python -u train.py | tee log": (["train.py"], None),
    "bash -lc 'cd /x && torchrun train.py'": (["train.py"], None),
    "torchrun --rdzv_endpoint=$(hostname -i):29500 train.py": (["train.py"], None),
}


@pytest.mark.parametrize("text", RIGHT)
def test_the_only_training_of_a_shell_is_started(text: str) -> None:
    launch = converted(["/bin/bash", "-c", text])
    assert (launch.command[1:], launch.processes) == RIGHT[text]


UNCLEAR = [
    "python -u train.py\npython eval.py",
    "python -m tools.export_model\nbash examples/launch_sft.sh",
    "./run.sh",
    "torchrun a.py\ntorchrun b.py",
    "if true; then python a.py; else python b.py; fi",
    "python train.py <<EOF\n1\nEOF",
    "python train.py 'unfinished",
    "srun python train.py",
    "tune run full_finetune",
    "",
]


@pytest.mark.parametrize("text", UNCLEAR)
def test_where_the_training_is_not_clear_no_program_is_guessed(text: str) -> None:
    launch = converted(["sh", "-ec", text])
    assert launch.command == ["heterotrain-run", "FILL-IN.py"]
    assert "replace FILL-IN.py" in launch.notes[0]
    for script in ("launch_sft.sh", "eval.py", "b.py"):
        assert script not in text or script in launch.notes[0]


@pytest.mark.parametrize(
    "words", [["/opt/nccl-tests/all_reduce"], ["bash", "train.sh"], ["torchrun", "--no-python", "x"]]
)
def test_another_program_than_a_script_is_not_started(words: list[str]) -> None:
    assert converted(words).command == ["heterotrain-run", "FILL-IN.py"]


def test_common_parts_with_differences_are_the_templates_again() -> None:
    one = {"spec": {"containers": [{"name": "a", "image": "x", "env": [{"name": "A", "value": "1"}]}], "volumes": []}}
    two = copy.deepcopy(one)
    two["spec"]["containers"][0] |= {"image": "y", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}
    two["spec"]["containers"].append({"name": "b", "image": "z"})
    base = common([one, two])
    assert [merged(base, differences(base, each)) for each in (one, two)] == [one, two]
