"""The clock of patience, its accounts, and the limits that it measures."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support import patience
from support.patience import LOOK_S, RELUCTANCE, PatienceClock, Pressure, SleeperCount
from support.suites import TESTS, output_of
from support.waiting import wait_until


class Machine:
    """Real time and waits that a test sets."""

    def __init__(self) -> None:
        self.real_s = 1000.0
        self.waited_s = 50.0

    def clock(self) -> PatienceClock:
        return PatienceClock(lambda: self.waited_s, real_s=lambda: self.real_s)

    def passes(self, real_s: float, *, waited_s: float = 0.0) -> None:
        self.real_s += real_s
        self.waited_s += waited_s


def test_without_waits_it_is_real_time() -> None:
    machine = Machine()
    clock = machine.clock()
    began_s = clock()
    machine.passes(7.0)
    assert clock() - began_s == pytest.approx(7.0)


@pytest.mark.parametrize("waited_s", [10.0, 1e6])
def test_behind_a_limit_is_a_real_one_ten_times_as_long(waited_s: float) -> None:
    machine = Machine()
    clock = machine.clock()
    began_s = clock()
    machine.passes(10.0, waited_s=waited_s)
    assert clock() - began_s == pytest.approx(10.0 / RELUCTANCE)


def test_it_never_runs_backwards_nor_faster_than_real_time() -> None:
    draw = random.Random(3)  # noqa: S311  # the same steps in every run
    machine = Machine()
    clock = machine.clock()
    for _ in range(1000):
        before_s, real_s = clock(), draw.choice([0.0, LOOK_S / 3, 0.01, 2.0])
        machine.passes(real_s, waited_s=draw.choice([-0.5, 0.0, 0.004, 0.5, 9.0]))
        advance_s = clock() - before_s
        assert 0.0 <= advance_s <= real_s + 2 * LOOK_S


def test_all_short_steps_together_count() -> None:
    machine = Machine()
    clock = machine.clock()
    began_s = clock()
    for _ in range(3000):
        machine.passes(LOOK_S / 3)
        clock()
    assert clock() - began_s == pytest.approx(1000 * LOOK_S, abs=LOOK_S)


def test_the_kernels_account_is_read_with_the_hosts_share(tmp_path: Path) -> None:
    pressure, statistics = tmp_path / "cpu", tmp_path / "stat"
    statistics.write_text("cpu  1 2 3 4 5 6 7 200 9 10\ncpu0 1\n")
    pressure.write_text("some avg10=1.00 avg60=2.00 avg300=3.00 total=1500000\nfull avg10=0.00 total=9\n")
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    assert Pressure(pressure, statistics=statistics)() == pytest.approx(1.5 + 200 * tick_s)


def test_the_process_of_the_lowest_priority_counts_the_rest(tmp_path: Path) -> None:
    count = tmp_path / "idle"
    count.write_bytes(patience._COUNT.pack(3.0))
    machine = Machine()
    account = SleeperCount(count, real_s=lambda: machine.real_s)
    before_s = account()
    machine.passes(5.0)
    count.write_bytes(patience._COUNT.pack(3.5))  # it woke for half a second of these five
    assert account() - before_s == pytest.approx(4.5)


@pytest.mark.parametrize("machine", [patience.MACHINE, Path("/nowhere/cpu")], ids=["kernel", "sleeper"])
def test_descendants_read_the_same_account_and_nothing_stays_behind(machine: Path, tmp_path: Path) -> None:
    script = f"""
import os, subprocess, sys, time
from pathlib import Path
from support import patience
if len(sys.argv) == 2:
    patience._own_group = patience.contextlib.nullcontext
with patience.share(machine=Path({str(machine)!r})):
    chosen = os.environ.get(patience.VARIABLE, "none")
    inner = "from support import patience; import os; print(os.environ.get(patience.VARIABLE, 'none'))"
    found = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True, check=True).stdout.strip()
    assert found == chosen, (found, chosen)
    before = patience.now_s()
    while patience.now_s() == before:
        time.sleep(0.001)
assert patience.VARIABLE not in os.environ
assert not Path(chosen).exists() or chosen == "none", chosen
"""
    environment = {name: value for name, value in os.environ.items() if name != patience.VARIABLE}
    for more in ([], ["without a group"]):
        subprocess.run(
            [sys.executable, "-c", script, *more], check=True, env=environment | {"PYTHONPATH": str(TESTS)}, timeout=240
        )


def test_a_wait_ends_by_the_clock_that_it_is_given() -> None:
    readings = iter([0.0, 4.0, 6.0])
    with pytest.raises(AssertionError, match=r"not within 5 s: it rains\nclear sky"):
        wait_until(
            lambda: False, "it rains", timeout_s=5.0, every_s=0.0, evidence=lambda: "clear sky",
            clock=lambda: next(readings),
        )  # fmt: skip


SUITE = """
import time
from support import patience

def test_longer_than_its_limit(): time.sleep({seconds})
"""


@pytest.mark.parametrize(("speed", "seconds", "expected"), [(0.0, 1, "1 passed"), (1.0, 200, "Timeout (>0.3s)")])
def test_a_tests_limit_counts_patience(tmp_path: Path, speed: float, seconds: int, expected: str) -> None:
    text = (
        f"{SUITE.format(seconds=seconds)}\nbegan_s = time.monotonic()\n"
        f"patience._process_clock = lambda: (time.monotonic() - began_s) * {speed}\n"
    )
    assert expected in output_of(text, tmp_path, {}, "--timeout=0.3")
