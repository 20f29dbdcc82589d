"""End-to-end: the real cluster of `make cluster`, with the chart and Prometheus installed once for all tests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from heterotrain.data.sample_log import lineage
from heterotrain_core.contract import env
from lab.cluster import REPOSITORY, Cluster, ClusterError, wait_for
from lab.install import OPERATOR_NAMESPACE, install, this_cluster
from lab.jobs import Job, committed_steps, example, fresh_folder, script

EPOCH_SAMPLES = 1792
EPOCHS = 4
BATCH = 112
OPEN_ENDED = REPOSITORY / "deploy/dev/lab/training/open_ended.py"
EVEN_LIMITS = {"a100": "500m", "v100": "500m", "t4": "500m"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder; each may take minutes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def installed() -> Iterator[Cluster]:
    """Return the cluster with operator and Prometheus running; in the end nothing of the tests' jobs is left."""
    cluster = this_cluster()
    install(cluster)
    yield cluster
    wait_for(lambda: not leftovers(cluster), "the tests' namespaces to be gone", timeout_s=120)


def leftovers(cluster: Cluster) -> list[str]:
    """Return the tests' namespaces that are on their way out."""
    found = {each["metadata"]["name"]: each["status"]["phase"] for each in cluster.list("namespaces")}
    return [name for name, phase in found.items() if name.startswith("e2e-") and phase == "Terminating"]


@dataclass(frozen=True, slots=True)
class Running:
    """A job of a test, and the folder that its pods write; ``epochs`` is ``None`` where it trains until it is ended."""

    job: Job
    folder: Path
    epochs: int | None
    epoch_samples: int

    def wait_steps(self, count: int, *, timeout_s: float = 90) -> None:
        """Wait until this many steps are committed, by the ranks' own logs: that works without Prometheus, too."""

        def probe() -> bool:
            failed = self.job.condition("Failed")
            if failed.get("status") == "True":
                raise AssertionError(f"the job failed: {failed.get('message')}")
            return committed_steps(self.folder / "samples") >= count

        wait_for(probe, f"{count} committed steps of {self.job.name}", timeout_s=timeout_s)

    def steps(self) -> int:
        """Return how many steps are committed."""
        return committed_steps(self.folder / "samples")

    def wait_succeeded(self, *, timeout_s: float = 180) -> None:
        """Wait for success and hold the job to account: every sample of every epoch exactly once."""
        self.job.wait_true("Succeeded", timeout_s=timeout_s)
        epochs = lineage(self.folder / "samples")
        if self.epochs is None:
            last = epochs.pop(max(epochs))  # it ends with the step in which the end was heard of
            assert len(last) == len(set(last))
        assert list(range(len(epochs) if self.epochs is None else self.epochs)) == sorted(epochs)
        for epoch, samples in epochs.items():
            assert list(range(self.epoch_samples)) == sorted(samples), f"epoch {epoch} lost or repeated samples"

    def end(self) -> None:
        """Tell an open-ended job that it is enough, and hold it to account when it has succeeded."""
        (self.folder / "enough").touch()
        self.wait_succeeded(timeout_s=90)


class Jobs:
    """Example jobs in namespaces that belong to whoever asks for them."""

    def __init__(self, installed: Cluster, owner: str) -> None:
        self._installed = installed
        self._base = re.sub(r"[^a-z0-9]+", "-", owner.lower().removeprefix("test_")).strip("-")[:40]
        self._made: list[Job] = []

    def start(
        self,
        name: str = "job",
        *,
        namespace: str = "",
        limits: Mapping[str, str] | None = None,
        epochs: int | None = EPOCHS,
        epoch_samples: int = EPOCH_SAMPLES,
        **changes: Any,
    ) -> Running:
        """Apply an example job; with ``epochs=None`` it trains until the test calls ``end``."""
        cluster = Cluster(environment=self._installed.environment, namespace=f"e2e-{self._base}{namespace}")
        if not any(job.cluster.namespace == cluster.namespace for job in self._made):
            remove_namespace(cluster)
            cluster.run("kubectl", "create", "namespace", cluster.namespace)
            cluster.apply(script())
        folder = fresh_folder(f"{cluster.namespace}-{name}")
        (folder / "samples").mkdir()
        (folder / "samples").chmod(0o777)
        training = {"epochs": epochs or 1_000_000, "globalBatchSize": BATCH, **changes.pop("training", {})}
        ending = [] if epochs is not None else ["--until", "/checkpoints/enough"]
        manifest = example(
            name,
            arguments=["--samples-per-epoch", str(epoch_samples), *ending, *changes.pop("arguments", [])],
            training=training,
            limits=limits or EVEN_LIMITS,
            environment={env.SAMPLE_LOG_DIR: "/checkpoints/samples"},
            folder=str(folder),
            **changes,
        )
        if epochs is None:
            instead_of_the_example(cluster, manifest, OPEN_ENDED)
        cluster.apply(manifest)
        job = Job(cluster, name)
        self._made.append(job)
        return Running(job, folder, epochs, epoch_samples)

    def tell(self) -> None:
        """Print the story of every job."""
        for job in self._made:
            print(story(job))

    def remove(self) -> None:
        """Let every namespace go. Nobody waits here for the pods' last words: the next test starts meanwhile."""
        for namespace in {job.cluster.namespace for job in self._made}:
            remove_namespace(Cluster(environment=self._installed.environment, namespace=namespace), waits=False)
        self._made.clear()


Start = Callable[..., Running]


@pytest.fixture
def start(installed: Cluster, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Return a function that starts a job in a namespace of the test's own; on failure its story is printed."""
    jobs = Jobs(installed, request.node.name)
    yield jobs.start
    if getattr(request.node, "failed_call", False):
        jobs.tell()
    jobs.remove()


@dataclass(slots=True)
class Shared:
    """An open-ended job that the tests of a module share one after the other."""

    jobs: Jobs
    running: Running | None = None
    failures: int = 0
    """How many failures the tests have caused: the job is to be charged with these and no other."""

    def whole(self) -> Running:
        """Return the job with all its workers in training; a new one where the last test has spoiled it."""
        if self.running is None:
            self.failures = 0
            self.running = self.jobs.start(epochs=None, epoch_samples=3360, training={"globalBatchSize": 336})
        self.running.job.wait_members(3, timeout_s=90)
        self.running.wait_steps(self.running.steps() + 3)
        return self.running

    def spoiled(self) -> None:
        """Tell the job's story and let it go."""
        self.jobs.tell()
        self.jobs.remove()
        self.running = None


@pytest.fixture(scope="module")
def shared(installed: Cluster, request: pytest.FixtureRequest) -> Iterator[Shared]:
    """Keep a job for the module's tests, and hold it to account for every sample of them all when they are done."""
    found = Shared(Jobs(installed, request.node.name))
    yield found
    try:
        if found.running is not None:
            found.running.end()
            assert found.running.job.status()["restarts"] == found.failures
    except BaseException:
        found.spoiled()
        raise
    found.jobs.remove()


@pytest.fixture
def running(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Running]:
    """Return the shared job, with three members; what a test does to it, the test sees made good."""
    yield shared.whole()
    if getattr(request.node, "failed_call", False):
        shared.spoiled()


def instead_of_the_example(cluster: Cluster, manifest: dict[str, Any], training_script: Path) -> None:
    """Let the job run another script, which finds the example's own beside it."""
    name = f"{manifest['metadata']['name']}-script"
    files = {**script()["data"], training_script.name: training_script.read_text()}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": files})
    pod = manifest["spec"]["template"]["spec"]
    pod["containers"][0]["command"][1] = f"/script/{training_script.name}"
    pod["volumes"][0]["configMap"]["name"] = name


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember a failed call, so that the fixture's clean-up can tell the story first."""
    outcome: Any = yield
    if outcome.get_result().when == "call" and outcome.get_result().failed:
        item.failed_call = True  # type: ignore[attr-defined]  # our own mark on pytest's object


def remove_namespace(cluster: Cluster, *, waits: bool = True) -> None:
    """Delete the cluster's namespace, and wait until it is gone unless told otherwise."""
    ways = ["--timeout=90s"] if waits else ["--wait=false"]
    cluster.run("kubectl", "delete", "namespace", cluster.namespace, "--ignore-not-found", *ways, timeout_s=100)


def story(job: Job) -> str:
    """Return what a person would look at first: the object, its events, its pods' last lines and the operator's."""
    chapters = [
        ("get", "htj", job.name, "-o", "yaml"),
        ("get", "pods", "-o", "wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "-l", f"heterotrain.dev/job={job.name}", "--tail=40", "--prefix", "--ignore-errors"),
        ("-n", OPERATOR_NAMESPACE, "logs", "deployment/heterotrain-operator", "--tail=60"),
    ]
    told = []
    for chapter in chapters:
        try:
            told.append(f"$ kubectl {' '.join(chapter)}\n{job.cluster.kubectl(*chapter)}")
        except ClusterError as error:
            told.append(str(error))
    return "\n".join(told)
