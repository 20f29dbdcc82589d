"""``python -m heterotrain.preflight``: checks this machine; with torchrun or in a job, also the network between ranks.

Exit status: 0 when no check failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
from dataclasses import asdict
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from heterotrain.preflight import machine, network
from heterotrain.preflight.result import Check, Verdict, has_failed, lines, summary

_T = TypeVar("_T")


def main() -> int:
    """Run all checks; rank 0 prints the results of all ranks."""
    parser = argparse.ArgumentParser(prog="python -m heterotrain.preflight", description=__doc__)
    parser.add_argument("--store", metavar="URI", help="folder of the checkpoints, to write to and read from")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for the other ranks")
    options = parser.parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if has_gpu else torch.device("cpu")
    checks = [
        machine.versions(),
        machine.driver(),
        machine.kernels(device),
        machine.computing(device),
        machine.gpu_memory(device),
        machine.nccl(device),
        machine.shared_memory(),
        machine.store(options.store, who=f"{rank}-{secrets.token_hex(8)}"),
        machine.names(machine.hosts_to_resolve()),
    ]
    own_name = f"{platform.node()}/{local_rank}"
    names, by_rank = [own_name], [checks]
    if world_size > 1:
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
            names = _gathered(own_name)
            by_rank = _gathered([*checks, *_between_ranks(names, device)])
            dist.destroy_process_group()
        except RuntimeError as error:
            text = (
                f"rank {rank} does not reach the others ({' '.join(str(error).split())[:200]}): "
                "check NetworkPolicies, firewalls and the interface (GLOO_SOCKET_IFNAME)"
            )
            names, by_rank, rank = (
                [own_name],
                [[*checks, Check(name="network", verdict=Verdict.FAILED, message=text)]],
                0,
            )
    else:
        by_rank = [[*checks, network.judge_pairs([], names), network.judge_clocks([0.0], names)]]
    if rank == 0:
        if options.json:
            document = {name: [asdict(check) for check in each] for name, each in zip(names, by_rank, strict=True)}
            print(json.dumps(document, indent=1))  # noqa: T201  # output of a command
        else:
            print("\n".join([*lines(by_rank, names), summary(by_rank)]))  # noqa: T201  # output of a command
    return int(any(map(has_failed, by_rank)))


def _between_ranks(names: list[str], device: torch.device) -> list[Check]:
    # Pairs by Gloo, whatever the device: this is the network between the machines, which NCCL may not use.
    return [
        network.judge_pairs(network.measure_pairs(torch.device("cpu")), names),
        network.judge_clocks(network.clock_offsets_s(), names),
        network.nccl_exchange(device, names),
    ]


def _gathered(value: _T) -> list[_T]:
    found: list[_T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return [each for each in found if each is not None]


if __name__ == "__main__":
    raise SystemExit(main())
