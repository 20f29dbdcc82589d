"""Ranks that share a card and connect by NCCL, each as if it were on a host of its own.

NCCL refuses two ranks on one card, but it compares the cards of one host only, and ``NCCL_HOSTID`` names the host
(NCCL's user guide, "Environment Variables"). Messages then go through sockets on loopback, and the card runs the
processes in turns. So these ranks show what NCCL does, not how fast.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from distributed import pipeline_job_scripts, scripts, setups, sharded_job_scripts
from heterotrain.membership import devices, elastic, fixed
from heterotrain.parts.sharded import part


def card(number: int, *, ranks: int) -> dict[str, str]:
    """Return the arguments that give the rank ``number`` of ``ranks`` a card: its own one where there are enough."""
    count = torch.cuda.device_count()
    return {"gpu": str(number % count), "host": f"host-{number}" if count < ranks else ""}


def take(gpu: str, host: str) -> None:
    """Use this GPU (none if empty), as if on this host (the real one if empty); before the process uses CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if gpu and host:
        pretend(host)


def pretend(host: str) -> None:
    """Connect by NCCL as if this rank were on a host of its own; before the process uses NCCL."""
    os.environ |= {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    elastic.device_ids = fixed.device_ids = lambda _device: (f"{host}@{devices._own_library()}",)
    part.backend_for = lambda _device, *, ranks: "nccl" if ranks else "gloo"


def train(*, out: str, gpu: str, host: str = "", **arguments: Any) -> None:
    """Train a whole model in each rank."""
    take(gpu, host)
    scripts.train(out=out, **arguments)


def train_setup(*, out: str, gpu: str, host: str = "", **arguments: Any) -> None:
    """Train by a ``TrainingSetup``."""
    take(gpu, host)
    setups.train(out=out, **arguments)


def train_stages(*, out: str, gpu: str, host: str = "", **arguments: Any) -> None:
    """Train with pipelines."""
    take(gpu, host)
    pipeline_job_scripts.train(out=out, **arguments)


def train_shards(*, out: str, gpu: str, host: str = "", **arguments: Any) -> None:
    """Train with members whose ranks divide the model."""
    take(gpu, host)
    sharded_job_scripts.train(out=out, **arguments)
