"""``heterotrain bench``: the table and the profile of known measurements, and scripts that cannot be measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from heterotrain_cli.bench.ranks import BenchRun, measure, samples_per_s
from heterotrain_cli.bench.result import profile, table
from heterotrain_cli.errors import InputError
from heterotrain_cli.main import main
from heterotrain_planner.perf.counters import MeanVariance, Observation
from support.cli_runner import CliRunner

FORWARD_S, BACKWARD_S, FIXED_S, UPDATE_S = 1e-4, 2e-4, 4e-3, 1e-3
OVERLAPPED_S, LAST_S, GAMMA = 0.004, 0.002, 0.25


def observation(member: str, samples: int, *, exchange_s: float = 0.0, steps: int = 100) -> Observation:
    """Return what a rank with the times above counts at this share."""

    def seconds(mean: float) -> MeanVariance:
        return MeanVariance(mean=mean, variance=(0.01 * mean) ** 2)

    forward_s, backward_s = FORWARD_S * samples + FIXED_S, BACKWARD_S * samples
    compute_s = forward_s + backward_s + UPDATE_S
    return Observation(
        member=member, share_samples=samples, steps=steps, ended_s=10.0,
        load=seconds(0.0), forward=seconds(forward_s), backward=seconds(backward_s), update=seconds(UPDATE_S),
        compute=seconds(compute_s), sync=seconds(exchange_s), step=seconds(compute_s + exchange_s),
        first_bucket_fraction=MeanVariance(mean=GAMMA, variance=1e-6),
        bucket_steps=steps if exchange_s else 0,
        overlapped_s=OVERLAPPED_S if exchange_s else None, last_bucket_s=LAST_S if exchange_s else None,
    )  # fmt: skip


def compute_s(samples: int) -> float:
    return (FORWARD_S + BACKWARD_S) * samples + FIXED_S + UPDATE_S


def test_the_table_has_speed_up_and_scaling_efficiency() -> None:
    alone = [observation("r0", 512)]
    four = [observation(f"r{rank}", 128, exchange_s=0.006) for rank in range(4)]
    one, other = table([(1, 512, alone), (4, 512, four)])
    assert (one.speed_up, one.efficiency) == (1.0, 1.0)
    assert one.samples_per_s == pytest.approx(512 / compute_s(512))
    assert other.speed_up == pytest.approx(compute_s(512) / (compute_s(128) + 0.006))
    assert other.efficiency == pytest.approx(other.speed_up / 4)
    assert other.step_s == pytest.approx(compute_s(128) + 0.006)


def test_ranks_that_were_read_at_other_steps_count_alike() -> None:
    even = [observation("r0", 64), observation("r1", 64)]
    uneven = [observation("r0", 64, steps=100), observation("r1", 64, steps=60)]
    assert samples_per_s(uneven) == pytest.approx(samples_per_s(even))


def test_the_profile_predicts_the_step_that_was_measured(tmp_path: Path) -> None:
    solo = [[observation("r0", samples)] for samples in (512, 256, 128)]
    together = [observation(f"r{rank}", 128, exchange_s=0.006) for rank in range(4)]
    found, _ = profile("a100", solo, [(2, together[:2]), (4, together)])
    assert found is not None
    assert found["members"][0]["count"] == 4
    assert found["members"][0]["variation"] == pytest.approx(0.01, rel=0.05)
    assert found["communication"]["gamma"] == pytest.approx(GAMMA)
    others = [{"ranks": 2, "seconds": pytest.approx(OVERLAPPED_S + LAST_S), "oneWorker": True}]
    assert (found["communication"]["ranks"], found["communication"]["otherSizes"]) == (4, others)
    file = tmp_path / "profile.yaml"
    file.write_text(yaml.safe_dump(found))
    done = CliRunner().invoke(main, ["forecast", "--profile", str(file), "--batch", "512", "-o", "json"])
    assert done.exit_code == 0, done.output
    step_s = yaml.safe_load(done.output)["stepSeconds"]
    backward_s = BACKWARD_S * 128
    truth_s = max(compute_s(128) + LAST_S, compute_s(128) - (1 - GAMMA) * backward_s + OVERLAPPED_S + LAST_S)
    assert step_s == pytest.approx(truth_s, rel=0.02)


def test_without_measurements_there_is_no_profile() -> None:
    found, why = profile("a100", [[]], ())
    assert found is None
    assert "no usable observation" in why


def run_of(ranks: int) -> BenchRun:
    return BenchRun(ranks=ranks, batch_samples=8, threads=1)


def test_a_script_that_fails_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('the data are missing')\n")
    with pytest.raises(InputError, match=r"ended with exit code 1 before it was measured; .*the data are missing"):
        measure([str(script)], run_of(2), seconds=1, timeout_s=240, folder=tmp_path)


def test_a_script_that_never_trains_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(InputError, match=r"it has to call heterotrain\.init\(\)"):
        measure([str(script)], run_of(1), seconds=0.1, timeout_s=0.5, folder=tmp_path)


def test_a_port_that_another_program_has_taken_is_said(tmp_path: Path) -> None:
    """It answers as ranks of another job do, and not as a server of metrics does; ranks are started three times."""
    script, started = tmp_path / "train.py", tmp_path / "started"
    script.write_text(
        "import os, socket\n"
        f"open({str(started)!r}, 'a').write('started ')\n"
        "server = socket.create_server(('127.0.0.1', int(os.environ['HETEROTRAIN_METRICS_PORT'])))\n"
        "while True:\n    server.accept()[0].sendall(b'heterotrain rank 1\\n')\n"
    )
    with pytest.raises(InputError, match=r"another program took port \d+"):
        measure([str(script)], run_of(1), seconds=0.1, timeout_s=240, folder=tmp_path)
    assert started.read_text() == "started started started "


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batch", "2"], "--batch 2 is too small for 8 workers"),
        (["--batch", "8", "--workers", "1,x"], "not a list of numbers"),
        (["--batch", "8", "--workers", "1,1000"], "not a list of numbers"),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, options: list[str], said: str) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = CliRunner().invoke(main, ["bench", str(script), *options])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
