"""``heterotrain init``: jobs from manifests of other projects, each accepted by the job's own checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from heterotrain_cli.job_file import JobFile, read_job_file
from heterotrain_cli.main import main
from support.cli_runner import CliRunner

FOREIGN = Path(__file__).with_name("foreign")


def init(*arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(main, ["init", *arguments], catch_exceptions=False, **more)


def job(tmp_path: Path, name: str, *arguments: str) -> tuple[JobFile, str]:
    """Return the job for a manifest, read again from its text, and the notes."""
    result = init("--from", str(FOREIGN / f"{name}.yaml"), *arguments)
    assert result.exit_code == 0, result.output
    path = tmp_path / "job.yaml"
    path.write_text(result.stdout)
    return read_job_file(str(path)), result.stderr


def command(found: JobFile) -> list[str]:
    """Return the command of the container that trains."""
    (container,) = found.body["spec"]["template"]["spec"]["containers"]
    words: list[str] = container["command"]
    return words


EXPECTED: dict[str, tuple[str, dict[str, int], tuple[int, int], list[str]]] = {
    "pytorchjob-ddp": ("digits-ddp", {"workers": 4}, (4, 4), ["/app/train.py", "--epochs", "20"]),
    "pytorchjob-elastic": ("elastic-bert", {"worker": 6}, (2, 6), ["-m", "bert.train", "--lr", "1e-4"]),
    "pytorchjob-two-kinds": ("mixed-job", {"master": 1, "worker": 2}, (3, 3), ["/app/train.py"]),
    "pytorchjob-queue": ("two-roles", {"master": 1, "worker": 2}, (3, 3), []),
    "mpijob": ("bert-deepspeed", {"workers": 2}, (2, 2), ["/app/train.py", "--deepspeed"]),
    "trainjob-initializers": ("grpo", {"workers": 2}, (2, 2), ["-c", "import grpo; grpo.main()"]),
    "skypilot-pod-config": ("mingpt-amd", {"mi300": 2}, (2, 2), ["main.py", "--epochs", "$(EPOCHS)"]),
    "trainjob": ("digits", {"workers": 2}, (2, 2), ["train.py", "--epochs", "20"]),
    "trainjob-cpu": ("cpu", {"workers": 4}, (4, 4), ["-m", "digits.train"]),
    "trainjob-patched": ("patched", {"workers": 3}, (3, 3), ["train.py"]),
    "rayjob": ("ray-digits", {"a100-group": 4, "t4-group": 2}, (1, 6), ["/app/train.py", "--epochs", "20"]),
    "rayjob-head-only": ("small", {"head": 1}, (1, 1), ["main.py", "--out", "$OUT"]),
    "skypilot-ddp": ("mingpt", {"a100": 2}, (2, 2), ["main.py", "--epochs", "20"]),
    "skypilot-any-of": ("finetune", {"h100": 1, "a100": 1}, (1, 2), ["finetune.py", "--model", "$MODEL"]),
    "skypilot-cpu": ("task", {"cpu": 1}, (1, 1), ["-m", "tabular.train", "--seed", "1"]),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_manifest_becomes_a_valid_job(tmp_path: Path, name: str) -> None:
    """Name, pools, limits and the script with its own arguments are taken over; launchers' options are not."""
    called, pools, limits, words = EXPECTED[name]
    found, _ = job(tmp_path, name)
    elastic = found.spec.elastic_policy
    assert found.name == called
    assert {pool.name: pool.max_replicas for pool in found.spec.worker_pools} == pools
    assert (elastic.min_replicas, elastic.max_replicas) == limits
    assert not words or command(found) == ["heterotrain-run", *words]
    assert found.spec.runtime == "Torchrun"


def test_every_manifest_is_tested() -> None:
    assert sorted(path.stem for path in FOREIGN.glob("*.yaml")) == sorted(EXPECTED)
    assert len(EXPECTED) >= 10


def test_nodes_resources_and_the_rest_of_the_pod_are_kept(tmp_path: Path) -> None:
    found, _ = job(tmp_path, "pytorchjob-elastic")
    (pool,) = found.body["spec"]["workerPools"]
    assert pool["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pool["resources"] == {"limits": {"nvidia.com/gpu": 4}, "requests": {"cpu": "16", "memory": "64Gi"}}
    assert "numProcPerWorker" not in pool, "the accelerators give it"
    pod = found.body["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    assert "resources" not in pod["containers"][0]
    found, _ = job(tmp_path, "pytorchjob-ddp")
    assert found.namespace == "vision"
    assert found.spec.backoff_limit == 3
    (container,) = found.body["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "DATA", "value": "/data"}], "the launcher sets the others"
    found, _ = job(tmp_path, "trainjob-cpu")
    assert found.body["spec"]["workerPools"][0]["numProcPerWorker"] == 2
    assert found.spec.suspend


def test_changes_of_a_train_jobs_training_pods_are_kept_and_those_of_its_initializers_are_not(tmp_path: Path) -> None:
    """Trainer 2.2 has runtimePatches in place of podTemplateOverrides."""
    found, _ = job(tmp_path, "trainjob-patched")
    (pool,) = found.body["spec"]["workerPools"]
    assert pool["nodeSelector"] == {"gpu": "v100"}
    assert pool["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    pod = found.body["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "data", "mountPath": "/data"}]
    assert pod["containers"][0]["env"] == [{"name": "A", "value": "b"}, {"name": "DATA", "value": "/data"}]
    assert found.spec.active_deadline_seconds == 3600
    older = yaml.safe_load((FOREIGN / "trainjob-cpu.yaml").read_text())
    older["spec"]["podTemplateOverrides"].append(
        {"targetJobs": [{"name": "dataset-initializer"}], "spec": {"nodeSelector": {"pool": "downloads"}}}
    )
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(older))
    written = yaml.safe_load(init("--from", str(tmp_path / "older.yaml")).stdout)
    assert written["spec"]["workerPools"][0]["nodeSelector"] == {"pool": "cpu"}


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("pytorchjob-ddp", ["the number of workers is fixed"]),
        ("trainjob-cpu", ["the image is not named there: replace FILL-IN/IMAGE", "what the runtime torch-distributed"]),
        (
            "rayjob",
            ["Ray does not run in the job", "runtimeEnvYAML is left out", "the head.container.image: rayproject/ray"],
        ),
        ("rayjob-head-only", ["left out: the shell command pip install x", "variables of a shell"]),
        ("skypilot-ddp", ["setup is left out", "workdir is left out", "the shell command export MASTER="]),
        ("skypilot-any-of", ["file_mounts is left out", "SkyPilot takes one of several accelerators"]),
    ],
)
def test_what_cannot_be_taken_over_is_said(tmp_path: Path, name: str, sentences: list[str]) -> None:
    _, notes = job(tmp_path, name)
    assert [each for each in sentences if each not in notes] == [], notes


def test_with_a_batch_the_job_is_for_a_script_that_uses_heterotrain(tmp_path: Path) -> None:
    found, notes = job(tmp_path, "pytorchjob-ddp", "--batch", "512", "--epochs", "20", "--name", "mine")
    assert (found.name, found.spec.training.global_batch_size, found.spec.training.epochs) == ("mine", 512, 20)
    assert found.spec.runtime == "HeteroTrain"
    assert "the script has to use heterotrain" in notes


def test_a_training_by_steps_needs_a_batch(tmp_path: Path) -> None:
    found, _ = job(tmp_path, "pytorchjob-ddp", "--batch", "512", "--steps", "5000")
    assert (found.spec.training.epochs, found.spec.training.steps) == (None, 5000)
    refused = init("train.py", "--image", "x", "--pool", "a=1", "--steps", "9")
    assert "--steps needs --batch" in refused.stderr


def test_the_third_answer_is_batch_and_epochs() -> None:
    answers = "my/training\na100=2\n"
    options = ("--image", "my/training", "--pool", "a100=2", "--batch", "512")
    for third, more in (("512 20", ("--epochs", "20")), ("512", ())):
        asked, given = init("train.py", input=f"{answers}{third}\n"), init("train.py", *options, *more)
        assert asked.exit_code == given.exit_code == 0
        assert yaml.safe_load(asked.stdout) == yaml.safe_load(given.stdout)
    for wrong in ("many", "512 20 3", "0"):
        refused = init("train.py", input=f"{answers}{wrong}\n")
        assert refused.exit_code == 2
        assert f"{wrong} is no batch with epochs: write whole numbers, such as 512 20" in refused.stderr


def test_a_script_and_the_answers_to_three_questions_give_a_job(tmp_path: Path) -> None:
    asked = init("train.py", input="my/training\na100=2 t4=6\n\n")
    given = init("train.py", "--image", "my/training", "--pool", "a100=2", "--pool", "t4=6")
    assert asked.exit_code == given.exit_code == 0
    assert yaml.safe_load(asked.stdout) == yaml.safe_load(given.stdout)
    path = tmp_path / "job.yaml"
    path.write_text(given.stdout)
    found = read_job_file(str(path))
    assert {pool.name: pool.max_replicas for pool in found.spec.worker_pools} == {"a100": 2, "t4": 6}
    assert command(found) == ["heterotrain-run", "train.py"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: Deployment\n", "kind Deployment cannot be converted: known are PyTorchJob, TrainJob, RayJob"),
        ("kind: PyTorchJob\nspec: {}\n", "not a complete PyTorchJob, because it has no pytorchReplicaSpecs: add it"),
        ("kind: PyTorchJob\nspec: []\n", "not a complete PyTorchJob, because spec is not an object: correct it"),
        ("kind: RayJob\nspec: {rayClusterSpec: {}}\n", "not a complete RayJob"),
        ("kind: TrainJob\n---\nkind: TrainJob\n", "holds 2 jobs: give one at a time"),
        ("- 1\n", "holds no manifest"),
        ("resources: [1]\nrun: x\n", "not a complete SkyPilot task"),
        ("run: python train.py\nnum_nodes: 99999\n", "the source gives a job with a mistake"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "foreign.yaml"
    path.write_text(text)
    result = init("--from", str(path))
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_names_of_yaml_for_billions_of_values_are_left_out_in_few_lines(tmp_path: Path) -> None:
    """Each line of a manifest may stand for nine times the line before it."""
    objects = [f"a{n}: &a{n} {{{', '.join(f'k{k}: *a{n - 1}' for k in range(9))}}}" for n in range(1, 12)]
    lists = [f"b{n}: &b{n} [{', '.join(9 * [f'*b{n - 1}'])}]" for n in range(1, 12)]
    container = "{name: a, image: x, command: [python, t.py]}"
    worker = f"{{replicas: 2, template: {{spec: {{containers: [{container}]}}}}}}"
    specs = f"{{extra: *a11, more: *b11, pytorchReplicaSpecs: {{Worker: {worker}}}}}"
    path = tmp_path / "foreign.yaml"
    path.write_text("\n".join([
        "a0: &a0 {k: x}", "b0: &b0 [x]", *objects, *lists, "kind: PyTorchJob", "metadata: {name: x}", f"spec: {specs}",
    ]))  # fmt: skip
    result = init("--from", str(path))
    assert result.exit_code == 0, result.stderr
    assert 200 < result.stderr.count("\n") < 220
    assert max(map(len, result.stderr.splitlines())) < 300


def test_a_needed_answer_is_asked_for_again_and_the_end_of_the_input_is_a_sentence() -> None:
    asked = init("train.py", "--pool", "a100=2", "--batch", "512", input="\n\nmy/training\n")
    assert asked.exit_code == 0, asked.stderr
    assert asked.stderr.count("Image of the workers") == 3
    ended = init("train.py", "--pool", "a100=2", "--batch", "512", input="\n")
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.endswith("ended: give --image and --pool as options, and --batch with --epochs\n")


def test_the_example_is_written_once_and_its_job_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = init("--example")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "digits/job.yaml, digits/train.py" in result.stdout
    assert read_job_file("digits/job.yaml").name == "digits"
    again = init("--example")
    assert again.exit_code == 2
    assert again.stderr == "Error: digits exists already: remove it, or run this in another folder\n"
    assert init("--example", "train.py").exit_code == 2


def test_a_script_that_uses_heterotrain_gets_no_note_to_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = ("train.py", "--image", "i", "--pool", "a=1", "--batch", "8")
    for text, noted in (("import heterotrain", False), ("import torch", True)):
        Path("train.py").write_text(text)
        assert ("has to use heterotrain" in init(*line).stderr) == noted
