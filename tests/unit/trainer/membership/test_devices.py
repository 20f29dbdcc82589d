"""The choice of the gradients' backend, given the devices of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heterotrain.errors import UsageError
from heterotrain.identity import Identity, Mode
from heterotrain.membership.devices import (
    BackendChoice,
    DeviceIds,
    choose_backend,
    device_ids,
    missing_kernels,
    take_device,
)
from heterotrain.network.sums import FlatTopology
from heterotrain_core.contract.choices import Backend

A, B, CPU = ("GPU-a", "host1/0:1:0"), ("GPU-b", "host1/0:2:0"), ()
ALSO_A_ON_A_DIVIDED_CARD = ("MIG-2", "host1/0:1:0")
ALSO_A_IN_A_SANDBOX = ("GPU-a", "host7/0:9:0")
THE_SAME_PLACE_ELSEWHERE = ("GPU-c", "host2/0:1:0")


@pytest.mark.parametrize(
    ("setting", "devices", "backend", "reason"),
    [
        (Backend.AUTO, [A, B], "nccl", ""),
        (Backend.NCCL, [A, B], "nccl", ""),
        (Backend.GLOO, [A, B], "gloo", ""),
        (Backend.AUTO, [A], "nccl", ""),
        (Backend.AUTO, [A, THE_SAME_PLACE_ELSEWHERE], "nccl", ""),
        (Backend.AUTO, [CPU, CPU], "gloo", ""),
        (Backend.GLOO, [A, A], "gloo", ""),
        (Backend.AUTO, [A, CPU], "gloo", "rank 1 (w1/0) has no GPU"),
        (Backend.AUTO, [CPU, A, CPU], "gloo", "rank 0 (w0/0) and 1 more have no GPU"),
        (Backend.AUTO, [A, B, A], "gloo", "ranks 0 (w0/0) and 2 (w2/0) share one GPU, which NCCL refuses"),
        (Backend.AUTO, [B, A, ALSO_A_ON_A_DIVIDED_CARD], "gloo",
         "ranks 1 (w1/0) and 2 (w2/0) share one GPU, which NCCL refuses"),
        (Backend.AUTO, [("GPU-a@NCCL 2.27.5", "x"), ("GPU-b@RCCL 2.22.3", "y")], "gloo",
         "rank 0 (w0/0) has NCCL 2.27.5 and rank 1 (w1/0) has RCCL 2.22.3, which do not connect"),
        (Backend.AUTO, [("GPU-a@NCCL 2.27.5", "x"), ("GPU-b@NCCL 2.27.5", "y")], "nccl", ""),
        (Backend.AUTO, [ALSO_A_IN_A_SANDBOX, A], "gloo",
         "ranks 0 (w0/0) and 1 (w1/0) share one GPU, which NCCL refuses"),
    ],
)  # fmt: skip
def test_nccl_where_every_rank_has_a_gpu_of_its_own(
    setting: str, devices: list[DeviceIds], backend: str, reason: str
) -> None:
    """Otherwise gloo, with a reason if any rank has a GPU."""
    names = [f"w{rank}/0" for rank in range(len(devices))]
    assert choose_backend(setting, devices, names) == BackendChoice(topology=FlatTopology(backend), reason=reason)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([CPU, CPU],
         r"set to NCCL, but rank 0 \(w0/0\) and 1 more have no GPU: set it to Auto or Gloo, or give each rank a"),
        ([A, A],
         r"but ranks 0 \(w0/0\) and 1 \(w1/0\) share one GPU, which NCCL refuses: set it to Auto or Gloo, or give"),
    ],
)  # fmt: skip
def test_nccl_on_unsuitable_devices_is_refused_with_a_reason(devices: list[DeviceIds], message: str) -> None:
    """At once, instead of an error of NCCL minutes later."""
    with pytest.raises(UsageError, match=message):
        choose_backend(Backend.NCCL, devices, ["w0/0", "w1/0"])


@pytest.mark.parametrize(
    ("devices", "islands"),
    [
        ([A, CPU, B], ((0, 2),)),
        ([CPU, A, B, CPU, THE_SAME_PLACE_ELSEWHERE], ((1, 2, 4),)),
        ([A, CPU], ()),
        ([A, A, CPU], ()),
        ([A, B, A, THE_SAME_PLACE_ELSEWHERE], ((1, 3),)),
        ([("1@NCCL 2.27.5",), ("2@NCCL 2.30.7",), ("3@NCCL 2.27.5",), ("4@NCCL 2.30.7",)], ((0, 2), (1, 3))),
        ([("1@NCCL 2.27.5",), ("2@RCCL 2.22.3",), ("3@RCCL 2.22.3",)], ((1, 2),)),
        ([("1@no NCCL",), ("2@no NCCL",), CPU], ()),
    ],
)
def test_ranks_that_nccl_connects_add_up_by_it_first(
    devices: list[DeviceIds], islands: tuple[tuple[int, ...], ...]
) -> None:
    """With GPUs of their own, of one library; one such rank alone has nobody to add up with."""
    names = [f"w{rank}/0" for rank in range(len(devices))]
    choice = choose_backend(Backend.AUTO, devices, names)
    assert choice.topology.backend == "gloo"
    assert getattr(choice.topology, "islands", ()) == islands
    assert choose_backend(Backend.GLOO, devices, names).topology == FlatTopology("gloo")


def test_the_choice_is_told_in_one_sentence() -> None:
    """It names the ranks that use NCCL, and what keeps the others from it."""
    choice = choose_backend(Backend.AUTO, [A, CPU, B], ["w0/0", "w1/0", "w2/0"])
    assert str(choice) == (
        "gradients travel by nccl among ranks 0, 2, and by gloo to all others: rank 1 (w1/0) has no GPU"
    )


def test_a_rank_takes_its_own_device_and_identifies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two devices: the third one shares the device of the first."""
    current: list[torch.device] = []

    def properties(device: torch.device) -> Any:
        return SimpleNamespace(uuid=f"u{device.index}", pci_domain_id=0, pci_bus_id=26 + device.index, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80"])
    devices = [take_device(Identity(mode=Mode.OPERATED, local_rank=rank)) for rank in range(3)]
    assert devices == current == [torch.device("cuda", index) for index in (0, 1, 0)]
    ids = [device_ids(device) for device in devices]
    assert [found[0].partition("@")[0] for found in ids] == ["u0", "u1", "u0"]
    assert [found[1].partition("/")[2] for found in ids] == ["0:1a:0", "0:1b:0", "0:1a:0"]
    assert device_ids(torch.device("cpu")) == ()


CUDA_12 = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
V100, T4, A100, ADA, H100, BLACKWELL, FUTURE = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 1), (14, 0)


@pytest.mark.parametrize(
    ("architectures", "capability"),
    [
        *[(CUDA_12, device) for device in (V100, T4, A100, ADA, H100, BLACKWELL)],
        *[(CUDA_13, device) for device in (T4, A100, ADA, H100, BLACKWELL)],
        ([*CUDA_13, "compute_120"], FUTURE),
        (["sm_90a"], H100),
        ([], V100),
        (["gfx90a"], (9, 0)),
    ],
)
def test_a_build_runs_on_devices_that_it_has_kernels_for(architectures: list[str], capability: tuple[int, int]) -> None:
    assert missing_kernels(architectures, capability) == ""


@pytest.mark.parametrize(
    ("architectures", "capability", "remedy"),
    [
        (CUDA_13, V100, "REQUIREMENTS=requirements/examples-cu12.txt"),
        (CUDA_12, (6, 0), "GPUs below 7.0 are not supported"),
        (CUDA_12, FUTURE, "a newer PyTorch"),
        (["sm_80", "sm_90a"], (9, 1), "a newer PyTorch"),
        (["compute_80a"], H100, "a newer PyTorch"),
    ],
)
def test_a_build_without_kernels_for_the_device_names_the_image_to_use(
    architectures: list[str], capability: tuple[int, int], remedy: str
) -> None:
    problem = missing_kernels(architectures, capability)
    assert remedy in problem
    assert f"needs compute capability {capability[0]}.{capability[1]}" in problem


def test_a_worker_whose_pytorch_lacks_its_gpu_s_kernels_ends_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_13)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: V100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-16GB")
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with pytest.raises(UsageError, match=r"has no kernels for Tesla V100-SXM2-16GB: .*requirements/examples-cu12\.txt"):
        take_device(Identity(mode=Mode.OPERATED))
    assert taken == []
