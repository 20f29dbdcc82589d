"""End-to-end tests on the real cluster of `make cluster`; chart and Prometheus are installed once for all tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab.cluster
import pytest
from heterotrain_core.contract import env
from lab import spot_node
from lab.cluster import REPOSITORY, Cluster, wait_for
from lab.install import install, this_cluster
from lab.jobs import Job, committed_steps, example, fresh_folder, script
from local_cluster import control
from support import patience
from support.lineage import lineage
from support.on_cluster import OF_POOL, OTHER_IMAGE, diagnostics, remove_namespace

EPOCH_SAMPLES = 1792
EPOCHS = 4
BATCH = 112
OPEN_ENDED = REPOSITORY / "deploy/dev/lab/training/open_ended.py"
PACE_S = 0.008
"""For each sample of an open-ended job: a step of a third of the batch takes 0.3 s, nearly all of it waiting."""
LIMITS = {"a100": "1", "v100": "1", "t4": "1"}
"""A whole processor for the start, in which PyTorch is imported."""
REQUEST = "100m"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder; a wait's own limit, which is patient, ends a test before this one does."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def installed() -> Iterator[Cluster]:
    """Yield the cluster with operator and Prometheus running; at the end, wait until the tests' namespaces are gone."""
    lab.cluster.clock = patience.now_s
    cluster = this_cluster()
    install(cluster)
    yield cluster
    wait_for(lambda: not leftovers(cluster), "the tests' namespaces to be gone", timeout_s=300)


def leftovers(cluster: Cluster) -> list[str]:
    """Return the tests' namespaces that are still being deleted."""
    found = {each["metadata"]["name"]: each["status"]["phase"] for each in cluster.list("namespaces")}
    return [name for name, phase in found.items() if name.startswith("e2e-") and phase == "Terminating"]


@dataclass(frozen=True, slots=True)
class Running:
    """A job of a test and the folder that its pods write to; ``epochs`` is ``None`` for an open-ended job."""

    job: Job
    folder: Path
    epochs: int | None
    epoch_samples: int

    def wait_steps(self, count: int, *, timeout_s: float = 180) -> None:
        """Wait until this many steps are committed according to the ranks' own logs, which needs no Prometheus."""

        def probe() -> bool:
            failed = self.job.condition("Failed")
            if failed.get("status") == "True":
                raise AssertionError(f"the job failed: {failed.get('message')}")
            return committed_steps(self.folder / "samples") >= count

        wait_for(probe, f"{count} committed steps of {self.job.name}", timeout_s=timeout_s)

    def steps(self) -> int:
        """Return the number of committed steps."""
        return committed_steps(self.folder / "samples")

    def wait_succeeded(self, *, timeout_s: float = 300) -> None:
        """Wait for success, then check that the job trained on every sample of every epoch exactly once."""
        self.job.wait_true("Succeeded", timeout_s=timeout_s)
        epochs = lineage(self.folder / "samples")
        if self.epochs is None:
            last = epochs.pop(max(epochs))  # incomplete: the job stops within this epoch
            assert len(last) == len(set(last))
        assert list(range(len(epochs) if self.epochs is None else self.epochs)) == sorted(epochs)
        for epoch, samples in epochs.items():
            assert list(range(self.epoch_samples)) == sorted(samples), f"epoch {epoch} lost or repeated samples"

    def stop(self) -> None:
        """Ask an open-ended job to stop, wait for its success and check its samples."""
        (self.folder / "enough").touch()
        self.wait_succeeded(timeout_s=180)


class Jobs:
    """Example jobs in namespaces of one test or module."""

    def __init__(self, installed: Cluster, owner: str) -> None:
        self._installed = installed
        self._base = re.sub(r"[^a-z0-9]+", "-", owner.lower().removeprefix("test_")).strip("-")[:40]
        self._jobs: list[Job] = []

    def start(
        self,
        name: str = "job",
        *,
        namespace: str = "",
        paces_s: Mapping[str, float] | None = None,
        epochs: int | None = EPOCHS,
        epoch_samples: int = EPOCH_SAMPLES,
        disk: str = "",
        other_image: str = "",
        uid: int | None = None,
        training_script: Path = OPEN_ENDED,
        edit: Callable[[dict[str, Any]], None] = lambda _: None,
        **changes: Any,
    ) -> Running:
        """Apply an example job; with ``epochs=None`` it trains until the test calls ``stop``.

        Open-ended jobs, and those with ``paces_s`` by pool, wait for each sample; others compute.
        ``disk`` is the size of a disk of each pod's own for checkpoints, such as 64Ki; by default they share a folder.
        ``other_image`` is a pool with an image, a command and a variable of its own. ``uid`` is the pods' user, in
        group 0, as OpenShift chooses it. ``training_script`` is that of a job with paces, and ``edit`` changes the
        manifest before it is applied.
        """
        cluster = Cluster(environment=self._installed.environment, namespace=f"e2e-{self._base}{namespace}")
        if not any(job.cluster.namespace == cluster.namespace for job in self._jobs):
            remove_namespace(cluster)
            cluster.run("kubectl", "create", "namespace", cluster.namespace)
            cluster.apply(script())
        folder = fresh_folder(f"{cluster.namespace}-{name}")
        (folder / "samples").mkdir()
        (folder / "samples").chmod(0o777)
        training = {"epochs": epochs or 1_000_000, "globalBatchSize": BATCH, **changes.pop("training", {})}
        is_paced = epochs is None or paces_s is not None
        ending = ["--until", "/checkpoints/enough", "--width", "4"] if is_paced else []
        manifest = example(
            name,
            arguments=["--samples-per-epoch", str(epoch_samples), *ending, *changes.pop("arguments", [])],
            training=training,
            limits=LIMITS,
            environment={env.SAMPLE_LOG_DIR: "/checkpoints/samples", "SAMPLE_SECONDS": str(PACE_S)},
            folder=str(folder),
            **changes,
        )
        for pool in manifest["spec"]["workerPools"]:
            pool["resources"]["requests"]["cpu"] = REQUEST
        give_paces(manifest, paces_s or {})
        if is_paced:
            replace_script(cluster, manifest, training_script)
        if uid is not None:
            manifest["spec"]["template"]["spec"]["securityContext"] = {
                "runAsUser": uid, "runAsGroup": 0, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
            }  # fmt: skip
        if disk:
            give_disk(manifest, disk)
        if other_image:
            give_image(cluster, manifest, other_image)
        edit(manifest)
        cluster.apply(manifest)
        job = Job(cluster, name)
        self._jobs.append(job)
        return Running(job, folder, epochs, epoch_samples)

    def print_diagnostics(self) -> None:
        """Print diagnostics of every job."""
        for job in self._jobs:
            print(diagnostics(job))

    def remove(self) -> None:
        """Delete every namespace without waiting for its pods to end, so that the next test can start meanwhile."""
        for namespace in {job.cluster.namespace for job in self._jobs}:
            remove_namespace(Cluster(environment=self._installed.environment, namespace=namespace), waits=False)
        self._jobs.clear()


Start = Callable[..., Running]


@pytest.fixture
def start(installed: Cluster, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Yield a function that starts a job in the test's own namespace; print diagnostics if the test fails."""
    jobs = Jobs(installed, request.node.name)
    yield jobs.start
    if getattr(request.node, "failed_call", False):
        jobs.print_diagnostics()
    jobs.remove()


@dataclass(slots=True)
class Shared:
    """An open-ended job that the tests of a module use one after the other."""

    jobs: Jobs
    running: Running | None = None
    failures: int = 0
    """Failures caused by the tests: the job must count exactly these."""

    def complete(self) -> Running:
        """Return the job with all workers in training; a new job if the last test has failed."""
        if self.running is None:
            self.failures = 0
            self.running = self.jobs.start(epochs=None, other_image="t4")
        self.running.job.wait_members(3, timeout_s=180)
        self.running.wait_steps(self.running.steps() + 3)
        return self.running

    def discard(self) -> None:
        """Print the job's diagnostics and delete it."""
        self.jobs.print_diagnostics()
        self.jobs.remove()
        self.running = None


@pytest.fixture(scope="module")
def shared(installed: Cluster, request: pytest.FixtureRequest) -> Iterator[Shared]:
    """Yield the job of the module's tests; after the last test, check every sample of the whole training."""
    found = Shared(Jobs(installed, request.node.name))
    yield found
    try:
        if found.running is not None:
            found.running.stop()
            assert found.running.job.status()["restarts"] == found.failures
    except BaseException:
        found.discard()
        raise
    found.jobs.remove()


@pytest.fixture
def running(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Running]:
    """Yield the shared job with three members; each test has to restore what it breaks."""
    yield shared.complete()
    if getattr(request.node, "failed_call", False):
        shared.discard()


def replace_script(cluster: Cluster, manifest: dict[str, Any], training_script: Path) -> None:
    """Make the job run another script, with the example's own script in the same folder."""
    name = f"{manifest['metadata']['name']}-script"
    files = {**script()["data"], training_script.name: training_script.read_text()}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files})
    pod = manifest["spec"]["template"]["spec"]
    pod["containers"][0]["command"][1] = f"/script/{training_script.name}"
    pod["volumes"][0]["configMap"]["name"] = name


def give_paces(manifest: dict[str, Any], paces_s: Mapping[str, float]) -> None:
    """Make pools wait for each sample, as devices of different speeds."""
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    for pool in manifest["spec"]["workerPools"]:
        if pool["name"] in paces_s:
            pace = {"name": "SAMPLE_SECONDS", "value": str(paces_s[pool["name"]])}
            pool["template"] = {"spec": {"containers": [{"name": container["name"], "env": [pace]}]}}


def give_image(cluster: Cluster, manifest: dict[str, Any], pool: str) -> None:
    """Make a pool's workers run the same image under another name, by another command and with another variable.

    Their grace period is shorter, too: tests wait for its end where no kubelet is left.
    """
    container = manifest["spec"]["template"]["spec"]["containers"][0]
    node = spot_node.node_of_pool(cluster, pool)
    control.name_image(node, f"docker.io/{container['image']}", OTHER_IMAGE)
    patch = {
        "name": container["name"],
        "image": OTHER_IMAGE,
        "command": ["env", f"FROM_COMMAND={OF_POOL['FROM_COMMAND']}", *container["command"]],
        "env": [{"name": "FROM_VARIABLE", "value": OF_POOL["FROM_VARIABLE"]}],
    }
    entry = next(each for each in manifest["spec"]["workerPools"] if each["name"] == pool)
    entry["template"] = {"spec": {"containers": [patch], "terminationGracePeriodSeconds": 15}}


def give_disk(manifest: dict[str, Any], size: str) -> None:
    """Make the job write its checkpoints, one a second, to a disk of this size."""
    pod = manifest["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "disk", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    pod["containers"][0]["volumeMounts"].append({"name": "disk", "mountPath": "/disk"})
    manifest["spec"]["checkpoint"] |= {"uri": "file:///disk", "intervalSeconds": 1}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Mark a failed test, so that the fixtures can print diagnostics before their clean-up."""
    outcome: Any = yield
    if outcome.get_result().when == "call" and outcome.get_result().failed:
        item.failed_call = True  # type: ignore[attr-defined]  # an additional mark on pytest's object
