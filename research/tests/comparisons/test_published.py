"""Published instances and the planners of other systems: what they print, and that their plans are possible."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from heterotrain_core.units import UnitProfile, UnitSeconds
from heterotrain_planner.layout.cover import cover
from heterotrain_planner.layout.problem import DeviceKind, Link, Problem
from heterotrain_planner.layout.result import Cover
from heterotrain_planner.layout.sharded import sharded_templates
from heterotrain_planner.layout.template_table import TemplateTable, template_table
from heterotrain_simulate import command
from heterotrain_simulator import published
from heterotrain_simulator.measured_pipelines import (
    AMP_TRIALS,
    SAILOR_PIPELINES,
    amp_seconds,
    rank_correlation,
    sailor_seconds,
)
from heterotrain_simulator.pipeline_baselines import PLANNERS, best_step, groupings
from heterotrain_simulator.published_comparison import Row, llama, markdown, rows
from heterotrain_simulator.share_baselines import (
    learned_layers,
    least_maximum,
    least_variance,
    proportional_to_one,
    random_grouping_s,
)
from heterotrain_simulator.zones import zone_costs
from support.cli_runner import CliRunner


def first_rows(number: int) -> list[Row]:
    return list(itertools.islice(rows(), number))


def test_least_variance_is_not_least_time() -> None:
    arguments = ((1.57, 3.70, 3.46), (3, 1, 3), 28)
    assert least_variance(*arguments) == (5, 4, 3)
    assert least_maximum(*arguments) == (6, 1, 3)


def test_the_split_is_never_behind_the_published_rules_for_pipelines() -> None:
    row = first_rows(1)[0]
    assert row.published == "", "the instances are drawn here"
    least, most = row.ours.removesuffix(" × least maximum").split(" to ")
    assert float(least) <= float(most) == 1.0


def test_the_chain_of_helix_machines_is_the_best_one() -> None:
    # Independent: at a rate, each machine holds the most layers that still reach it. The best rate is a table entry.
    rates, machines = published.HELIX_TOKENS_PER_S, published.HELIX_MACHINES
    best = 0.0
    for rate in itertools.chain(*rates.values()):
        held = sum(count * sum(entry >= rate for entry in rates[name]) for name, count in machines.items())
        if held >= published.HELIX_LAYERS:
            best = max(best, rate)
    bound, chain = first_rows(3)[1:]
    assert bound.ours == "2803.86" == str(published.HELIX_COMPUTE_BOUND_PER_S)
    assert chain.ours == f"{best}, one chain of 24 machines"
    assert best > published.HELIX_FLOW_PER_S
    assert best * published.HELIX_TOKEN_BYTES < published.HELIX_LINK_BYTES_PER_S


def test_measured_iterations_are_reproduced() -> None:
    for run in published.SAILOR_RUNS:
        each = run.micro_batches // len(run.micro_batch_s)
        assert max(run.micro_batch_s) * each + run.sync_s == pytest.approx(run.measured_s, rel=0.04)


def test_amp_s_trials_are_ranked_as_they_were_measured() -> None:
    """On its own profiles and links; the fastest trial that was measured is the fastest predicted one."""
    measured = [trial.measured_s for trial in AMP_TRIALS]
    predicted = [amp_seconds(trial) for trial in AMP_TRIALS]
    assert rank_correlation(predicted, measured) > 0.94 > rank_correlation([t.own_s for t in AMP_TRIALS], measured)
    assert predicted.index(min(predicted)) == measured.index(min(measured))


def test_ranks_of_equal_values_are_their_mean() -> None:
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)  # scipy.stats.spearmanr
    assert rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)


def test_pipelines_that_no_slow_link_paces_are_reproduced() -> None:
    off = {run.name: sailor_seconds(run) / run.measured_s - 1 for run in SAILOR_PIPELINES}
    assert {name for name, each in off.items() if abs(each) < 0.03} == {"N4_D2", "N6_D3"}
    assert all(each < 0.03 for each in off.values()), "the others take longer than predicted"


def test_the_published_plan_of_cephalo_is_found() -> None:
    row = first_rows(6)[5]
    assert row.instance.startswith("Cephalo, GPT 2.7B, 2 L4 + A6000 + P40")
    assert row.ours.endswith("shares " + ", ".join(str(samples) for _, samples, _ in published.CEPHALO_PLAN))
    assert row.verdict == "equal"


def test_shares_by_speed_at_one_have_no_limit() -> None:
    assert proportional_to_one([[1.0, 2.0], [3.0, 6.0]], 8) == (6, 2)
    assert proportional_to_one([[1.0]] * 3, 8) in {(3, 3, 2), (3, 2, 3), (2, 3, 3)}


def test_a_learned_policy_comes_near_the_best_layers() -> None:
    seconds = (1.0, 2.0, 5.0)
    found = learned_layers(seconds, 24, steps=200, draws=32, seed=1)
    assert sum(found) == 24
    least = min(
        max(a * seconds[0], b * seconds[1], (24 - a - b) * seconds[2])
        for a, b in itertools.product(range(25), repeat=2)
        if a + b <= 24
    )
    ends = max(second * layers for second, layers in zip(seconds, found, strict=True))
    assert least <= ends <= 1.2 * least


def test_random_groupings_are_groupings() -> None:
    links = {pair: Link(bytes_per_s=1.0 if pair[0] != pair[1] else 10.0) for pair in itertools.product("ab", repeat=2)}
    costs = zone_costs("ab", links, stage_devices=2, exchange_bytes=2.0, boundary_bytes=1.0)
    least, mean = random_grouping_s(costs, [2, 2], stages=2, draws=50, seed=1)
    # Two stages of four devices: each stage in its zone, or one device of each zone in both.
    assert least == pytest.approx(min(0.2 + 2.0, 2.0 + 0.2))
    assert least < mean < 4.0 + 1e-9


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_plans_of_other_planners_fit_and_are_not_better(planner: object) -> None:
    problem = llama({"a100-40": 2, "a6000": 2, "a10g": 2, "t4": 2}, batch_samples=64)
    problem = replace(problem, micro_batches=(2, 4))
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    ours = cover(templates)
    assert isinstance(ours, Cover)
    best = best_step(problem, planner, published.NOMINAL_TFLOPS)  # type: ignore[arg-type]  # one of PLANNERS
    assert best is not None
    memory = {kind.name: kind.memory_bytes for kind in problem.kinds}
    used = 0
    for layout in best.layouts:
        edges = [(stage.first_unit, stage.last_unit + 1) for stage in layout.stages]
        assert edges[0][0] == 0
        assert edges[-1][1] == len(problem.units)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(edges))
        assert all(stage.memory_bytes <= memory[stage.kind] for stage in layout.stages)
        used += len(layout.stages)
    assert used + best.idle_devices == 8
    assert sum(best.micro_batches) * best.micro_batch_samples >= 64
    assert ours.step_s <= best.step_s * (1 + 1e-9)


def test_groupings_use_no_device_twice() -> None:
    problem = llama({"a100-40": 4, "a6000": 2, "a10g": 4, "t4": 3}, batch_samples=64)
    counts = np.array([kind.count for kind in problem.kinds])
    for groups in groupings(problem).values():
        used = np.bincount([kind for one in groups for kind in one], minlength=len(counts))
        assert np.all(used <= counts)


def test_the_command_prints_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rows without searches over pipelines; the whole table takes half a minute.
    some = first_rows(7)
    monkeypatch.setattr(command, "rows", lambda: iter(some))
    printed = CliRunner().invoke(command.simulate, ["--published"])
    assert printed.exit_code == 0, printed.output
    assert markdown(some) in printed.stdout
    assert printed.stdout.count("\n") == 9


def test_one_member_of_all_cards_is_found_where_members_in_parts_promise_more() -> None:
    """Without whole members, a member and a half seem to be faster; two exchange for longer than they gain."""
    problem = llama({"a100-40": 2, "a10g": 4, "t4": 8}, batch_samples=1024)
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    every, pipelines = cover(templates, further=sharded_templates(problem)), cover(templates)
    assert isinstance(every, Cover)
    assert isinstance(pipelines, Cover)
    assert every.step_s <= pipelines.step_s * 1.001
    assert len(every.members) == 1


@pytest.mark.parametrize("case", published.DTFM_CASES, ids=lambda case: case.where)
def test_the_planner_keeps_members_in_zones_where_that_is_best(case: published.WideAreaCase) -> None:
    """Each zone is a pool, and a device holds an eighth of the model; only the spot network has no such arrangement."""
    names = {name for name, _ in case.zones}
    point = UnitSeconds(micro_batch_samples=1, forward_s=0.01, backward_s=0.02)
    unit = UnitProfile(
        name="layer", parameter_bytes=int(published.DTFM_STAGE_GRADIENT_BYTES / 3), activation_bytes=0,
        boundary_bytes=int(published.DTFM_BOUNDARY_BYTES), seconds=dict.fromkeys(names, (point,)),
    )  # fmt: skip
    pairs = [*case.links, *((name, name, ms, gbit) for name, ms, gbit in case.within)]
    problem = Problem(
        units=(unit,) * 24,
        kinds=tuple(
            DeviceKind(name=name, count=number, memory_bytes=int(4.04 * published.DTFM_STAGE_GRADIENT_BYTES))
            for name, number in case.zones
        ),
        links={
            (one, other): Link(bytes_per_s=gbit * 1e9 / 8, latency_s=ms / 1e3)
            for one, other, ms, gbit in pairs
            if {one, other} <= names
        },
        batch_samples=64, micro_batches=(1,), least_members=8, most_stages=8,
    )  # fmt: skip
    templates = template_table(problem)
    assert isinstance(templates, TemplateTable)
    found = cover(templates)
    assert isinstance(found, Cover)
    in_one_zone = [len(layout.devices) == 1 for layout in found.layouts]
    assert len(in_one_zone) == 8
    assert all(in_one_zone) == ("spot" not in case.where)
