"""Mistakes that people make: each answer is one sentence that says what is wrong and what to do.

Foreign text in it is at most 60 characters long, and no answer has a traceback or the usage of another program.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_cli.main import COMMANDS, main
from support.cli_runner import CliRunner

LONG = "x" * 500
JOB: dict[str, Any] = yaml.safe_load("""
apiVersion: heterotrain.dev/v1alpha1
kind: HeteroTrainJob
metadata: {name: digits}
spec:
  training: {globalBatchSize: 60, epochs: 8}
  elasticPolicy: {minReplicas: 2}
  checkpoint: {uri: "s3://bucket/digits"}
  workerPools:
  - {name: a100, maxReplicas: 2, nodeSelector: {gpu: a100}}
  - {name: t4, maxReplicas: 2}
  template:
    spec:
      containers:
      - {name: trainer, image: my/training, command: [heterotrain-run], args: [train.py]}
""")
PROFILE = "members: [{name: a100, perSampleSeconds: 0.001}, {name: t4, perSampleSeconds: 0.01}]\n"


def in_spec(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["spec"].update(fields)


def in_training(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["spec"]["training"].update(fields)


def in_pool(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["spec"]["workerPools"][1].update(fields)


IN_A_JOB: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (in_pool(minReplica=2), "spec.workerPools[1].minReplica is not a field: did you mean minReplicas?"),
    (in_training(globalBatchsize=60), "spec.training.globalBatchsize is not a field: did you mean globalBatchSize?"),
    (in_spec(templates={}), "spec.templates is not a field: did you mean template?"),
    (in_training(globalBatchSize="lots"), 'spec.training.globalBatchSize must be a whole number, not "lots"'),
    (in_training(globalBatchSize="448"), 'must be a whole number, not "448": remove the quotes, 448'),
    (in_spec(activeDeadlineSeconds="1h"), 'spec.activeDeadlineSeconds must be a whole number, not "1h": write 3600'),
    (in_spec(activeDeadlineSeconds="10 min"), 'must be a whole number, not "10 min": write 600'),
    (in_pool(pricePerHour=3.67), 'spec.workerPools[1].pricePerHour must be text, not 3.67: put it in quotes, "3.67"'),
    (in_pool(pricePerHour="$3.67"), 'is "$3.67", but must be a number such as "3.67", without a currency'),
    (in_pool(name="T4"), 'spec.workerPools[1].name is "T4", but must be lower-case letters, digits and hyphens'),
    (in_spec(checkpoint={"uri": "/checkpoints"}), 'is "/checkpoints", but must be a URI such as file:///checkpoints'),
    (in_spec(deadline="tomorrow"), 'spec.deadline must be a time such as 2027-01-31T18:00:00Z, not "tomorrow"'),
    (in_pool(resources={"limits": {"memory": "512MB"}}), "'512MB' is not a quantity: write a number of at least 0"),
    (in_pool(capacityType="spot"), 'is "spot", but must be one of OnDemand, Spot'),
    (in_pool(capacityType=LONG), "but must be one of OnDemand, Spot"),
    (lambda body: body["metadata"].update(name="Digits_1"), "metadata.name has to start with a letter, contain only"),
    (lambda body: body["spec"]["template"]["spec"].update(restartPolicy="OnFailure"), "restartPolicy out"),
    (lambda body: body.update(apiVersion="v1"), "apiVersion is 'v1', but must be heterotrain.dev/v1alpha1"),
    *(
        (lambda body, kind=kind: body.update(kind=kind),
         f"job.yaml: holds a {kind}: `heterotrain init --from job.yaml` writes a HeteroTrainJob from it")
        for kind in ("PyTorchJob", "TrainJob", "RayJob")
    ),
    (lambda body: body.update(kind=LONG), "must hold exactly one HeteroTrainJob, but holds xxx"),
]  # fmt: skip
FILES: list[tuple[str | bytes, str]] = [
    ("resources: {accelerators: 'A100:1'}\nrun: python train.py\n", "holds a SkyPilot task: `heterotrain init --from"),
    ("a: [1\nb: 2\n", "is neither YAML nor JSON: correct line 2, column 2 (expected"),
    ("a: 1\na: 2\n", "the key a appears twice: keep one (line 2)"),
    ("", "must hold exactly one HeteroTrainJob, but holds no object: `heterotrain init SCRIPT.PY` writes one"),
    (b"\xff\xfe\x00", "is not UTF-8 text: write it as YAML or JSON"),
    (PROFILE, "must hold one HeteroTrainJob, but this is a file for `heterotrain forecast`"),
    (f"kind: HeteroTrainJob\n---\n{yaml.safe_dump(JOB)}", "holds 2 objects of kind HeteroTrainJob: give one file for"),
]
COMMAND_LINES: list[tuple[str, str]] = [
    ("validate nosuch.yaml", "nosuch.yaml: there is no such file: check the path"),
    ("validate .", ".: is a folder: name a file in it"),
    ("submit job.yaml --timeout 10", "--timeout needs --wait"),
    ("get digits -A", "a name and --all-namespaces exclude each other: remove one of them"),
    ("scale digits", "the number of workers is missing: give N, or --pool POOL=N"),
    ("plot digits -o x.bmp", "x.bmp has no known format: end it with one of .png, .svg, .pdf"),
    ("init", "give either a SCRIPT.PY, --from FILE or --example"),
    ("init --from job.yaml", "job.yaml: is a HeteroTrainJob already: `heterotrain submit job.yaml` creates it"),
    ("forecast job.yaml --profile profile.yaml --cluster", "--profile and --cluster both give speeds: remove one"),
    ("forecast job.yaml --profile profile.yaml -n ml", "--namespace belongs to --cluster: a profile is not"),
    ("forecast job.yaml --profile profile.yaml --context c", "--context belongs to --cluster: a profile is not from"),
    ("forecast --profile profile.yaml --batch 8 --kubeconfig c", "--cluster, --kubeconfig and --samples-per-epoch"),
    ("forecast digits --cluster --kubeconfig nosuch", "no access to a cluster (there is no file nosuch)"),
    ("forecast - --profile -", "only one of job and profile can be standard input: name a file for the other one"),
    ("forecast profile.yaml --profile job.yaml", "job.yaml: is a Kubernetes HeteroTrainJob, but must be a heterotrain"),
    ("forecast digits --cluster", "no access to a cluster (there is no file "),
    ("plot digits -o x.png --prometheus prometheus:9090", "no access to a cluster (there is no file "),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a job and a profile, and no cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "profile.yaml").write_text(PROFILE)


def sentence(*arguments: str) -> str:
    """Return the answer to a mistake: one line on standard error, after click's usage where the command line has it."""
    result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code in (1, 2), result.output
    assert result.stdout == ""
    usage, _, said = result.stderr.rpartition("Error: ")
    assert not usage or usage.startswith("Usage: ")
    assert said.count("\n") == 1, result.stderr
    assert not re.search(r"Traceback|pydantic|Errno|unicode string", result.stderr)
    assert "x" * 61 not in result.stderr, "it quotes too much"
    return said.rstrip("\n")


@pytest.mark.parametrize(("change", "expected"), IN_A_JOB, ids=[expected[:60] for _, expected in IN_A_JOB])
def test_in_a_job(change: Callable[[dict[str, Any]], None], expected: str) -> None:
    body = copy.deepcopy(JOB)
    change(body)
    Path("job.yaml").write_text(yaml.safe_dump(body))
    assert expected in sentence("validate", "job.yaml")


@pytest.mark.parametrize(("content", "expected"), FILES, ids=[expected[:60] for _, expected in FILES])
def test_in_a_file(content: str | bytes, expected: str) -> None:
    Path("given.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in sentence("validate", "given.yaml")


@pytest.mark.parametrize(("line", "expected"), COMMAND_LINES, ids=[line[:60] for line, _ in COMMAND_LINES])
def test_on_the_command_line(line: str, expected: str) -> None:
    assert sentence(*line.split()).startswith(expected)


def test_without_arguments_the_answer_is_the_help() -> None:
    result = CliRunner().invoke(main, [])
    assert "Commands:" in result.output
    assert "Error" not in result.output


def test_the_help_names_every_command_in_a_line_that_is_not_cut() -> None:
    lines = CliRunner().invoke(main, ["--help"]).stdout.splitlines()
    for name, (_, caption) in COMMANDS.items():
        assert f"  {name:<12}{caption}" in lines


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example(name: str) -> None:
    told = CliRunner().invoke(main, [name, "--help"]).stdout
    assert re.search(rf"\n  Examples?:\n(?:    .*\n)*?    .*heterotrain {name}\b", told)
    assert "Exit status: 0" in told


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["--version"], 0, "heterotrain-run, version "),
        (["nosuch.py"], 2, "heterotrain-run: there is no file nosuch.py in "),
        (["--nproc", "2", "train.py"], 2, "heterotrain-run: --nproc is an option of torchrun, which starts several"),
        (["--epochs", "2"], 2, "heterotrain-run: --epochs is not an option: name the script first, and its own"),
        ([f"--{LONG}"], 2, "heterotrain-run: --xxx"),
    ],
)
def test_of_the_launcher(arguments: list[str], status: int, expected: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HETEROTRAIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "heterotrain.launch", *arguments], env=environ, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    answer = done.stdout + done.stderr
    assert (done.returncode, answer.count("\n")) == (status, 1), answer
    assert answer.startswith(expected)
    assert "x" * 61 not in answer


def test_a_missing_script_is_the_outcome_of_its_pod(tmp_path: Path) -> None:
    """The operator puts it into the job's status."""
    from heterotrain_core.contract import env  # noqa: PLC0415  # only here
    from heterotrain_core.contract.outcome import Ending, decode_outcome  # noqa: PLC0415  # only here

    file = tmp_path / "outcome"
    environ = {**os.environ, env.JOB_UID: "u", env.TERMINATION_PATH: str(file)}
    command = [sys.executable, "-m", "heterotrain.launch", "nosuch.py"]
    assert subprocess.run(command, env=environ, capture_output=True, check=False).returncode == 2
    outcome = decode_outcome(file.read_text())
    assert outcome is not None
    assert outcome.ending is Ending.FAILED
    assert outcome.reason.startswith("heterotrain-run: there is no file nosuch.py in ")
