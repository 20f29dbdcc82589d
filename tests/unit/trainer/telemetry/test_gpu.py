"""Gauges of a GPU: from a driver in the place of NVIDIA's, and their absence where there is none."""

from __future__ import annotations

import logging
import threading
import urllib.request
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from heterotrain.identity import Identity, Mode
from heterotrain.telemetry import gpu
from heterotrain.telemetry.gpu import KEPT, STALE_S, GpuSamples, open_gpu
from heterotrain.telemetry.report import RankMetrics
from heterotrain.telemetry.serving import serve
from heterotrain_core.contract import metrics as names
from support.ports import free_port
from support.waiting import wait_until

WHOLE, PART = "00000000-1111-2222-3333-444444444444", "55555555-1111-2222-3333-444444444444"
IDENTITY = Identity(mode=Mode.OPERATED, job_uid="j", worker="w0", worker_uid="u0")
GAUGES = (names.GPU_UTILIZATION, names.GPU_MEMORY_USED, names.GPU_MEMORY_TOTAL, names.GPU_POWER, names.GPU_TEMPERATURE)


class Driver:
    """A driver with a whole GPU and a part of a divided one, by the functions of ``pynvml``."""

    def __init__(self) -> None:
        self.busy_percent = 0
        self.error: type[Exception] | None = None
        self.answers, self.waits = threading.Event(), threading.Event()
        self.answers.set()

    def _known(self, value: Any, *, of_a_part: bool, device: str) -> Any:
        if not self.answers.is_set():
            self.waits.set()
            self.answers.wait()
        if self.error is not None:
            raise self.error
        if device.startswith("MIG") and not of_a_part:
            raise pynvml.NVMLError_NotSupported
        return value

    def by_uuid(self, uuid: str) -> str:
        if uuid not in (f"GPU-{WHOLE}", f"MIG-{PART}"):
            raise pynvml.NVMLError_NotFound
        return uuid

    def utilization(self, device: str) -> Any:
        return self._known(SimpleNamespace(gpu=self.busy_percent, memory=7), of_a_part=False, device=device)

    def memory(self, device: str) -> Any:
        total = (10 if device.startswith("MIG") else 80) * 2**30
        return self._known(SimpleNamespace(total=total, used=6 * 2**30), of_a_part=True, device=device)

    def power(self, device: str) -> int:
        return int(self._known(312_500, of_a_part=False, device=device))

    def temperature(self, device: str, sensor: int) -> int:
        assert sensor == 0
        return int(self._known(64, of_a_part=True, device=device))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for name, function in {
        "Init": lambda: None, "DeviceGetHandleByUUID": made.by_uuid, "DeviceGetUtilizationRates": made.utilization,
        "DeviceGetMemoryInfo": made.memory, "DeviceGetPowerUsage": made.power,
        "DeviceGetTemperature": made.temperature,
    }.items():  # fmt: skip
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
    return made


def test_a_whole_gpu_is_read(driver: Driver) -> None:
    read = open_gpu(WHOLE)
    driver.busy_percent = 73
    assert read() == dict(zip(GAUGES, (0.73, 6 * 2**30, 80 * 2**30, 312.5, 64.0), strict=True))
    driver.error = pynvml.NVMLError_GpuIsLost
    assert read() == {}


@pytest.mark.usefixtures("driver")
def test_a_part_of_a_divided_gpu_has_what_the_driver_knows_about_it() -> None:
    assert open_gpu(PART)() == {
        names.GPU_MEMORY_USED: 6 * 2**30, names.GPU_MEMORY_TOTAL: 10 * 2**30, names.GPU_TEMPERATURE: 64.0,
    }  # fmt: skip


@pytest.mark.parametrize("who", ["no library", "no such GPU"])
def test_a_gpu_that_cannot_be_read_is_one_quiet_sentence(
    who: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most images on CPUs have no driver; training goes on, and no warning is logged."""
    if who == "no such GPU":
        request.getfixturevalue("driver")
    else:
        monkeypatch.setattr(pynvml, "nvmlInit", failing(pynvml.NVMLError_LibraryNotFound))
    report = RankMetrics(IDENTITY)
    with caplog.at_level(logging.INFO, logger="heterotrain"):
        gpu.sample("other", report)
        wait_until(lambda: "the GPU other is not exported: " in caplog.text, "a line of the log", timeout_s=60)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "Not Found" in caplog.text
    assert not report.current().keys() & {*GAUGES}


def failing(error: type[Exception]) -> Any:
    def fail() -> None:
        raise error

    return fail


def test_a_cpu_starts_nothing() -> None:
    report = RankMetrics(IDENTITY)
    gpu.watch(torch.device("cpu"), report)
    assert not report.current().keys() & {*GAUGES}


def test_a_scrape_shows_the_gpu_before_the_first_step_and_stays_quick_while_the_driver_hangs(
    driver: Driver,
) -> None:
    identity = Identity(mode=Mode.OPERATED, job_uid="j", worker="w", worker_uid="u", metrics_port=free_port())
    report = RankMetrics(identity)
    server: Any = serve(report, identity)

    def scraped() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{identity.metrics_port}/metrics", timeout=20) as reply:
            text: str = reply.read().decode()
            return text

    driver.busy_percent = 50
    end = gpu.sample(WHOLE, report, every_s=0.01)
    try:
        labels = '{job_uid="j",local_rank="0",worker="w",worker_uid="u"}'
        wait_until(lambda: f"{names.GPU_UTILIZATION}{labels} 0.5\n" in scraped(), "a sample", timeout_s=60)
        assert all(f"\n{name}{labels}" in scraped() for name in GAUGES)
        driver.answers.clear()
        wait_until(driver.waits.is_set, "a call that hangs", timeout_s=60)
        assert f"{names.READY}{labels} 0.0\n" in scraped()
    finally:
        end.set()
        driver.answers.set()
        server.shutdown()
        server.server_close()


def test_utilisation_is_a_mean_over_the_newest_samples_and_ends_with_them() -> None:
    clock_s = 0.0
    samples = GpuSamples(lambda: clock_s)
    assert samples.gauges() == {}
    for busy in (*[1.0] * 5, *[0.0, 0.5] * (KEPT // 2)):
        clock_s += 1
        samples.add({names.GPU_UTILIZATION: busy, names.GPU_POWER: 100 * busy})
    assert samples.gauges() == {names.GPU_UTILIZATION: 0.25, names.GPU_POWER: 50.0}
    clock_s += STALE_S - 0.1
    assert samples.gauges()
    clock_s += 0.2
    assert samples.gauges() == {}
    samples.add({names.GPU_UTILIZATION: 1.0})
    samples.add({})
    assert samples.gauges() == {}, "the newest sample has no values: the GPU is lost"
