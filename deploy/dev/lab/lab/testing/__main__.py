"""``python -m lab.testing check|gate|all [PART ...] [-- ARGUMENTS OF PYTEST]``: run tests and tell what became of them.

The check runs first. If it fails, nothing else of the gate runs; all other parts run also after a failure, so that one
run tells everything that is wrong. Only a cluster that does not start ends the run. If no cluster is running, one is
started for the tests and stopped after them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from local_cluster import lifecycle

from lab import cluster_tests
from lab.cluster import REPOSITORY
from lab.testing import budget, outcomes, parts, report
from lab.testing.lanes import Failed, Programs
from lab.testing.outcomes import Results
from lab.testing.parts import Mode, Plan
from lab.testing.running import Runner, local_cluster

UNSTABLE = REPOSITORY / "tests/unstable.txt"
REPORT = REPOSITORY / "out/tests.json"


@dataclass(slots=True)
class Cluster:
    """The machine's cluster: started where a plan needs it, and stopped if it did not run before."""

    is_needed: bool
    was_running: bool

    @classmethod
    def before(cls, plan: Plan) -> Cluster:
        """Return the state before a plan."""
        needed = any(part.on_cluster for part in plan.parts) or parts.OWN_CLUSTERS in plan.parts
        return cls(needed, needed and local_cluster("status") == 0)

    def stop(self) -> None:
        """Stop it unless it ran before."""
        if self.is_needed and not self.was_running:
            local_cluster("down")


def main(words: Sequence[str] | None = None) -> int:
    """Run and return the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="lab.testing", description=__doc__)
    parser.add_argument("mode", type=Mode, choices=Mode, metavar="check|gate|all")
    parser.add_argument("parts", nargs="*", metavar="PART")
    options = parser.parse_args(words[:at])
    try:
        plan = parts.plan(options.mode, options.parts, own_clusters=cluster_tests.are_due())
    except parts.UnknownPart as problem:
        parser.error(str(problem))
    cluster = Cluster.before(plan)
    if cluster.was_running and options.parts and parts.OWN_CLUSTERS in plan.parts:
        parser.error("the part 'cluster' starts clusters of its own: run `make cluster-down` first")
    os.chdir(REPOSITORY)
    os.environ.pop("PYTHONPATH", None)  # mypy and pytest have settings of their own
    if options.mode is Mode.ALL:
        os.environ.setdefault("REPEAT", "all")
        os.environ.setdefault(lifecycle.GRACE, "real")
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="heterotrain-tests-") as folder:
        programs = Programs(Path(folder))
        spares_heavy = options.mode is Mode.CHECK or (options.mode is Mode.GATE and not options.parts)
        runner = Runner(programs, words[at + 1 :], spares_heavy)
        programs.progress = runner.progress
        sampler = budget.Sampler()
        sampler.start()
        code = 0
        try:
            _run(plan, runner, cluster, stops_early=options.mode is Mode.GATE)
        except Failed as failed:
            programs.say(f"stopped: {failed} failed")
            code = 1
        except KeyboardInterrupt:
            programs.say("interrupted")
            code = 130
        finally:
            sampler.stop()
            cluster.stop()
        whole = not options.parts and options.mode is not Mode.ALL and os.environ.get("REPEAT", "gate") == "gate"
        return _tell(runner, sampler, enforces_budget=whole and code == 0) or code


def _run(plan: Plan, runner: Runner, cluster: Cluster, *, stops_early: bool) -> None:
    runner.pool(plan.pool)
    if stops_early and runner.programs.failed:
        runner.programs.say("the check failed, so nothing else runs")
        return
    runner.lanes(plan.lanes)
    rest = [part for part in plan.rest if part is not parts.OWN_CLUSTERS]
    runner.lanes([rest])
    runner.second_try([part for part in plan.parts if part is not parts.OWN_CLUSTERS])
    if parts.OWN_CLUSTERS in plan.rest:
        if cluster.was_running:
            runner.programs.say("a cluster is running, so the part 'cluster' does not run")
            return
        local_cluster("down")
        runner.lanes([[parts.OWN_CLUSTERS]])
        runner.second_try([parts.OWN_CLUSTERS])
        tests = runner.results.get(parts.OWN_CLUSTERS.name, Results()).tests
        if tests and not outcomes.verdict(tests.values(), runner.again).failed:
            cluster_tests.passed()


def _tell(runner: Runner, sampler: budget.Sampler, *, enforces_budget: bool) -> int:
    """Print the report, keep it and the unstable tests, and return the exit code."""
    limits = budget.budget_of(REPOSITORY / "pyproject.toml")
    unstable = outcomes.known_unstable(UNSTABLE.read_text())
    every = sum(runner.results.values(), Results())
    found = outcomes.verdict(every.tests.values(), runner.again, unstable)
    costs = {}
    for name, span in runner.spans.items():
        slow = budget.slowness(sampler.between(span.first_s, span.last_s), limits.work_s)
        part = runner.results.get(name, Results())
        spent_s = part.processor_s + span.cluster_s
        costs[name] = report.PartCost(span.last_s - span.first_s, spent_s, part.rest_s, slow, len(part.tests))
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report.document(every, costs, found), indent=1) + "\n")
    day = time.strftime("%Y-%m-%d", time.gmtime())
    with UNSTABLE.open("a") as kept:
        kept.writelines(f"{day} {name}\n" for name in found.recovered)
    over = [budget.excess(name, cost.processor_s, cost.slow, limits) for name, cost in costs.items()]
    over = [sentence for sentence in over if sentence and enforces_budget]
    programs = [name for name in runner.programs.failed if not _is_excused(name, runner, found)]
    print("\n" + report.table(costs, limits), report.slowest_lines(every), sep="\n\n")
    if second := report.second_tries(found, day, unstable):
        print("\n" + second)
    if programs or over:
        runner.programs.say(f"failed: {'; '.join([*programs, *over])}")
    print(found.counts, flush=True)
    return 1 if programs or over or found.failed else 0


def _is_excused(program: str, runner: Runner, found: outcomes.Verdict) -> bool:
    """Return whether all tests that failed in a program of tests have passed since, or do not gate."""
    part = next((part for part in parts.PARTS if program in {part.name, f"{part.name} again"}), None)
    if part is None or not part.is_real:
        return False
    failed = runner.results.get(part.name, Results()).failed
    return bool(failed) and not set(failed) & set(found.failed)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
