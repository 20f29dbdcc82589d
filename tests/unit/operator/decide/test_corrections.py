"""What a user corrects takes effect: pods that never ran are made again, running ones on request."""

from __future__ import annotations

import copy
import random
from typing import Any, cast

import pytest
from heterotrain_core.contract import env, keys
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.common_parts import MOST_BYTES, packed, size_problem, unpacked
from support.fake_cluster import Body, FakeCluster, pool

CHECKPOINT = {"uri": "file:///checkpoints"}


def two_workers(*, sidecar: str = "", checkpoint: Body | None = CHECKPOINT, **elastic: int) -> FakeCluster:
    containers = [{"name": "main", "image": "image", "command": ["train"]}]
    if sidecar:
        containers.append({"name": "proxy", "image": sidecar})
    spec: Body = {"elasticPolicy": elastic}
    if checkpoint is not None:
        spec["checkpoint"] = dict(checkpoint)
    template = {"spec": {"containers": containers}}
    return FakeCluster(pool("a", maxReplicas=2), spec=spec, template=template).with_nodes("a1", "a2", cpu="1")


def training(**options: Any) -> FakeCluster:
    return two_workers(**options).start()


def main_of(pod: Body) -> Body:
    return dict(pod["spec"]["containers"][0])


def variable(pod: Body, name: str) -> str:
    return next(str(each.get("value")) for each in main_of(pod)["env"] if each["name"] == name)


def restart(cluster: FakeCluster, value: str = "now") -> None:
    cluster.job["metadata"].setdefault("annotations", {})[keys.ANNOTATION_RESTART] = value


def live(cluster: FakeCluster, rounds: int = 1) -> list[list[str]]:
    """Let operator, kubelets and scheduler act in turn; return the members after each round."""
    seen = []
    for _ in range(rounds):
        cluster.step()
        seen.append(cluster.members())
        for name in [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]:
            if name in cluster.plan_json["drain"] or name not in cluster.members():
                cluster.vanish(name)
        cluster.schedule().run()
        cluster.pass_time(6.0)
    return seen


CORRECTIONS = {
    "image": lambda spec: spec["template"]["spec"]["containers"][0].update(image="right"),
    "sidecar": lambda spec: spec["template"]["spec"]["containers"].append({"name": "proxy", "image": "right"}),
    "template's selector": lambda spec: spec["template"]["spec"].update(nodeSelector={"zone": "right"}),
    "pool's selector": lambda spec: spec["workerPools"][0].update(nodeSelector={"pool": "b"}),
    "requests": lambda spec: spec["workerPools"][0].update(resources={"limits": {"cpu": "500m"}}),
    "template's requests": lambda spec: spec["template"]["spec"]["containers"][0].update(
        resources={"requests": {"memory": "1Mi"}}
    ),
    "tolerations": lambda spec: spec["workerPools"][0].update(tolerations=[{"key": "spot", "operator": "Exists"}]),
    "label": lambda spec: spec["template"].update(metadata={"labels": {"team": "vision"}}),
    "variable": lambda spec: spec["template"]["spec"]["containers"][0].update(env=[{"name": "A", "value": "1"}]),
    "checkpoints": lambda spec: spec["checkpoint"].update(uri="file:///right"),
    "pool's template": lambda spec: spec["workerPools"][0].update(
        template={"spec": {"containers": [{"name": "main", "image": "right"}]}}
    ),
}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_pod_that_never_ran_is_made_again_in_the_pass_that_sees_the_correction(kind: str) -> None:
    cluster = two_workers()
    cluster.settle()
    cluster.schedule()  # they have nodes, and their containers do not start
    before = copy.deepcopy(cluster.pods)
    decision = cluster.edit(CORRECTIONS[kind]).step()
    assert {pod.name for pod in decision.remove} == set(before)
    cluster.settle()
    assert {body["metadata"]["uid"] for body in cluster.pods.values()}.isdisjoint(
        body["metadata"]["uid"] for body in before.values()
    )
    assert cluster.condition("TemplateApplied") == ("True", "Applied")
    assert cluster.status["disruptions"] == 0


def test_a_change_that_concerns_no_pod_makes_none_again() -> None:
    cluster = two_workers()
    cluster.settle()
    before = set(cluster.pods)
    cluster.edit(lambda spec: spec.update(backoffLimit=1))
    cluster.edit(lambda spec: spec["workerPools"][0].update(minReplicas=1))
    assert not cluster.step().remove
    assert set(cluster.pods) == before


def test_nothing_is_made_again_while_the_correction_is_refused() -> None:
    cluster = two_workers()
    cluster.settle()
    cluster.acceptance = type(cluster.acceptance)(known=True, ok=False, reason="InvalidTemplate", message="unknown")
    assert not cluster.edit(CORRECTIONS["image"]).step().remove


def test_a_waiting_worker_next_to_running_ones_gets_the_right_nodes_and_their_image() -> None:
    cluster = two_workers()
    cluster.settle()
    cluster.schedule().run("job-w0")
    cluster.settle()
    cluster.pass_time(10.0).settle()

    def correct(spec: Body) -> None:
        CORRECTIONS["image"](spec)
        CORRECTIONS["pool's selector"](spec)

    cluster.edit(correct).settle()
    again = next(body for name, body in cluster.pods.items() if name != "job-w0")
    assert again["spec"]["nodeSelector"] == {"pool": "b"}
    assert main_of(again)["image"] == "image", "as its peer has it"
    assert main_of(cluster.pods["job-w0"])["image"] == "image"


@pytest.mark.parametrize("kind", ["image", "variable", "checkpoints"])
def test_a_replacement_equals_its_peers_until_all_are_renewed_together(kind: str) -> None:
    cluster = training()
    peer = copy.deepcopy(main_of(cluster.pods["job-w0"]))
    cluster.edit(CORRECTIONS[kind]).settle()
    assert cluster.status["updatedReplicas"] == 0
    assert cluster.condition("TemplateApplied") == ("False", "OlderCommonParts")
    assert "heterotrain restart job" in cluster.message("TemplateApplied")
    cluster.vanish("job-w1")
    live(cluster, 3)
    newest = next(body for name, body in cluster.pods.items() if name != "job-w0")
    same = ("image", "command", "args", "volumeMounts")
    assert {name: main_of(newest).get(name) for name in same} == {name: peer.get(name) for name in same}
    assert variable(newest, env.CONFIG) == variable(cluster.pods["job-w0"], env.CONFIG)
    assert cluster.condition("TemplateApplied") == ("False", "OlderCommonParts"), "the newcomer is no news"


def test_what_is_common_survives_a_new_operator_and_an_unreadable_note_does_no_harm() -> None:
    cluster = training()
    cluster.edit(CORRECTIONS["image"]).settle()
    cluster._job_read = ("", None)
    cluster.vanish("job-w1")
    cluster.settle()
    assert {main_of(body)["image"] for body in cluster.pods.values()} == {"image"}
    cluster.job["status"]["internal"]["commonParts"] = "no such text"
    cluster.settle()


def test_a_restart_renews_workers_one_by_one_where_the_others_train_on() -> None:
    cluster = training(minReplicas=1)
    before = {body["metadata"]["uid"] for body in cluster.pods.values()}
    cluster.edit(CORRECTIONS["label"]).settle()
    assert cluster.condition("TemplateApplied") == ("False", "OlderTemplate")
    assert cluster.status["updatedReplicas"] == 0
    assert not cluster.step().remove, "nobody asked for it"
    restart(cluster)
    seen = live(cluster, 12)
    assert all(seen), "the job always trains"
    assert cluster.condition("TemplateApplied") == ("True", "Applied")
    assert cluster.status["updatedReplicas"] == 2
    assert {body["metadata"]["labels"]["team"] for body in cluster.pods.values()} == {"vision"}
    assert before.isdisjoint(body["metadata"]["uid"] for body in cluster.pods.values())
    assert cluster.status["disruptions"] == cluster.status["restarts"] == 0
    assert not cluster.step().remove, "one request is one restart"


def test_a_restart_never_takes_more_than_one_worker_of_a_job_that_just_suffices() -> None:
    """While one of three is renewed, the other two are the minimum: they do not leave together for that reason."""
    cluster = FakeCluster(
        pool("a", maxReplicas=3), spec={"elasticPolicy": {"minReplicas": 2}, "checkpoint": CHECKPOINT}
    )
    cluster.with_nodes("a1", "a2", "a3", cpu="1").start()
    before = {body["metadata"]["uid"] for body in cluster.pods.values()}
    restart(cluster)
    for _ in range(20):
        decision = cluster.step()
        assert len(decision.remove) <= 1
        assert len(cluster.members()) >= 2
        for name in [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]]:
            if name in cluster.plan_json["drain"] or name not in cluster.members():
                cluster.vanish(name)
                cluster.step()
        cluster.schedule().run()
        cluster.pass_time(6.0)
    assert before.isdisjoint(body["metadata"]["uid"] for body in cluster.pods.values())
    assert len(cluster.members()) == 3


@pytest.mark.parametrize(("kind", "least"), [("image", 1), ("label", 2)])
def test_all_are_renewed_together_where_they_must_be_equal_or_too_few_would_be_left(kind: str, least: int) -> None:
    cluster = training(minReplicas=least)
    cluster.edit(CORRECTIONS[kind]).settle()
    restart(cluster)
    assert len(cluster.step().remove) == 2
    made: list[str] = []
    while any("deletionTimestamp" in body["metadata"] for body in cluster.pods.values()):
        made += [body["metadata"]["name"] for body in cluster.step().create]
        cluster.vanish(next(name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]))
    if kind == "image":
        assert not made, "no new worker trains with an old one"
    cluster.settle()
    cluster.schedule().run()
    cluster.settle()
    assert cluster.condition("TemplateApplied") == ("True", "Applied")
    assert len(cluster.members()) == 2
    assert cluster.status["disruptions"] == 0
    if kind == "image":
        assert {main_of(body)["image"] for body in cluster.pods.values()} == {"right"}


def test_a_restart_that_would_lose_the_training_does_not_begin() -> None:
    cluster = training(checkpoint=None)
    cluster.edit(CORRECTIONS["image"]).settle()
    restart(cluster)
    assert not cluster.step().remove
    assert cluster.condition("TemplateApplied") == ("False", "RestartBlocked")
    assert "keeps no checkpoints" in cluster.message("TemplateApplied")


def test_a_pool_that_never_ran_gets_its_own_image_corrected_while_others_train() -> None:
    typo = {"template": {"spec": {"containers": [{"name": "main", "image": "typo"}]}}}
    cluster = FakeCluster(pool("a"), pool("b", **typo)).with_nodes("a", "b")
    cluster.settle()
    cluster.schedule().run("job-w0")
    cluster.settle()
    cluster.edit(lambda spec: spec["workerPools"][1]["template"]["spec"]["containers"][0].update(image="rocm"))
    cluster.settle()
    assert sorted(main_of(body)["image"] for body in cluster.pods.values()) == ["image", "rocm"]


def test_a_worker_that_trains_without_its_sidecar_is_renewed_when_that_is_corrected() -> None:
    cluster = training(sidecar="typo", minReplicas=1)
    for body in cluster.pods.values():
        body["status"]["containerStatuses"].append(
            {"name": "proxy", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
        )
    cluster.settle()
    cluster.edit(lambda spec: spec["template"]["spec"]["containers"][1].update(image="right")).settle()
    live(cluster, 12)
    assert {body["spec"]["containers"][1]["image"] for body in cluster.pods.values()} == {"right"}
    assert len(cluster.members()) == 2


def test_pods_of_an_older_operator_are_left_alone() -> None:
    cluster = two_workers()
    cluster.settle()
    for body in cluster.pods.values():
        del body["metadata"]["annotations"]["heterotrain.dev/template"]
    assert not cluster.edit(CORRECTIONS["image"]).step().remove


def test_common_parts_survive_the_status_and_too_large_ones_are_refused() -> None:
    parts = {"a": {"main": {"image": "i"}, "volumes": [], "init": [], "settings": "{}"}}
    assert unpacked(packed(parts)) == parts
    cluster = two_workers()
    assert not size_problem(cast("ValidJob", cluster.job_view))
    noise = random.Random(0).randbytes(MOST_BYTES).hex() * 2  # noqa: S311  # no secret
    cluster.edit(lambda spec: spec["template"]["spec"]["containers"][0].update(args=[noise]))
    assert "too much text" in size_problem(cast("ValidJob", cluster.job_view))
