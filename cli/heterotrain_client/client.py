"""Jobs on a cluster, with the user's own rights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.errors import InputError, UnavailableError
from heterotrain_cli.job_file import API_VERSION, checked_spec
from heterotrain_core.contract import keys
from heterotrain_core.contract.choices import Runtime
from heterotrain_operator.api.reading import SpecError

from heterotrain_client.job import TrainingJob
from heterotrain_client.manifest import Pools, Script, job_body, script_body, source_of, told


class HeteroTrainClient:
    """Submits jobs and finds them again. Nothing is stored: two clients see the same jobs."""

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, kubeconfig: str | None = None
    ) -> None:
        """Read the kubeconfig; nothing is sent yet.

        Args:
            namespace: of the jobs; ``None`` for that of the context.
            context: of the kubeconfig; ``None`` for its current one.
            kubeconfig: file; ``None`` for kubectl's choice. In a pod, its service account is used.

        Raises:
            UnavailableError: there is no usable kubeconfig.
        """
        self._cluster = Cluster(Target(namespace=namespace, context=context, kubeconfig=kubeconfig))

    @property
    def namespace(self) -> str:
        """Namespace of the client's jobs."""
        return self._cluster.namespace

    def train(
        self,
        script: Script,
        *,
        pools: Pools,
        image: str,
        name: str | None = None,
        arguments: Mapping[str, Any] | Sequence[str] = (),
        gpus_per_worker: int = 1,
        global_batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        checkpoint: str | None = None,
        runtime: str = Runtime.HETEROTRAIN,
        training: Mapping[str, Any] | None = None,
        spec: Mapping[str, Any] | None = None,
        pod: Mapping[str, Any] | None = None,
    ) -> TrainingJob:
        """Create a job that runs a script or a function on every worker.

        Args:
            script: path of a Python file, or a function that imports and defines all it uses. The workers get it in a
                ConfigMap that is deleted with the job.
            pools: for each pool the most workers, or fields as in ``spec.workerPools``. Nodes are those with the label
                ``heterotrain.dev/pool=NAME`` unless ``nodeSelector`` is given.
            image: of the workers; ``heterotrain-run`` is in it.
            name: of the job; by default that of the script.
            arguments: of the command line of a file, by name for a function.
            gpus_per_worker: NVIDIA GPUs of each worker in pools without ``resources``; 0 for CPUs.
            global_batch_size: samples of one step over all workers; not for ``runtime="Torchrun"``.
            epochs: passes over the data set.
            steps: of the whole training, in place of epochs.
            checkpoint: URI of a folder for checkpoints.
            runtime: ``"Torchrun"`` for an unchanged script for torchrun.
            training: more fields of ``spec.training``, as in YAML.
            spec: more fields of ``spec``, as in YAML.
            pod: more fields of the pod's spec; ``container`` holds those of the container that trains.

        Raises:
            InputError: a value has a mistake, or there is such a job already.
            UnavailableError: the cluster does not answer.
        """
        file_name, text, given = source_of(script, arguments)
        called = name or _default_name(script, file_name)
        body = job_body(
            called,
            file_name=file_name,
            arguments=given,
            pools=pools,
            image=image,
            gpus_per_worker=gpus_per_worker,
            training={} if training is None else training,
            settings={"globalBatchSize": global_batch_size, "epochs": epochs, "steps": steps},
            checkpoint=checkpoint,
            spec={} if spec is None else spec,
            runtime=runtime,
            pod={} if pod is None else pod,
        )
        return self._create(body, file_name=file_name, text=text)

    def submit(self, body: Mapping[str, Any]) -> TrainingJob:
        """Create a job from its whole object, as in YAML.

        Raises:
            InputError: the job has a mistake, or there is one of this name already.
            UnavailableError: the cluster does not answer.
        """
        _check(body)
        given = body["metadata"].get("namespace")
        if given is not None and given != self.namespace:
            raise InputError(
                f"metadata.namespace is {given}, but the client creates jobs in {self.namespace}: "
                f'use HeteroTrainClient(namespace="{given}")'
            )
        return TrainingJob(self._cluster, str(self._cluster.create(body)["metadata"]["name"]))

    def job(self, name: str) -> TrainingJob:
        """Return a job that exists.

        Raises:
            InputError: there is no such job.
            UnavailableError: the cluster does not answer.
        """
        self._cluster.job(name)
        return TrainingJob(self._cluster, name)

    def jobs(self) -> list[TrainingJob]:
        """Return all jobs of the namespace."""
        return [TrainingJob(self._cluster, str(each["metadata"]["name"])) for each in self._cluster.jobs()]

    def _create(self, body: Mapping[str, Any], *, file_name: str, text: str) -> TrainingJob:
        """Create the job, then its script, which belongs to it; pods wait for the script."""
        job = self.submit(body)
        try:
            self._cluster.create_config_map(script_body(job.body(), file_name=file_name, text=text))
        except (InputError, UnavailableError):
            job.delete()
            raise
        return job


def _default_name(script: Script, file_name: str) -> str:
    given = getattr(script, "__name__", "") if callable(script) else file_name.removesuffix(".py")
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in given.lower()).strip("-")


def _check(body: Mapping[str, Any]) -> None:
    """Check what the API server checks, in the words of `heterotrain validate`.

    Raises:
        InputError: the job has a mistake.
    """
    if not isinstance(body, Mapping):
        raise InputError(f"the job is {told(body)}, but must be a mapping with apiVersion, kind, metadata and spec")
    for field, wanted in (("apiVersion", API_VERSION), ("kind", keys.KIND)):
        if body.get(field) != wanted:
            raise InputError(f"{field} is {told(body.get(field))}, but must be {wanted}")
    try:
        checked_spec(body)
    except SpecError as error:
        raise InputError(str(error)) from error
