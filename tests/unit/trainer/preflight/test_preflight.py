"""Checks before a training: what passes, what fails, and what each of them tells the user to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from heterotrain.checkpoints.storage import Storage
from heterotrain.preflight import machine
from heterotrain.preflight.network import Pair, judge_clocks, judge_pairs, pairs_of
from heterotrain.preflight.result import Check, Verdict, has_failed, lines, summary

CPU = torch.device("cpu")


def check(name: str, verdict: Verdict, message: str = "m") -> Check:
    return Check(name=name, verdict=verdict, message=message)


def test_a_healthy_machine_passes(tmp_path: Path) -> None:
    found = [
        machine.versions(), machine.computing(CPU), machine.shared_memory(tmp_path),
        machine.store(str(tmp_path / "store"), who="0"), machine.names(("localhost",)),
    ]  # fmt: skip
    assert [each.verdict for each in found] == [Verdict.OK] * 5, found
    assert list((tmp_path / "store").iterdir()) == [], "the written file is removed"


def test_a_cpu_has_nothing_to_check_for_gpus() -> None:
    found = [machine.kernels(CPU), machine.gpu_memory(CPU), machine.nccl(CPU)]
    assert {each.verdict for each in found} == {Verdict.SKIPPED}


def test_a_gpu_that_pytorch_does_not_reach_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.driver(tmp_path).verdict is Verdict.SKIPPED
    (tmp_path / "nvidia0").touch()
    found = machine.driver(tmp_path)
    assert found.verdict is Verdict.FAILED
    assert "update the driver" in found.message
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "use an image with CUDA" in machine.driver(tmp_path).message


@pytest.mark.parametrize("path", ["neuron0", "hl0", "accel0", "accel/accel1", "davinci3", "kfd"])
def test_an_accelerator_that_nothing_uses_is_a_failure(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on the CPU next to it would be silent, and a hundred times slower."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).touch()
    found = machine.driver(tmp_path)
    assert found.verdict is Verdict.FAILED
    assert path in found.message
    assert "training uses the CPU" in found.message


def test_a_backend_of_pytorch_that_nothing_uses_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    found = machine.driver(tmp_path)
    assert found.verdict is Verdict.FAILED
    assert "an accelerator of type xpu, which this library does not use" in found.message


def test_several_slices_of_a_gpu_in_one_container_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    found = machine.driver(tmp_path)
    assert found.verdict is Verdict.FAILED
    assert "2 MIG slices are visible" in found.message


@pytest.mark.parametrize("value", ["", "-1"])
def test_a_gpu_that_is_hidden_on_purpose_is_not_a_failure(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    (tmp_path / "nvidia0").touch()
    found = machine.driver(tmp_path)
    assert found.verdict is Verdict.SKIPPED
    assert f"hidden by CUDA_VISIBLE_DEVICES={value}; training uses the CPU" in found.message


def test_a_device_that_computes_wrongly_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: right(a, b) * (1.1 if a.dtype == torch.float32 else 1.0)
    )
    found = machine.computing(CPU)
    assert (found.verdict, "wrong by 10%" in found.message) == (Verdict.FAILED, True)


def test_a_store_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert machine.store(str(tmp_path / "file"), who="0").verdict is Verdict.FAILED
    assert machine.store("nowhere://bucket", who="0").verdict is Verdict.FAILED
    assert machine.store(None, who="0").verdict is Verdict.SKIPPED

    class Denied(Storage):
        def put(self, *_: object) -> object:  # type: ignore[override]  # it never returns
            raise PermissionError("access denied")

    found = machine.store(str(tmp_path / "store"), who="0", connect=Denied)
    assert found.verdict is Verdict.FAILED
    assert "access denied" in found.message
    assert "credentials" in found.message


def test_a_store_that_returns_other_bytes_is_a_failure(tmp_path: Path) -> None:
    class Damaging(Storage):
        def get_into(self, stored: object, buffers: object) -> None:
            (path,) = (tmp_path / "store").iterdir()
            path.write_bytes(b"x" * machine.PROBE_BYTES)
            super().get_into(stored, buffers)  # type: ignore[arg-type]  # passed on as they are

    found = machine.store(str(tmp_path / "store"), who="0", connect=Damaging)
    assert (found.verdict, "checksum" in found.message) == (Verdict.FAILED, True)
    assert list((tmp_path / "store").iterdir()) == []


def test_small_or_read_only_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory(tmp_path / "missing").verdict is Verdict.FAILED
    monkeypatch.setattr(machine, "LEAST_SHM_BYTES", 1 << 60)
    assert machine.shared_memory(tmp_path).verdict is Verdict.WARNING


def test_a_name_without_an_address_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = machine.names(("store.example",))
    assert (found.verdict, "store.example has no address" in found.message) == (Verdict.FAILED, True)


def test_the_slowest_pair_is_named() -> None:
    def pair(a: int, b: int, rate: float) -> Pair:
        return Pair(ranks=(a, b), bytes_per_s=rate, latency_s=1e-4)

    names = ["a", "b", "c"]
    even = judge_pairs([pair(0, 1, 1e9), pair(0, 2, 1.1e9), pair(1, 2, 0.9e9)], names)
    assert even.verdict is Verdict.OK
    uneven = judge_pairs([pair(0, 1, 1e9), pair(0, 2, 1.1e9), pair(1, 2, 0.1e9)], names)
    assert uneven.verdict is Verdict.WARNING
    assert "slowest 0.8 Gbit/s, between b and c" in uneven.message
    assert judge_pairs([], names).verdict is Verdict.SKIPPED


def test_many_ranks_are_measured_in_a_ring_only() -> None:
    assert len(pairs_of(8)) == 28
    assert pairs_of(100) == [(rank, rank + 1) for rank in range(99)]


def test_a_wrong_clock_is_named() -> None:
    assert judge_clocks([0.0], ["a"]).verdict is Verdict.SKIPPED
    assert judge_clocks([0.0, 0.1], ["a", "b"]).verdict is Verdict.OK
    found = judge_clocks([0.0, 0.1, -60.0], ["a", "b", "c"])
    assert found.verdict is Verdict.WARNING
    assert "the clock of c is 60 s behind that of a" in found.message


def test_equal_results_take_one_line_and_others_name_their_ranks() -> None:
    ranks = [
        [check("driver", Verdict.OK), check("store", Verdict.OK, "fast")],
        [check("driver", Verdict.OK), check("store", Verdict.FAILED, "denied")],
    ]
    assert [line.split() for line in lines(ranks, ["a/0", "b/0"])] == [
        ["ok", "driver", "m"], ["ok", "store", "[a/0]", "fast"], ["failed", "store", "[b/0]", "denied"],
    ]  # fmt: skip
    assert summary(ranks) == "1 of 4 checks failed: training would fail here"
    assert (has_failed(ranks[0]), has_failed(ranks[1])) == (False, True)
    assert "costs speed" in summary([[check("store", Verdict.WARNING)]])
