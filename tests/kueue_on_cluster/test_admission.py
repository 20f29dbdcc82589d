"""A job in a queue of the real Kueue on real kubelets: it waits for quota, is admitted, trains, and gives it back."""

from __future__ import annotations

from heterotrain_core.contract import env
from lab.cluster import Cluster, wait_for
from lab.jobs import Job, committed_steps, example, fresh_folder, script
from support.kueue import GATE, GROUP, QUEUE, VERSION
from support.kueue_on_cluster import cluster_queue
from support.lineage import lineage
from support.on_cluster import diagnostics

NAME, EPOCHS, EPOCH_SAMPLES = "queued", 3, 1792
NOTHING = {"cpu": "0", "memory": "0"}
ENOUGH = {"cpu": "4", "memory": "16Gi"}


def test_a_job_waits_for_its_quota_then_trains_to_its_end_and_gives_it_back(cluster: Cluster) -> None:
    queue = cluster_queue(NAME, NOTHING)
    flavor = {"apiVersion": VERSION, "kind": "ResourceFlavor", "metadata": {"name": NAME}}
    local = {"apiVersion": VERSION, "kind": "LocalQueue", "metadata": {"name": QUEUE}, "spec": {"clusterQueue": NAME}}
    job = Job(cluster, NAME)
    try:
        cluster.apply(flavor, queue, local, script())
        folder = fresh_folder("kueue-job")
        (folder / "samples").mkdir()
        (folder / "samples").chmod(0o777)
        manifest = example(
            NAME,
            arguments=["--samples-per-epoch", str(EPOCH_SAMPLES)],
            training={"epochs": EPOCHS, "globalBatchSize": 112},
            environment={env.SAMPLE_LOG_DIR: "/checkpoints/samples"},
            folder=str(folder),
        )
        manifest["spec"]["template"]["metadata"] = {"labels": {f"{GROUP}/queue-name": QUEUE}}
        cluster.apply(manifest)

        def all_gated() -> bool:
            gates = [each["spec"].get("schedulingGates", []) for each in job.pods()]
            return len(gates) == 3 and all({"name": GATE} in each for each in gates)

        wait_for(all_gated, "three pods behind Kueue's gate", timeout_s=60)

        def reported() -> bool:
            found = job.condition("Scheduled")
            return found.get("reason") == "SchedulingGated" and GATE in found.get("message", "")

        wait_for(reported, "the status to name the gate", timeout_s=60)
        assert committed_steps(folder / "samples") == 0

        cluster.apply(cluster_queue(NAME, ENOUGH))
        job.wait_members(3, timeout_s=120)
        assert not all_gated()
        assert reserved(cluster) != "0"
        job.wait_true("Succeeded", timeout_s=240)
        epochs = lineage(folder / "samples")
        assert sorted(epochs) == list(range(EPOCHS))
        for epoch, samples in epochs.items():
            assert sorted(samples) == list(range(EPOCH_SAMPLES)), f"epoch {epoch} lost or repeated samples"
        wait_for(lambda: reserved(cluster) == "0", "the quota to be free again", timeout_s=60)
    except BaseException:
        print(diagnostics(job))
        raise
    finally:
        cluster.delete("htj", NAME)
        wait_for(lambda: not job.pods(), "the job's pods to be gone", timeout_s=90)
        cluster.delete("localqueue", QUEUE)
        cluster.delete("clusterqueue", NAME)
        cluster.delete("resourceflavor", NAME)


def reserved(cluster: Cluster) -> str:
    """Return the cores that Kueue has reserved for pods."""
    found = (cluster.get("clusterqueue", NAME) or {}).get("status") or {}
    flavors = found.get("flavorsReservation") or []
    totals = {each["name"]: str(each["total"]) for each in flavors[0]["resources"]} if flavors else {}
    return totals.get("cpu", "0")
