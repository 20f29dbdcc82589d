"""Layers whose state changes in their forward passes, as public training scripts have them, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import observer
from torch.nn import functional

FEATURES = 6


class Codebook(nn.Module):
    """Nearest codes, learned by moving sums: the codes are sums over counts, and used before they are updated."""

    DECAY = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("code", torch.randn(5, FEATURES))
        self.register_buffer("count", torch.ones(5))
        self.register_buffer("total", self.code.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            near = torch.cdist(x, self.code).argmin(1)
            chosen = self.code[near]
            if self.training:
                one = functional.one_hot(near, 5).to(x)
                self.count.mul_(self.DECAY).add_(one.sum(0), alpha=1 - self.DECAY)
                self.total.mul_(self.DECAY).add_(one.T @ x, alpha=1 - self.DECAY)
                self.code.copy_(self.codes())
        return x + (chosen - x).detach()

    def codes(self) -> torch.Tensor:
        return self.total / self.count.clamp(min=1e-3)[:, None]

    @classmethod
    def declare(cls, job: Any, prefix: str = "") -> None:
        job.buffers(f"{prefix}count", "sum", decay=cls.DECAY)
        job.buffers(f"{prefix}total", "sum", decay=cls.DECAY)
        job.buffers(f"{prefix}code", cls.codes)


class MomentumEncoder(nn.Module):
    """A frozen copy of a layer that follows it in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(FEATURES, FEATURES)
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.key.parameters(), self.query.parameters(), strict=True):
                own.lerp_(other, 0.1)
        return self.query(x) + 0.1 * self.key(x)


class Tally(nn.Module):
    """Counts samples and averages features; one buffer is an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("average", torch.zeros(FEATURES))
        self.register_buffer("mask", torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(len(x))
        self.average.lerp_(x.detach().mean(0), 0.2)
        return x

    @staticmethod
    def declare(job: Any, prefix: str = "") -> None:
        job.buffers(f"{prefix}seen", "sum")
        job.buffers(f"{prefix}average", "mean")


class Queue(nn.Module):
    """A ring of the newest rows and a pointer into it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(64, FEATURES))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (torch.arange(len(x)) + self.pointer) % 64
        self.rows[places] = x.detach()
        self.pointer.add_(len(x))
        return x


def moving_observer() -> nn.Module:
    """Return an observer of a moving minimum and maximum."""
    return observer.MovingAverageMinMaxObserver()


def channel_observer() -> nn.Module:
    """Return an observer whose buffers get their shapes in the first forward pass."""
    return observer.PerChannelMinMaxObserver(ch_axis=1)


def fake_quantizer() -> nn.Module:
    """Return a fake quantizer that only observes, in fp64."""
    found = torch.ao.quantization.FakeQuantize(
        observer=observer.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    torch.ao.quantization.disable_fake_quant(found)
    return found


def spectral() -> nn.Module:
    """Return a layer with spectral norm as a parametrization."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, FEATURES))


def old_spectral() -> nn.Module:
    """Return a layer with torch's older spectral norm."""
    return nn.utils.spectral_norm(nn.Linear(FEATURES, FEATURES))


class Everything(nn.Module):
    """All kinds whose rules are exact, in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = spectral()
        self.encoder = MomentumEncoder()
        self.observer = moving_observer()
        self.channels = channel_observer()
        self.tally = Tally()
        self.book = Codebook()
        self.head = nn.Linear(FEATURES, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tally(self.encoder(torch.tanh(self.first(x))))
        self.channels(self.observer(x.detach()))
        found: torch.Tensor = self.head(self.book(x) + x)
        return found

    @staticmethod
    def declare(job: Any) -> None:
        Tally.declare(job, "tally.")
        Codebook.declare(job, "book.")
        job.buffers("encoder.key.*", "leader")
