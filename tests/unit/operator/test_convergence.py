"""Whatever happens to a job, in whatever order: passes come to rest, versions only grow, nobody is created twice."""

from __future__ import annotations

from collections.abc import Callable

from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.decide.job import decide
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_world import World, pool, without_times

POOLS = ("a", "b", "c")
Happening = Callable[[World], object]


def on_pod(change: Callable[[World, str], object]) -> Callable[[int], Happening]:
    def make(number: int) -> Happening:
        def happen(world: World) -> None:
            running = sorted(name for name, body in world.pods.items() if body["status"]["phase"] == "Running")
            if running:
                change(world, running[number % len(running)])

        return happen

    return make


def on_node(change: Callable[[World, str], object]) -> Callable[[int], Happening]:
    def make(number: int) -> Happening:
        def happen(world: World) -> None:
            if world.nodes:
                change(world, sorted(world.nodes)[number % len(world.nodes)])

        return happen

    return make


def heal(world: World, node: str) -> None:
    world.nodes[node]["spec"]["taints"].clear()
    world.set_node(node, "True")


HAPPENINGS: tuple[Callable[[int], Happening], ...] = (
    on_pod(lambda world, name: world.end(name, Ending.LEFT)),
    on_pod(lambda world, name: world.end(name, Ending.FAILED, exit_code=1, reason="boom")),
    on_pod(lambda world, name: world.end(name, exit_code=137)),
    on_pod(lambda world, name: world.vanish(name)),
    on_pod(lambda world, name: world.set_ready(name, ready=False)),
    on_node(lambda world, name: world.taint(name, "karpenter.sh/disrupted:NoSchedule")),
    on_node(lambda world, name: world.set_node(name, "Unknown")),
    on_node(lambda world, name: world.nodes.pop(name)),
    on_node(heal),
    lambda number: lambda world: world.with_nodes(f"{POOLS[number % 3]}{number}", cpu="2"),
    lambda _: lambda world: world.schedule(),
    lambda _: lambda world: world.schedule().run(),
    lambda number: lambda world: world.pass_time(number),
    lambda number: lambda world: world.edit(lambda spec: spec.update(suspend=number % 2 == 0)),
    lambda number: (
        lambda world: world.edit(
            lambda spec: spec.update(elasticPolicy={"minReplicas": 1, "maxReplicas": 1 + number % 6})
        )
    ),
    lambda _: lambda world: setattr(world, "plan", None),
)

happenings = st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 30)), max_size=12)


def a_world() -> World:
    pools = (pool("a", maxReplicas=3), pool("b", maxReplicas=2), pool("c", maxReplicas=2, capacityType="spot"))
    return World(*pools, spec={"elasticPolicy": {"minReplicas": 2}, "backoffLimit": 1000}).with_nodes(
        "a", "b", "c", cpu="2"
    )


@settings(max_examples=60)
@given(happenings)
def test_every_story_comes_to_rest_and_keeps_its_promises(story: list[tuple[Callable[[int], Happening], int]]) -> None:
    world = a_world()
    newest = (-1, -1)
    for happening, number in story:
        happening(number)(world)
        world.settle()  # asserts that passes come to rest, and that no name is created twice
        assert world.plan is not None
        version = world.version()
        mirrored = (world.status["plan"]["desiredGeneration"], world.status["plan"]["desiredRevision"])
        assert mirrored >= newest
        assert version[1] >= newest[1], "a revision never falls"
        newest = mirrored
        members = world.members()
        assert len(members) == len(set(members))
        shares = [member["share_samples"] for member in world.plan_json["members"]]
        assert not shares or sum(shares) == 100
        assert len(world.status.get("accountedWorkers", [])) <= len(world.pods) + len(members)


@settings(max_examples=60)
@given(happenings)
def test_deciding_is_a_function_of_what_is_seen(story: list[tuple[Callable[[int], Happening], int]]) -> None:
    world = a_world()
    for happening, number in story:
        happening(number)(world)
        assert decide(world.observe()) == decide(world.observe())
        world.step()


@settings(max_examples=60)
@given(happenings)
def test_a_quiet_cluster_heals_every_job(story: list[tuple[Callable[[int], Happening], int]]) -> None:
    """When the disturbances stop and there is room, the job trains with all its workers again."""
    world = a_world()
    for happening, number in story:
        happening(number)(world)
        world.step()
    world.edit(lambda spec: spec.update(suspend=False, elasticPolicy={"minReplicas": 2}))
    for name in list(world.nodes):
        heal(world, name)
    world.with_nodes("a9", "b9", "c9", cpu="4")
    for _ in range(8):
        for name, body in list(world.pods.items()):
            if "deletionTimestamp" in body["metadata"]:
                world.vanish(name)
            elif body["status"]["phase"] == "Running":
                world.set_ready(name)
        world.pass_time(400)
        world.settle()
        world.schedule().run()
    world.settle()
    assert world.status["state"] == "Running"
    assert len(world.members()) == 7


@settings(max_examples=60)
@given(happenings)
def test_a_decision_taken_again_adds_nothing(story: list[tuple[Callable[[int], Happening], int]]) -> None:
    world = a_world()
    for happening, number in story:
        happening(number)(world)
        world.step()
    world.settle()
    again = without_times(world.step())
    assert (again.create, again.remove, again.plan, again.touch, again.notices) == ((), (), None, (), ())
