"""The operator takes its time from the API server: a clock of its own that is wrong by a day ends no job."""

from __future__ import annotations

import time
from email.utils import formatdate
from pathlib import Path

import pytest
from heterotrain_operator.cluster_state.parse import parse_job, rfc3339
from heterotrain_operator.engine.app import App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.kube.auth import load_configuration
from heterotrain_operator.kube.client import KubeClient
from heterotrain_operator.kube.errors import Throttled
from heterotrain_operator.kube.resources import NODES
from heterotrain_operator.kube.server_clock import CONFIRMATIONS, LONGEST_PAUSE_S, ServerClock, retry_after_s
from heterotrain_operator.settings import Settings
from support.api_stub import ApiStub, serve
from support.executors import at_once
from support.fake_cluster import NOW_S, a_running_job
from support.fakes import FakeKube

DAY_S = 86_400.0


class Machine:
    """A machine whose clocks tests set."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s
        self.passed_s = 0.0
        self.clock = ServerClock(wall=lambda: NOW_S + self.passed_s + self.ahead_s, monotonic=lambda: self.passed_s)

    def ask(self, *, server_ahead_s: float = 0.0, took_s: float = 0.1) -> None:
        """Receive an answer of an API server; the date was written in the middle of the call."""
        sent_s = self.clock.begin()
        date = formatdate(NOW_S + self.passed_s + took_s / 2 + server_ahead_s, usegmt=True)
        self.passed_s += took_s
        self.clock.note(date, sent_s=sent_s)


async def test_the_client_takes_the_time_from_answers_over_http(tmp_path: Path) -> None:
    """The server's clock is right, and the operator's is a day ahead."""
    with serve(ApiStub(lists={"/api/v1/nodes": []}), tmp_path) as kubeconfig:
        clock = ServerClock(wall=lambda: time.time() + DAY_S)
        kube = KubeClient(await load_configuration(str(kubeconfig)), clock=clock)
        assert [node async for node in kube.list(NODES)] == []
        await kube.close()
    assert clock.skew_s() == pytest.approx(DAY_S, abs=30.0)


@pytest.mark.parametrize("retry_after", ["", "soon", "Mon, 23 Nov 2026 00:00:00 GMT"])
async def test_a_throttled_call_is_told_from_others_whatever_the_pause_looks_like(
    tmp_path: Path, retry_after: str
) -> None:
    stub = ApiStub(refusals={("GET", "/api/v1/nodes"): [(429, "too many requests")]})
    stub.headers["Retry-After"] = retry_after
    with serve(stub, tmp_path) as kubeconfig:
        kube = KubeClient(await load_configuration(str(kubeconfig)))
        with pytest.raises(Throttled) as found:
            await anext(kube.list(NODES))
        await kube.close()
    assert 0.0 <= found.value.retry_after_s <= LONGEST_PAUSE_S


async def test_a_clock_that_is_a_day_ahead_exceeds_no_deadline() -> None:
    cluster = a_running_job(spec={"activeDeadlineSeconds": 3600})
    cluster.job["status"]["startTime"] = rfc3339(NOW_S)
    machine = Machine(ahead_s=DAY_S)
    machine.ask()
    kube, clocks = FakeKube(), Clocks.by(machine.clock)
    assert clocks.wall() == pytest.approx(NOW_S, abs=1.0)
    app = App(kube, Settings(leader_election=False, status_interval_s=0.0), threads=at_once(), clocks=clocks)
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job
    app.store.jobs.put(parse_job(cluster.job))
    await app.reconciler.run_once(cluster.job_view.key)
    conditions = kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]
    assert next(each["status"] for each in conditions if each["type"] == "Failed") == "False"
    assert app.metrics.registry.get_sample_value("heterotrain_operator_clock_skew_seconds") == pytest.approx(
        DAY_S, abs=1
    )


def test_each_answer_narrows_the_bounds() -> None:
    machine = Machine(ahead_s=-DAY_S)
    assert machine.clock.now_s() == NOW_S - DAY_S, "without an answer, there is only this machine's clock"
    for _ in range(50):
        machine.passed_s += 0.37
        machine.ask(took_s=0.02)
    assert machine.clock.now_s() == pytest.approx(NOW_S + machine.passed_s, abs=0.05)


def test_a_slow_answer_and_an_unreadable_date_say_nothing() -> None:
    machine = Machine(ahead_s=DAY_S)
    machine.ask(took_s=100.0)
    for date in ("", "yesterday", "Mon, 99 Foo 9999999999 00:00:00 GMT", "0"):
        machine.clock.note(date, sent_s=machine.clock.begin())
    assert machine.clock.skew_s() == 0.0


def test_one_api_server_of_several_with_a_wrong_clock_is_not_believed() -> None:
    machine = Machine()
    machine.ask()
    for _ in range(10):
        machine.ask(server_ahead_s=DAY_S)
        machine.ask()
    assert machine.clock.skew_s() == pytest.approx(0.0, abs=1.0)


def test_a_clock_that_was_corrected_is_believed_after_some_answers() -> None:
    machine = Machine()
    machine.ask(server_ahead_s=DAY_S)
    for _ in range(CONFIRMATIONS):
        machine.ask()
    assert machine.clock.skew_s() == pytest.approx(0.0, abs=1.0)


def test_a_requested_pause_is_a_number_or_a_date_within_bounds() -> None:
    assert retry_after_s("7", now_s=NOW_S) == 7.0
    assert retry_after_s(formatdate(NOW_S + 20, usegmt=True), now_s=NOW_S) == 20.0
    assert retry_after_s(formatdate(NOW_S - 20, usegmt=True), now_s=NOW_S) == 0.0
    assert retry_after_s("9" * 400, now_s=NOW_S) == LONGEST_PAUSE_S
    assert retry_after_s("", now_s=NOW_S) == 1.0
