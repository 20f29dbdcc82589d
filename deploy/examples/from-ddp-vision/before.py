"""Train a classifier of images as vision scripts do: python before.py, or torchrun --nproc-per-node 2 before.py."""

import math
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, WARM_UP = 3, 64, 5


class Network(nn.Sequential):
    """Convolutions with BatchNorm, for images of 8 by 8."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.SiLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), nn.SiLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )  # fmt: skip


def digits():
    """Return images for training and for validation."""
    images, kinds = load_digits(return_X_y=True)
    images, kinds = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(kinds)
    images = (images - images.mean()) / images.std()
    return TensorDataset(images[:1280], kinds[:1280]), TensorDataset(images[1280:], kinds[1280:])


def groups(model):
    """Return the parameters with weight decay, the filters and matrices, and those without."""
    filters = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": filters, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]


def factor(step):
    """Return the part of the peak learning rate: warm-up, then a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (EPOCHS * 20 - WARM_UP)))


def main():
    """Train with label smoothing and averaged weights, and validate the average after each epoch."""
    is_distributed = "RANK" in os.environ
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
    if is_distributed:
        dist.init_process_group("nccl" if is_cuda else "gloo")
    torch.manual_seed(0)
    model = Network().to(device)
    if is_distributed and is_cuda:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    whole = model
    if is_distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    training, validation = digits()
    sampler = DistributedSampler(training, ranks, rank, shuffle=False)
    loader = DataLoader(training, batch_size=BATCH // ranks, sampler=sampler)
    part = DataLoader(validation, batch_size=47, sampler=DistributedSampler(validation, ranks, rank, shuffle=False))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            images, kinds = (tensor.to(device) for tensor in batch)
            optimizer.zero_grad()
            loss = criterion(model(images), kinds)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            average.update_parameters(whole)
        average.eval()
        sums = torch.zeros(3, device=device)
        with torch.no_grad():
            for batch in part:
                images, kinds = (tensor.to(device) for tensor in batch)
                output = average(images)
                right = (output.argmax(1) == kinds).sum()
                sums += torch.stack([criterion(output, kinds) * len(kinds), right, torch.tensor(len(kinds))])
        if is_distributed:
            dist.all_reduce(sums)
        if rank == 0:
            print(f"accuracy {sums[1] / sums[2]:.4f}")
            print(f"loss {sums[0] / sums[2]:.6f}")
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
