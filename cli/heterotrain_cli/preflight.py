"""``heterotrain preflight``: checks of this machine, or of a job's workers in its pools, before a training."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

import click
from heterotrain_core.contract import env
from heterotrain_core.uris import has_credentials
from heterotrain_operator.cluster_state.containers import training_container
from rich.console import Console

from heterotrain_cli.bench.environment import lines_of
from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.submit import until_ended
from heterotrain_cli.cluster.target import Target, target_options
from heterotrain_cli.errors import InputError, UnavailableError
from heterotrain_cli.job_file import JobFile, read_job_file
from heterotrain_cli.output import TABLE, output_option, print_document

MODULE: Final = "heterotrain.preflight"
FAILED: Final = 3
"""Exit status when a check failed."""
SUFFIX: Final = "-preflight"
LIMIT_S: Final = 600
"""Time for the checks on a cluster, with the start of the workers."""
_MOST_NAME = 40
_VERDICTS = ("ok ", "skipped ", "warning ", "failed ")
_RANKS = re.compile(r"\[([^\]]+)\] (.*)")
_KEPT = ("elasticPolicy", "workerPools", "template", "managedBy")


@click.command()
@click.argument("path", metavar="[JOB.YAML]", required=False)
@click.option(
    "--store", metavar="URI", help="Folder of the checkpoints to write to and read from  [default: the job's]"
)
@click.option("--ranks", type=click.IntRange(1, 64), help="Without a job: ranks on this machine  [default: its GPUs]")
@click.option("--keep", is_flag=True, help="Keep the job that ran the checks.")
@click.option("--timeout", type=click.FloatRange(1), default=LIMIT_S, show_default=True, metavar="SECONDS",
              help="Longest time of the checks.")  # fmt: skip
@output_option
@target_options
def preflight(
    *, path: str | None, store: str | None, ranks: int | None, keep: bool, timeout: float, output: str, **target: Any
) -> None:
    """Check driver, CUDA, kernels, GPU memory, NCCL, /dev/shm, store, DNS, clock and network before a training.

    Without a job, it checks this machine. With one, it runs the checks in the job's own image and pools, as a short
    job of its own that is deleted afterwards, and measures the network between all of its workers.

    \b
    Examples:
      heterotrain preflight --store s3://bucket/digits
      heterotrain preflight job.yaml
      heterotrain preflight job.yaml -o json

    Exit status: 0 when no check failed; 1 without an answer from the cluster, or after --timeout; 2 for a mistake in
    the job; 3 when a check failed.
    """  # noqa: D301  # click reads the character \b
    if path is None:
        failed, said = _here(store, ranks, timeout, keep_output=output != TABLE)
        if output != TABLE:
            print_document(checks_document(said, failed=failed, job=None), output)
        raise SystemExit(FAILED if failed else 0)
    if ranks is not None:
        raise InputError("--ranks is for this machine: the pools of a job set the ranks of its workers")
    job = read_job_file(path)
    chosen = Target(**target)
    cluster = Cluster(replace(chosen, namespace=chosen.namespace or job.namespace))
    body = checking_job(job, store)
    name = str(cluster.create(body)["metadata"]["name"])
    click.echo(f"job {name} checks the workers in namespace {cluster.namespace}", err=True)
    try:
        view = until_ended(cluster, name, console=Console(stderr=True), timeout_s=timeout)
        found = list(results(cluster, name))
    finally:
        if not keep:
            cluster.delete(name)
    failed = view.status.state != "Succeeded"
    if output != TABLE:
        print_document(checks_document(found, failed=failed, job=name, reason=view.status.reason), output)
    else:
        click.echo("\n".join(found) if found else f"the workers wrote no results: {view.status.reason}")
    if failed:
        raise SystemExit(FAILED)


def checking_job(job: JobFile, store: str | None) -> dict[str, Any]:
    """Return the job that runs the checks in the workers of another one: its pools, its pods, its image.

    Args:
        job: the other one.
        store: folder of the checkpoints; ``None`` for the job's own.

    Raises:
        InputError: the folder's URI has credentials, which everybody would see who may read pods.
    """
    spec = {field: copy.deepcopy(job.body["spec"][field]) for field in _KEPT if field in job.body["spec"]}
    if store is not None and has_credentials(store):
        raise InputError(
            "--store must have no password and no query: the workers' pods get their credentials as the job's"
        )
    uri = store or (job.spec.checkpoint.uri if job.spec.checkpoint is not None else None)
    command = ["heterotrain-run", "-m", MODULE, *(["--store", uri] if uri else [])]
    template = spec["template"]
    main = training_container(template)
    main["command"] = command
    main.pop("args", None)
    for pool in spec["workerPools"]:
        for container in ((pool.get("template") or {}).get("spec") or {}).get("containers") or ():
            if container["name"] == main["name"]:  # what this pool would run instead of the checks
                container.pop("command", None)
                container.pop("args", None)
    spec |= {
        "runtime": "Torchrun", "backoffLimit": 0, "activeDeadlineSeconds": LIMIT_S, "cleanPodPolicy": "None",
        "preRunningDeadlineSeconds": LIMIT_S, "ttlSecondsAfterFinished": LIMIT_S,
    }  # fmt: skip
    metadata: Mapping[str, Any] = {
        key: job.body["metadata"][key] for key in ("namespace", "labels") if key in job.body["metadata"]
    }
    name = f"{job.name[:_MOST_NAME].rstrip('-.')}{SUFFIX}"
    return {
        **{key: job.body[key] for key in ("apiVersion", "kind")},
        "metadata": {**metadata, "name": name},
        "spec": spec,
    }


def checks_document(
    lines: Sequence[str], *, failed: bool, job: str | None, reason: str | None = None
) -> dict[str, Any]:
    """Return the results for programs.

    Args:
        lines: as ``python -m heterotrain.preflight`` writes them; other lines are left out.
        failed: whether a check failed, or the checks did not run.
        job: that ran the checks; ``None`` for this machine.
        reason: of the job's state.
    """
    checks = [
        {"check": line[9:23].strip(), "verdict": line[:8].strip(), "ranks": [], "result": line[24:]}
        for line in lines
        if line.startswith(_VERDICTS)
    ]
    for check in checks:
        if found := _RANKS.match(str(check["result"])):
            check |= {"ranks": found[1].split(", "), "result": found[2]}
    return {"passed": not failed, "job": job, "reason": reason, "checks": checks}


def results(cluster: Cluster, name: str) -> list[str]:
    """Return the lines that the checks of a job wrote: those of the worker with rank 0, which has all of them."""
    best: list[str] = []
    for pod in cluster.pods(name):
        try:
            found = [line.text for line in cluster.log_lines(pod) if line.text.startswith(_VERDICTS)]
        except (InputError, UnavailableError):  # a pod that never started has no log
            continue
        best = max(best, found, key=len)
    return best


def _here(store: str | None, ranks: int | None, timeout_s: float, *, keep_output: bool) -> tuple[bool, list[str]]:
    """Check this machine; return whether a check failed, and the lines of the results if they are kept.

    Raises:
        InputError: PyTorch is not installed.
        UnavailableError: the checks took too long.
    """
    if find_spec("torch") is None or find_spec("fsspec") is None:
        raise InputError("heterotrain preflight needs PyTorch: run pip install 'heterotrain[cli,trainer]'")
    count = ranks or max(1, len(lines_of("nvidia-smi", "--list-gpus")))  # without loading PyTorch here
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", MODULE, *(["--store", store] if store else [])]
    children = []
    for rank in range(count):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {name: value for name, value in os.environ.items() if not name.startswith(env.PREFIX)}
        environ |= {name: str(value) for name, value in own.items()} if count > 1 else {}
        children.append(
            subprocess.Popen(
                command, env=environ, stderr=None if rank == 0 else subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE if keep_output and rank == 0 else None,
            )
        )  # fmt: skip
    deadline_s = time.monotonic() + timeout_s
    try:
        said, _ = children[0].communicate(timeout=timeout_s)
        codes = [child.wait(max(0.0, deadline_s - time.monotonic())) for child in children]
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"the checks did not end within {timeout_s:.0f} s: --timeout gives more time") from None
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return any(codes), (said or "").splitlines()
