"""A job's forecast: pools matched with speeds, costs, and the Pareto front of alternatives."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from heterotrain_cli.main import main
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import Binding, CommunicationTime, ComputeTime, Member, Plan, Prediction
from support.api_stub import ApiStub, serve
from support.cli_runner import CliRunner
from support.plans import plan_of
from unit.cli import oracle

JOB: dict[str, Any] = {
    "apiVersion": "heterotrain.dev/v1alpha1",
    "kind": "HeteroTrainJob",
    "metadata": {"name": "digits"},
    "spec": {
        "training": {"globalBatchSize": 60, "epochs": 3},
        "elasticPolicy": {"minReplicas": 1, "maxReplicas": 5},
        "workerPools": [
            {"name": "a100", "maxReplicas": 2, "pricePerHour": "4.00", "resources": {"limits": {"nvidia.com/gpu": 2}}},
            {"name": "v100", "maxReplicas": 2, "pricePerHour": "3.00"},
            {"name": "t4", "maxReplicas": 3, "capacityType": "Spot", "pricePerHour": "0.30"},
        ],
        "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
    },
}
PROFILE: dict[str, Any] = {
    "communication": {"overlappedSeconds": 0.05, "lastBucketSeconds": 0.02, "gamma": 0.2},
    "members": [
        {"name": "t4", "perSampleSeconds": 0.02, "fixedSeconds": 0.1},
        {"name": "a100", "perSampleSeconds": 0.002, "backwardPerSampleSeconds": 0.004, "fixedSeconds": 0.05},
        {"name": "v100", "perSampleSeconds": 0.004, "backwardPerSampleSeconds": 0.008, "maxMicroBatchSamples": 4},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the job and the profile."""
    write(tmp_path, JOB, PROFILE)
    return tmp_path


def write(folder: Path, job: Any, profile: Any) -> None:
    """Put a job and a profile into the folder."""
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    (folder / "profile.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")


def run(folder: Path, *more: str) -> Result:
    """Forecast the folder's job with the folder's profile."""
    arguments = ["forecast", str(folder / "job.yaml"), "--profile", str(folder / "profile.yaml"), *more]
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def answer(folder: Path, *more: str) -> dict[str, Any]:
    """Return the forecast as JSON."""
    result = run(folder, "-o", "json", *more)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refusal(folder: Path, job: Any, profile: Any = PROFILE) -> str:
    """Return the one line that refuses a job or a profile, without the file's path."""
    write(folder, job, profile)
    result = run(folder)
    assert result.exit_code == 2, result.output
    return result.stderr.rstrip("\n").removeprefix("Error: ").replace(f"{folder}/", "")


def expected_step_s(workers: tuple[int, int, int]) -> float:
    """Return the least step time of (a100, v100, t4) workers by brute force; the job's own workers have seven ranks."""
    ranks = {"a100": workers[0] * 2, "v100": workers[1], "t4": workers[2]}
    members = [{**member, "count": ranks[member["name"]]} for member in PROFILE["members"] if ranks[member["name"]]]
    total = sum(ranks.values())
    factor = (total - 1) / total / (6 / 7)
    exchange = {
        "overlappedSeconds": factor * PROFILE["communication"]["overlappedSeconds"],
        "lastBucketSeconds": factor * PROFILE["communication"]["lastBucketSeconds"],
        "gamma": PROFILE["communication"]["gamma"],
    }
    return oracle.least_step_s({"members": members, "communication": exchange}, 60)


def test_the_job_s_own_workers(folder: Path) -> None:
    """Pools in the job's order up to maxReplicas, each worker with its ranks, and the exact optimum over them."""
    found = answer(folder)
    assert [(pool["name"], pool["workers"], pool["ranks"]) for pool in found["pools"]] == [
        ("a100", 2, 4),
        ("v100", 2, 2),
        ("t4", 1, 1),
    ]
    assert found["stepSeconds"] == pytest.approx(expected_step_s((2, 2, 1)), rel=1e-9)
    assert found["samplesPerSecond"] == pytest.approx(60 / found["stepSeconds"])
    assert sum(pool["partOfBatch"] for pool in found["pools"]) == pytest.approx(1)
    assert sum(sum(pool["bindings"].values()) for pool in found["pools"]) == 7
    assert found["pools"][1]["microBatches"] == -(-found["pools"][1]["samplesPerRank"][1] // 4)


def test_costs(folder: Path) -> None:
    """Prices are of workers, not ranks; a million samples and an epoch cost accordingly."""
    found = answer(folder, "--samples-per-epoch", "6000")
    assert found["pricePerHour"] == pytest.approx(2 * 4 + 2 * 3 + 0.3)
    seconds = 6000 / found["samplesPerSecond"]
    assert found["secondsPerEpoch"] == pytest.approx(seconds)
    assert found["costPerEpoch"] == pytest.approx(found["pricePerHour"] * seconds / 3600)
    assert found["costPerMillionSamples"] == pytest.approx(found["costPerEpoch"] * 1e6 / 6000)


@pytest.mark.parametrize("by", ["epochs", "steps"])
def test_the_whole_training_has_a_time_and_a_price(folder: Path, by: str) -> None:
    if by == "steps":
        path = folder / "job.yaml"
        path.write_text(path.read_text().replace("epochs: 3", "steps: 5000"), encoding="utf-8")
    found = answer(folder, *(["--samples-per-epoch", "6000"] if by == "epochs" else []))
    samples = 3 * 6000 if by == "epochs" else 5000 * 60
    assert found["secondsInAll"] == pytest.approx(samples / found["samplesPerSecond"])
    assert found["costInAll"] == pytest.approx(found["pricePerHour"] * found["secondsInAll"] / 3600)


def test_alternatives_are_the_pareto_front(folder: Path) -> None:
    """The alternatives are the Pareto front of all allowed allocations, fastest first."""
    prices = (4.0, 3.0, 0.3)
    choices = [w for w in itertools.product(range(3), range(3), range(4)) if 1 <= sum(w) <= 5]
    steps = {w: expected_step_s(w) for w in choices}
    costs = {w: sum(p * n for p, n in zip(prices, w, strict=True)) * s for w, s in steps.items()}
    border = {
        w
        for w in choices
        if not any(
            (steps[o] <= steps[w] and costs[o] < costs[w] - 1e-9) or (steps[o] < steps[w] and costs[o] <= costs[w])
            for o in choices
        )
    }
    found = answer(folder)["alternatives"]
    named = [{pool["name"]: pool["workers"] for pool in other["pools"]} for other in found]
    assert {tuple(names.get(n, 0) for n in ("a100", "v100", "t4")) for names in named} == border
    rates = [other["samplesPerSecond"] for other in found]
    assert rates == sorted(rates, reverse=True)


def test_alternatives_of_too_many_allocations_say_how_many_were_compared(folder: Path) -> None:
    """Only what the job allows counts towards the limit; beyond it the heading promises no more than it knows."""
    assert "allocations that no other one beats in both speed and price" in run(folder).stdout
    job = copy.deepcopy(JOB)
    for pool in job["spec"]["workerPools"]:
        pool["maxReplicas"] = 30
    for most, number, complete in ((6, 83, True), (30, 130, False)):
        # Of 31^3 combinations, C(9, 3) - 1 have 1 to 6 workers; of the counts 0, 1, 3, 7, 15 and 30, 117 do with 30.
        # Their neighbours add the rest.
        job["spec"]["elasticPolicy"]["maxReplicas"] = most
        write(folder, job, PROFILE)
        found = answer(folder)
        assert (found["comparedAllocations"], found["comparedAll"]) == (number, complete)
    heading = "allocations that none of 130 compared ones beats in both speed and price (* is the job's own):"
    assert heading in run(folder).stdout


def test_even_shares(folder: Path) -> None:
    """The step time of even shares is reported; with boundary Never it is the forecast."""
    found = answer(folder)
    job = copy.deepcopy(JOB)
    job["spec"]["training"]["rebalance"] = {"boundary": "Never"}
    write(folder, job, PROFILE)
    even = answer(folder)
    assert found["evenStepSeconds"] == pytest.approx(even["stepSeconds"])
    assert even["stepSeconds"] > 1.2 * found["stepSeconds"]
    assert even["reason"].startswith("even shares")


def test_another_batch(folder: Path) -> None:
    """--batch replaces the job's batch."""
    found = answer(folder, "--batch", "600")
    assert found["batch"] == 600
    assert found["samplesPerSecond"] == pytest.approx(600 / found["stepSeconds"])
    assert sum(pool["samplesPerRank"][0] * pool["ranks"] for pool in found["pools"]) > 500


def test_a_pool_of_unknown_speed_is_left_out(folder: Path) -> None:
    """The output names it, and other pools take its place up to the maximum."""
    profile = {**PROFILE, "members": [m for m in PROFILE["members"] if m["name"] != "v100"]}
    write(folder, JOB, profile)
    found = answer(folder)
    assert found["unknownPools"] == ["v100"]
    assert [(pool["name"], pool["workers"]) for pool in found["pools"]] == [("a100", 2), ("t4", 3)]
    assert "left out, because their speed is unknown: v100" in run(folder).stdout


def test_a_needed_pool_of_unknown_speed_makes_it_impossible(folder: Path) -> None:
    """Without the speed of a required pool there is no forecast."""
    job = copy.deepcopy(JOB)
    job["spec"]["workerPools"][1]["minReplicas"] = 1
    write(folder, job, {**PROFILE, "members": PROFILE["members"][:2]})
    found = answer(folder)
    assert found["feasible"] is False
    assert "the speed of pool v100 is unknown" in found["reason"]


def test_the_table(folder: Path) -> None:
    """Step, pools with shares and bindings, even shares, cost, and alternatives with a mark on the job's own."""
    text = run(folder, "--samples-per-epoch", "6000").stdout
    for expected in (
        "digits: 60 samples a step:",
        "even shares:",
        "14.30 an hour",
        "for an epoch",
        "an epoch of 6000 samples:",
    ):
        assert expected in text
    assert [line for line in text.splitlines() if line.lstrip().startswith("*")]


def test_permanent_even_shares_keep_limits(folder: Path) -> None:
    """A rank whose table or cap ends below its even share takes its maximum; the others take the rest."""
    changed = copy.deepcopy(JOB)
    changed["spec"]["training"]["rebalance"] = {"boundary": "Never"}
    small = {
        "members": [
            {"name": "a100", "measured": [[1, 0.1], [4, 0.2]]},
            {"name": "v100", "perSampleSeconds": 0.01},
            {"name": "t4", "perSampleSeconds": 0.03, "maxSamples": 6},
        ]
    }
    write(folder, changed, small)
    found = answer(folder)
    assert found["feasible"]
    assert {pool["name"]: pool["samplesPerRank"] for pool in found["pools"]} == {
        "a100": [4, 4],
        "v100": [19, 19],
        "t4": [6, 6],
    }
    assert found["stepSeconds"] == pytest.approx(0.2)
    assert found["evenStepSeconds"] is None
    assert "not possible" not in run(folder).stdout


def test_the_reason_names_an_impossible_pool(folder: Path) -> None:
    """The reason has the pool's name, and no row is marked as the job's own."""
    small = copy.deepcopy(PROFILE)
    small["members"][1] |= {"minSamples": 3, "maxSamples": 7, "granularity": 8}
    write(folder, JOB, small)
    text = run(folder).stdout
    assert text.startswith("not possible: member a100 (number 1) needs at least 3 samples but may have at most 0")
    assert "the job's own" not in text


def test_other_objects_in_the_file_are_ignored(folder: Path) -> None:
    """A file may also have other objects, such as a ConfigMap."""
    text = (folder / "job.yaml").read_text(encoding="utf-8")
    other = yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}})
    before = answer(folder)
    (folder / "job.yaml").write_text(f"{other}---\n{text}---\n", encoding="utf-8")
    assert answer(folder) == before


WRONG_FIELDS: list[tuple[str, Any, str]] = [
    ("training.globalBatchSize", 0, "training.globalBatchSize is 0, but must be at least 1"),
    ("training.globalBatchSize", "lots", 'training.globalBatchSize must be a whole number, not "lots"'),
    ("training.globalBatchsize", 60, "training.globalBatchsize is not a field: did you mean globalBatchSize?"),
    ("elasticPolicy.minReplica", 1, "elasticPolicy.minReplica is not a field: did you mean minReplicas?"),
    ("templates", {}, "templates is not a field: did you mean template?"),
    (
        "workerPools.0.pricePerHour",
        3.67,
        'workerPools[0].pricePerHour must be text, not 3.67: put it in quotes, "3.67"',
    ),
    ("workerPools.0.name", "T4", 'workerPools[0].name is "T4", but must be lower-case letters, digits and hyphens'),
    ("checkpoint.uri", "/c", 'checkpoint.uri is "/c", but must be a URI such as file:///checkpoints'),
    ("deadline", "tomorrow", 'deadline must be a time such as 2027-01-31T18:00:00Z, not "tomorrow"'),
]


@pytest.mark.parametrize(("path", "value", "sentence"), WRONG_FIELDS)
def test_a_wrong_field_of_a_job_is_one_sentence(folder: Path, path: str, value: Any, sentence: str) -> None:
    """It has the place, the value and what is allowed."""
    changed = copy.deepcopy(JOB)
    node: Any = changed["spec"]
    *parents, last = path.split(".")
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    node[last] = value
    assert refusal(folder, changed) == f"job.yaml: spec.{sentence}"


def test_wrong_jobs_and_profiles_are_one_sentence(folder: Path) -> None:
    """Each has the file and the remedy."""
    changed = copy.deepcopy(JOB)
    changed["spec"]["elasticPolicy"]["minReplicas"] = 99
    assert refusal(folder, changed).startswith("job.yaml: spec.elasticPolicy: minReplicas is larger than maxReplicas")
    assert refusal(folder, {**JOB, "kind": "PyTorchJob"}) == (
        "job.yaml: holds a PyTorchJob: `heterotrain init --from job.yaml` writes a HeteroTrainJob from it"
    )
    assert refusal(folder, {**JOB, "apiVersion": "heterotrain.dev/v9"}) == (
        "job.yaml: apiVersion is 'heterotrain.dev/v9', but must be heterotrain.dev/v1alpha1"
    )
    assert refusal(folder, {**JOB, "metadata": {}}) == "job.yaml: metadata.name is missing"
    assert refusal(folder, JOB, JOB) == (
        "profile.yaml: is a Kubernetes HeteroTrainJob, but must be a heterotrain profile"
    )
    stranger = {"members": [*PROFILE["members"], {"name": "h100", "perSampleSeconds": 1}]}
    assert refusal(folder, JOB, stranger) == (
        "profile.yaml: member h100 is not a pool of the job: its pools are a100, v100, t4"
    )
    twice = {"members": [PROFILE["members"][0], PROFILE["members"][0]]}
    assert refusal(folder, JOB, twice) == (
        "profile.yaml: two members have the same name: with a job, give each pool one member"
    )


def test_speeds_come_from_one_place(folder: Path) -> None:
    """Neither or both of --profile and --cluster, and job options without a job, are errors."""
    job = str(folder / "job.yaml")
    assert "either --profile FILE or --cluster" in CliRunner().invoke(main, ["forecast", job]).stderr
    assert run(folder, "--cluster").exit_code == 2
    assert CliRunner().invoke(main, ["forecast", "--cluster"]).exit_code == 2


def a_plan() -> Plan:
    """A plan of three workers with learned speeds; the second a100 is slower."""

    def member(rank: int, pool: str, per_sample_s: float | None) -> Member:
        compute = None
        if per_sample_s is not None:
            compute = ComputeTime(
                per_sample_s=per_sample_s, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0
            )
        return Member(
            index=rank,
            pool=pool,
            share_samples=20,
            cap_samples=40 if pool == "t4" else None,
            compute=compute,
        )

    return Plan(
        job_uid="uid-1",
        generation=3,
        revision=7,
        global_batch_samples=60,
        ranks=plan_of([20, 20, 20]).ranks,
        members=(member(0, "a100", 0.004), member(1, "a100", 0.006), member(2, "t4", 0.02)),
        communication=CommunicationTime(overlapped_s=0.0, last_bucket_s=0.01, gamma=0.0),
        prediction=Prediction(step_s=0.21, efficiency=0.8, efficiency_ceiling=0.93, bindings=(Binding.COMPUTE,) * 3),
    )


JOBS, CONFIGS = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs", "/api/v1/namespaces/ml/configmaps"


Running = Callable[[str, dict[str, Any]], ApiStub]


@pytest.fixture
def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """Return a function that serves a cluster on which the folder's job runs, with this plan and status."""
    with ExitStack() as servers:

        def serve_job(plan_text: str, status: dict[str, Any]) -> ApiStub:
            stub = ApiStub(
                objects={
                    f"{JOBS}/digits": {"metadata": {"uid": "uid-1"}, "status": status},
                    f"{CONFIGS}/digits-plan": {"data": {"plan.json": plan_text}},
                }
            )
            monkeypatch.setenv("KUBECONFIG", str(servers.enter_context(serve(stub, folder, namespace="other"))))
            return stub

        yield serve_job


def test_speeds_of_the_running_job(folder: Path, running: Running) -> None:
    """The plan's models stand for their pools (the slower of two), its caps hold, and the measured step is shown."""
    asked = running(encode_plan(a_plan()), {"stepSeconds": 0.123})
    arguments = ["forecast", str(folder / "job.yaml"), "--cluster", "-n", "ml"]
    result = CliRunner().invoke(main, [*arguments, "-o", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["unknownPools"] == ["v100"]
    assert found["measuredStepSeconds"] == 0.123
    assert (found["plannedStepSeconds"], found["efficiencyCeiling"]) == (0.21, 0.93)
    members = [
        {"name": "a100", "perSampleSeconds": 0.006, "count": 4},
        {"name": "t4", "perSampleSeconds": 0.02, "maxSamples": 40, "count": 3},
    ]
    # Measured among the plan's three ranks; the file asks for seven.
    document = {"members": members, "communication": {"lastBucketSeconds": 0.01 * (6 / 7) / (2 / 3)}}
    assert found["stepSecondsWithoutNoise"] == pytest.approx(oracle.least_step_s(document, 60))
    assert [each[:2] for each in asked.requests] == [("GET", f"{JOBS}/digits"), ("GET", f"{CONFIGS}/digits-plan")]
    text = CliRunner().invoke(main, arguments, catch_exceptions=False).stdout
    assert "measured now, with its present members: 0.123 s" in text
    assert (
        "the plan in force predicts 0.21 s for its members, noise included; the ceiling of its efficiency is 0.930"
        in text
    )


LATENCY_SIZES = [{"members": n, "across": True, "seconds": 0.005 * (n - 1), "steps": 100} for n in (2, 5, 3)]


def test_the_exchange_at_other_sizes_is_the_operator_s(folder: Path, running: Running) -> None:
    """Three ranks took 10 ms, all of it latency, so seven ranks take 30 ms."""
    exchange = {"members": 3, "overlappedSeconds": 0, "lastBucketSeconds": 0.01, "gamma": 0, "sizes": LATENCY_SIZES}
    running(encode_plan(a_plan()), {"internal": {"exchange": exchange, "pools": "unreadable"}})
    result = CliRunner().invoke(main, ["forecast", str(folder / "job.yaml"), "--cluster", "-n", "ml", "-o", "json"])
    assert result.exit_code == 0, result.output
    members = [
        {"name": "a100", "perSampleSeconds": 0.006, "count": 4},
        {"name": "t4", "perSampleSeconds": 0.02, "maxSamples": 40, "count": 3},
    ]
    document = {"members": members, "communication": {"lastBucketSeconds": 0.03}}
    found = json.loads(result.stdout)["stepSecondsWithoutNoise"]
    assert found == pytest.approx(oracle.least_step_s(document, 60), rel=0.01)


@pytest.mark.parametrize("ranks", [7, None])
def test_a_profile_may_hold_the_exchange_at_several_sizes(folder: Path, ranks: int | None) -> None:
    """Seven ranks take 70 ms, and others show that half of it is latency; the job's own workers are seven ranks."""
    latency_s, transfer_s = 0.035 / 12, 0.035 * 7 / 12
    others = [{"ranks": n, "seconds": 2 * (n - 1) * (latency_s + transfer_s / n)} for n in (2, 3, 5)]
    communication = {**PROFILE["communication"], "otherSizes": others} | ({"ranks": ranks} if ranks else {})
    write(folder, JOB, {**PROFILE, "communication": communication})
    others_seen = 0
    for found in answer(folder)["alternatives"]:
        counts = {pool["name"]: pool["ranks"] for pool in found["pools"]}
        total = sum(counts.values())
        factor = 2 * (total - 1) * (latency_s + transfer_s / total) / 0.07
        exchange = {"overlappedSeconds": 0.05 * factor, "lastBucketSeconds": 0.02 * factor, "gamma": 0.2}
        members = [{**each, "count": counts[each["name"]]} for each in PROFILE["members"] if each["name"] in counts]
        expected_s = oracle.least_step_s({"members": members, "communication": exchange}, 60)
        assert found["stepSeconds"] == pytest.approx(expected_s, rel=0.02)
        others_seen += total != 7
    assert others_seen


def test_a_pool_without_workers_is_as_fast_as_its_last_ones(folder: Path, running: Running) -> None:
    """The job's status has its speed, so alternatives with the pool have a forecast."""
    pools = [
        {
            "name": "a100",
            "speed": {
                "samples": 1,
                "perSampleSeconds": 99,
                "fixedSeconds": 0,
                "backwardPerSampleSeconds": 0,
                "backwardFixedSeconds": 0,
            },
        },
        {
            "name": "v100",
            "speed": {
                "samples": 20,
                "perSampleSeconds": 0.004,
                "fixedSeconds": 0.01,
                "backwardPerSampleSeconds": 0.008,
                "backwardFixedSeconds": 0,
            },
        },
        {"name": "t4"},
    ]
    running(encode_plan(a_plan()), {"internal": {"pools": pools}})
    result = CliRunner().invoke(main, ["forecast", str(folder / "job.yaml"), "--cluster", "-n", "ml", "-o", "json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["unknownPools"] == []
    assert [pool["name"] for pool in found["pools"]] == ["a100", "v100", "t4"]
    members = [
        {"name": "a100", "perSampleSeconds": 0.006, "count": 4},
        {
            "name": "v100",
            "perSampleSeconds": 0.004,
            "fixedSeconds": 0.01,
            "backwardPerSampleSeconds": 0.008,
            "count": 2,
        },
        {"name": "t4", "perSampleSeconds": 0.02, "maxSamples": 40, "count": 1},
    ]
    document = {"members": members, "communication": {"lastBucketSeconds": 0.01 * (6 / 7) / (2 / 3)}}
    assert found["stepSecondsWithoutNoise"] == pytest.approx(oracle.least_step_s(document, 60))


def test_a_job_that_adapts_its_batch(folder: Path, running: Running) -> None:
    """Before the start: its first batch; while it runs: the plan's; with --batch: that one."""
    job = (folder / "job.yaml").read_text(encoding="utf-8")
    assert "globalBatchSize: 60" in job
    adaptive = job.replace("globalBatchSize: 60", "adaptiveBatch: {min: 30, max: 600}")
    (folder / "job.yaml").write_text(adaptive, encoding="utf-8")
    assert answer(folder)["batch"] == 30
    running(encode_plan(a_plan()), {})
    arguments = ["forecast", str(folder / "job.yaml"), "--cluster", "-n", "ml", "-o", "json"]
    for more, batch in (([], 60), (["--batch", "90"], 90)):
        result = CliRunner().invoke(main, [*arguments, *more], catch_exceptions=False)
        assert json.loads(result.stdout)["batch"] == batch


def test_a_running_job_that_cannot_be_used(folder: Path, running: Running) -> None:
    """No measured speeds, and another job's plan: one sentence each."""
    arguments = ["forecast", str(folder / "job.yaml"), "--cluster", "-n", "ml"]
    running(
        encode_plan(Plan(job_uid="uid-1", generation=0, revision=0, members=(), ranks=(), global_batch_samples=60)),
        {},
    )
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "has not learned any speed yet" in result.stderr
    running(encode_plan(a_plan()).replace("uid-1", "uid-2"), {})
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "the plan is for job uid-2, not for uid-1" in result.stderr


def test_a_pool_s_micro_batch_size_limits_the_profile_s(folder: Path) -> None:
    """The smaller of the two counts; a pool without one keeps the profile's."""
    job = json.loads(json.dumps(JOB))
    for pool, size in zip(job["spec"]["workerPools"], (5, 9, None), strict=True):
        pool.update({"microBatchSize": size} if size else {})
    write(folder, job, PROFILE)
    a100, v100, t4 = answer(folder)["pools"]
    assert a100["microBatches"] == -(-a100["samplesPerRank"][1] // 5)
    assert v100["microBatches"] == -(-v100["samplesPerRank"][1] // 4)
    assert t4["microBatches"] == 1
