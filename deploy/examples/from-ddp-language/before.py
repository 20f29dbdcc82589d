"""Train a small GPT as research scripts do: python before.py, or torchrun --nproc-per-node 2 before.py."""

import contextlib
import math
import os
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the usual name
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

STEPS, BATCH, MICRO, WARM_UP, EVERY = 40, 16, 4, 5, 20
LENGTH, WIDTH, HEADS, BLOCKS, PEAK = 32, 48, 4, 2, 0.01


class Block(nn.Module):
    """Causal attention and a perceptron, each on a residual path."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        """Return (batch, length, width)."""
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.project(self.first(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.second(x))


class GPT(nn.Module):
    """Predicts the next byte; embedding and head share their weights."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(BLOCKS)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.bytes.weight

    def forward(self, x):
        """Return (batch, length, 256) for bytes of (batch, length)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def groups(model):
    """Return the parameters with weight decay, the matrices, and those without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def factor(step):
    """Return the part of the peak learning rate: warm-up, then a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


def windows(seed, count):
    """Return random windows of a long text, and the same one byte later."""
    text = torch.frombuffer(bytearray(Path(textwrap.__file__).read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed))
    rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


def cross_entropy(output, y):
    """Return the mean over all bytes."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def main():
    """Train with accumulation, and evaluate on the first rank every few steps."""
    is_distributed = "RANK" in os.environ
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.is_available() else 0)
    device = device if torch.cuda.is_available() else torch.device("cpu")
    if is_distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(groups(model), lr=PEAK, betas=(0.9, 0.95))
    whole = model
    if is_distributed:
        model = DistributedDataParallel(model)
    training, validation = windows(1, STEPS * BATCH), windows(2, 64)
    local = BATCH // ranks

    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * factor(step)
        first = step * BATCH + rank * local
        for start in range(first, first + local, MICRO):
            x, y = (part.to(device) for part in training[start : start + MICRO])
            is_last = start + MICRO >= first + local
            with model.no_sync() if is_distributed and not is_last else contextlib.nullcontext():
                loss = cross_entropy(model(x), y) * MICRO / local
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % EVERY == 0 and rank == 0:
            whole.eval()
            with torch.no_grad():
                total = 0.0
                for start in range(0, len(validation), 16):
                    x, y = (part.to(device) for part in validation[start : start + 16])
                    total += 16 * cross_entropy(whole(x), y).item()
            whole.train()
            print(f"loss {total / len(validation):.6f}")
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
