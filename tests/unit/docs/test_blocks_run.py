"""Commands and Python of README and documents: each block is run here, or listed with the reason why it is not.

Commands run in a shell, in a folder with the files that they name, and against a stub of the API server. Blocks that
need more are compiled, rendered or looked up as far as that goes. A new command fails the test until it has its place.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_cli.cluster import submit
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import ComputeTime, Member
from support.api_stub import ApiStub, serve
from support.helm import helm
from support.plans import plan_of

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "helm/heterotrain/README.md",
    ROOT / "deploy/dev/cluster/README.md",
]  # fmt: skip
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
JOBS = "/apis/heterotrain.dev/v1alpha1/namespaces/default/heterotrainjobs"
CONFIGS = "/api/v1/namespaces/default/configmaps"

RUN = (
    "heterotrain init train.py --image my/training --pool a100=2 --pool t4=6 --batch 512 --epochs 20 > job.yaml",
    "heterotrain init --example",
    "heterotrain validate job.yaml",
    "heterotrain submit job.yaml --wait",
    "heterotrain forecast --profile bench/profile.yaml --batch 448",
    "heterotrain forecast --profile gpus.yaml --batch 512",
    "heterotrain forecast job.yaml --profile pools.yaml --samples-per-epoch 50000",
    "heterotrain forecast job.yaml --cluster",
    "heterotrain forecast --model gpt.yaml --batch 64",
)
NOT_RUN: dict[str, tuple[str, ...]] = {
    "downloads packages": (
        "pip install torch --index-url https://download.pytorch.org/whl/cpu",
        "pip install '.[trainer,cli]' scikit-learn",
        "pip install 'heterotrain[cli,export]'",
    ),
    "trains for a minute or more; other tests run the same programs on smaller inputs": (
        "python digits/train.py --epochs 2 --samples-per-epoch 4480",
        "heterotrain bench digits/train.py --batch 448 --workers 1,2 --seconds 3",
        "heterotrain bench train.py --batch 512 --workers 1,2,4,8",
    ),
    "needs the checkpoint of a training; tests of the trainer export small ones": (
        "heterotrain export s3://bucket/digits/default-digits-UID weights.safetensors",
        (
            "heterotrain export checkpoints digits.onnx --model train.py:network --arguments '{\"width\": 44}' "
            "--input 'float32[2,1,16,16]'"
        ),
    ),
    "needs a registry": (
        (
            "docker build -f operator/Dockerfile -t REGISTRY/heterotrain-operator:0.1.0 . && "
            "docker push REGISTRY/heterotrain-operator:0.1.0"
        ),
        (
            "docker build -f trainer/Dockerfile --build-arg REQUIREMENTS=requirements/examples-cu12.txt "
            "-t REGISTRY/heterotrain-trainer:0.1.0 . && docker push REGISTRY/heterotrain-trainer:0.1.0"
        ),
    ),
    "needs a published release": (
        (
            "cosign verify ghcr.io/OWNER/heterotrain-operator:0.1.0 --certificate-oidc-issuer "
            "https://token.actions.githubusercontent.com --certificate-identity "
            "https://github.com/OWNER/heterotrain/.github/workflows/release.yaml@refs/tags/v0.1.0"
        ),
        (
            "helm install heterotrain oci://ghcr.io/OWNER/charts/heterotrain --version 0.1.0 -n heterotrain-system "
            "--create-namespace --set prometheus.url=http://prometheus.monitoring.svc:9090"
        ),
        "kubectl apply --server-side -f https://github.com/OWNER/heterotrain/releases/download/v0.1.0/heterotrain.yaml",
    ),
    "needs a cluster": (
        "kubectl create configmap digits-script --from-file deploy/examples/digits/train.py",
        "kubectl apply -f deploy/examples/digits/job.yaml",
        (
            "sed s,heterotrain/trainer:dev,REGISTRY/heterotrain-trainer:0.1.0, deploy/examples/digits/job.yaml | "
            "kubectl apply -f -"
        ),
        "kubectl get htj digits -w",
        "kubectl get htj decoder -o jsonpath='{.status.plan.layout}'",
        "kubectl explain htj.spec --recursive",
        "kubectl explain htj.spec.training.rebalance.boundary",
        "kubectl scale htj/digits --replicas=4",
        (
            "kubectl create quota training -n team-b "
            "--hard=requests.nvidia.com/gpu=8,count/heterotrainjobs.heterotrain.dev=20"
        ),
        "kubectl taint nodes NODE node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        "kubectl delete htj --all -A",
        "kubectl delete crd heterotrainjobs.heterotrain.dev",
        "kubectl delete namespace heterotrain-system",
        "helm uninstall heterotrain -n heterotrain-system",
        "helm test heterotrain -n heterotrain-system",
    ),
    "needs the emulated cluster, which takes minutes and root": (
        'eval "$(PYTHONPATH=deploy/dev/cluster .venv/bin/python -m local_cluster env)"',
        "export PYTHONPATH=deploy/dev/cluster",
        "python -m local_cluster status",
        "python -m local_cluster images load",
        "python -m local_cluster power-off heterotrain-worker3",
        "python -m local_cluster unplug heterotrain-worker2",
        'eval "$(python -m local_cluster env)"',
    ),
}
"""Commands by the reason why they are not run. Targets of make are looked up, and charts are rendered, instead."""
NOT_COMMANDS = {
    "CONTRIBUTING.md": ("Allocation: keep a worker",),
    "docs/command-line.md": ("ok       driver",),
    "docs/forecast.md": ("the fastest one: at most",),
    "docs/watching-a-job.md": ("2026-11-21 19:43:27", "epoch 4 of 8", "WARNING step 7"),
}
"""First words of blocks that show a text or an output, by document."""
PARTS_OF_SCRIPTS = (
    "README.md", "docs/large-models.md", "docs/numerics.md", "docs/other-libraries.md", "docs/training-loop.md",
)  # fmt: skip
"""Documents whose blocks of Python are parts of training scripts, without a model and data of their own: another test
compiles them, and the guides' whole scripts are run by `make test-all PART=guides`."""

PROFILE = "members:\n- {name: a100, perSampleSeconds: 0.001}\n- {name: t4, perSampleSeconds: 0.01}\n"
JOB = {
    "apiVersion": "heterotrain.dev/v1alpha1", "kind": "HeteroTrainJob", "metadata": {"name": "digits"},
    "spec": {
        "training": {"globalBatchSize": 60, "epochs": 8},
        "workerPools": [{"name": "a100", "maxReplicas": 2}, {"name": "t4", "maxReplicas": 3}],
        "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
    },
}  # fmt: skip
FINISHED = {
    "state": "Succeeded", "reason": "Training is complete", "step": 20, "loss": 0.25,
    "startTime": "2026-11-22T10:00:00Z", "completionTime": "2026-11-22T10:03:04Z",
}  # fmt: skip


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield document, language and text of each block."""
    for path in DOCUMENTS:
        for language, text in BLOCK.findall(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), language, text


def commands() -> list[str]:
    """Return the commands of all blocks without a language, each on one line and without its comment."""
    found = dict[str, None]()
    for document, language, text in blocks():
        if language or text.startswith(NOT_COMMANDS.get(document, ("\0",))):
            continue
        lines = [line.strip() for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines() if line.strip()]
        shown = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found |= dict.fromkeys(re.sub(r"\s+#.*$", "", line) for line in shown or lines)
    return list(found)


def is_make(command: str) -> bool:
    return command.startswith("make ")


def is_chart(command: str) -> bool:
    return command.startswith(("helm install", "helm upgrade")) and "oci://" not in command


def test_every_command_is_run_or_listed_with_a_reason() -> None:
    listed = {*RUN, *(command for each in NOT_RUN.values() for command in each)}
    found = {command for command in commands() if not is_make(command) and not is_chart(command)}
    assert sorted(found - listed) == [], "give each command a place in RUN or NOT_RUN"
    assert sorted(listed - found) == [], "no document has these any more"


def test_every_text_that_is_not_a_command_is_there() -> None:
    texts = [(document, text) for document, language, text in blocks() if not language]
    for document, beginnings in NOT_COMMANDS.items():
        for beginning in beginnings:
            assert any(document == where and text.startswith(beginning) for where, text in texts), beginning


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStub]:
    """An API server on which every created job has succeeded, with one running job."""
    compute = ComputeTime(per_sample_s=0.01, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    members = tuple(Member(index=index, pool="a100", share_samples=30, compute=compute) for index in range(2))
    plan = encode_plan(plan_of([30, 30], job_uid="uid-digits", members=members))
    found = ApiStub(objects={f"{CONFIGS}/digits-plan": {"data": {"plan.json": plan}}})
    answer = found.answer

    def with_status(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        status, made = answer(method, path, query, body)
        if method == "GET" and status == 200 and path.startswith(f"{JOBS}/"):
            made = {**made, "status": FINISHED}
        return status, made

    found.answer = with_status  # type: ignore[method-assign]  # the operator's part
    monkeypatch.setattr(submit, "LOOK_S", 0.0)
    with serve(found, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield found


def yaml_of(document: str, word: str) -> str:
    """Return the one block of YAML in a document that has this word."""
    (found,) = [text for where, language, text in blocks() if (where, language) == (document, "yaml") and word in text]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the commands name; those of docs/forecast.md are the document's own."""
    files = {
        "train.py": "import heterotrain\n", "job.yaml": yaml.safe_dump(JOB), "bench/profile.yaml": PROFILE,
        "pools.yaml": PROFILE, "gpus.yaml": yaml_of("docs/forecast.md", "gamma:"),
        "gpt.yaml": yaml_of("docs/forecast.md", "boundaryBytes"),
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / "here" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / ".krew/bin").mkdir(parents=True)
    return tmp_path / "here"


@pytest.mark.parametrize("command", RUN)
def test_the_command_works(command: str, folder: Path, stub: ApiStub) -> None:
    if "--cluster" in command:
        stub.objects[f"{JOBS}/digits"] = {**JOB, "metadata": {"name": "digits", "uid": "uid-digits"}}
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": programs, "HOME": str(folder.parent), "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "> " not in command:
        assert done.stdout.strip()


@pytest.mark.parametrize("command", [each for each in commands() if is_make(each)])
def test_the_target_of_make_exists(command: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = [word for word in command.split()[1:] if "=" not in word]
    assert named
    assert set(named) <= targets


@pytest.mark.needs_program("helm")
@pytest.mark.parametrize("command", [each for each in commands() if is_chart(each)])
def test_the_chart_renders_with_these_values(command: str, folder: Path) -> None:
    """``helm template`` instead of install or upgrade: the values pass the chart's schema."""
    done = subprocess.run(
        ["bash", "-euc", f"set -- {command}; printf '%s\\n' \"$@\""], capture_output=True, text=True, check=True
    )
    _, _, release, chart, *options = done.stdout.splitlines()
    options = [each for each in options if each not in ("--create-namespace", "--reset-then-reuse-values")]
    rendered = helm("template", release, str(ROOT / chart), "--kube-version", "1.36.0", *options)
    assert rendered.returncode == 0, rendered.stderr
    assert list(yaml.safe_load_all(rendered.stdout))


def test_python_of_the_client_runs(folder: Path, stub: ApiStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/command-line.md one after the other, as cells of a notebook would run."""
    texts = [
        text for document, language, text in blocks() if (document, language) == ("docs/command-line.md", "python")
    ]
    assert len(texts) == 2
    monkeypatch.chdir(folder)
    (folder / "notebook.py").write_text("\n\n".join(texts), encoding="utf-8")
    done = runpy.run_path("notebook.py")
    assert done["job"].name == "train"
    made = [path for method, path, _, _ in stub.requests if method == "POST"]
    assert made == [JOBS, CONFIGS, JOBS, CONFIGS]


def test_every_other_block_of_python_is_a_part_of_a_script() -> None:
    others = {document for document, language, _ in blocks() if language == "python"} - {"docs/command-line.md"}
    assert others == set(PARTS_OF_SCRIPTS)
