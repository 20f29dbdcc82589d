"""Gauges of a GPU: from a library with NVML's binary interface, and their absence where there is none."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from heterotrain.identity import Identity, Mode
from heterotrain.telemetry import gpu
from heterotrain.telemetry.gpu import KEPT, STALE_S, GpuSamples
from heterotrain.telemetry.nvml import NvmlError, Reading, open_gpu
from heterotrain.telemetry.report import Report, serve
from heterotrain_core.contract import metrics as names
from support.ports import free_port
from support.waiting import wait_until

SOURCE = Path(__file__).parents[3] / "support/fake_nvml.c"
WHOLE, PART = "00000000-1111-2222-3333-444444444444", "55555555-1111-2222-3333-444444444444"
IDENTITY = Identity(mode=Mode.OPERATED, job_uid="j", worker="w0", worker_uid="u0")
GAUGES = (names.GPU_UTILIZATION, names.GPU_MEMORY_USED, names.GPU_MEMORY_TOTAL, names.GPU_POWER, names.GPU_TEMPERATURE)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    warnings = ("-Wall", "-Wextra", "-Werror")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", *warnings, "-o", built, SOURCE], check=True, capture_output=True)
    return built


@pytest.fixture
def driver(library: Path) -> Iterator[ctypes.CDLL]:
    """Yield the library as the driver's side: what it reports is set by it."""
    found = ctypes.CDLL(str(library))
    found.fake_reset()
    yield found
    found.fake_reset()


@pytest.mark.needs_program("cc")
def test_a_whole_gpu_is_read(library: Path, driver: ctypes.CDLL) -> None:
    read = open_gpu(WHOLE, library=str(library))
    driver.fake_busy(73)
    assert read() == Reading(
        utilization_ratio=0.73, memory_used_bytes=6 * 2**30, memory_total_bytes=80 * 2**30, power_w=312.5,
        temperature_c=64.0,
    )  # fmt: skip


@pytest.mark.needs_program("cc")
def test_a_part_of_a_divided_gpu_has_what_the_driver_knows_about_it(library: Path, driver: ctypes.CDLL) -> None:
    found = open_gpu(PART, library=str(library))()
    assert (found.utilization_ratio, found.power_w) == (None, None)
    assert (found.memory_used_bytes, found.memory_total_bytes) == (6 * 2**30, 10 * 2**30)


@pytest.mark.needs_program("cc")
def test_a_gpu_that_is_lost_has_no_values(library: Path, driver: ctypes.CDLL) -> None:
    read = open_gpu(WHOLE, library=str(library))
    driver.fake_lost()
    assert read() == Reading()


@pytest.mark.needs_program("cc")
def test_a_gpu_that_the_driver_does_not_show_is_named(library: Path, driver: ctypes.CDLL) -> None:
    with pytest.raises(NvmlError, match=r"^NVML does not show the GPU no-such-gpu \(Not Found\)$"):
        open_gpu("no-such-gpu", library=str(library))
    driver.fake_reset()
    driver.fake_no_driver()
    with pytest.raises(NvmlError, match=r"^NVML does not start \(Driver Not Loaded\)$"):
        open_gpu(WHOLE, library=str(library))


@pytest.mark.parametrize("name", ["libnvidia-ml.so.1", "libc.so.6"])
def test_a_library_that_is_absent_or_another_one_is_one_quiet_sentence(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Most images on CPUs have none; training goes on, and no warning is logged."""
    report = Report(IDENTITY)
    with caplog.at_level(logging.INFO, logger="heterotrain"):
        gpu.sample(WHOLE, report, library=name)
        wait_until(lambda: "is not exported" in caplog.text, "a line of the log", timeout_s=60)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert not report.current().keys() & {*GAUGES}


def test_a_cpu_starts_nothing() -> None:
    report = Report(IDENTITY)
    gpu.watch(torch.device("cpu"), report)
    assert report.of_device is dict


@pytest.mark.needs_program("cc")
def test_a_scrape_shows_the_gpu_before_the_first_step_and_stays_quick_while_the_driver_hangs(
    library: Path, driver: ctypes.CDLL
) -> None:
    identity = Identity(mode=Mode.OPERATED, job_uid="j", worker="w", worker_uid="u", metrics_port=free_port())
    report = Report(identity)
    server: Any = serve(report, identity)

    def scraped() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{identity.metrics_port}/metrics", timeout=20) as reply:
            text: str = reply.read().decode()
            return text

    driver.fake_busy(50)
    end = gpu.sample(WHOLE, report, library=str(library), every_s=0.01)
    try:
        labels = '{job_uid="j",local_rank="0",worker="w",worker_uid="u"}'
        wait_until(lambda: f"{names.GPU_UTILIZATION}{labels} 0.5\n" in scraped(), "a sample", timeout_s=60)
        assert all(f"\n{name}{labels}" in scraped() for name in GAUGES)
        driver.fake_hangs(1)
        wait_until(lambda: driver.fake_is_waiting() == 1, "a call that hangs", timeout_s=60)
        assert f"{names.READY}{labels} 0.0\n" in scraped()
    finally:
        end.set()
        driver.fake_hangs(0)
        server.shutdown()
        server.server_close()


def test_utilisation_is_a_mean_over_the_newest_samples_and_ends_with_them() -> None:
    clock_s = 0.0
    samples = GpuSamples(lambda: clock_s)
    assert samples.gauges() == {}
    for busy in (*[1.0] * 5, *[0.0, 0.5] * (KEPT // 2)):
        clock_s += 1
        samples.add(Reading(utilization_ratio=busy, power_w=100 * busy))
    assert samples.gauges() == {names.GPU_UTILIZATION: 0.25, names.GPU_POWER: 50.0}
    clock_s += STALE_S - 0.1
    assert samples.gauges()
    clock_s += 0.2
    assert samples.gauges() == {}
    samples.add(Reading(utilization_ratio=1.0))
    samples.add(Reading())
    assert samples.gauges() == {}, "the newest sample has no values: the GPU is lost"
