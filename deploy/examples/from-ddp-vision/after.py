"""Train a classifier of images on unequal workers that come and go: the model and recipe of before.py."""

import math

import heterotrain
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

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
    job = heterotrain.init(epochs=EPOCHS, batch_samples=BATCH)
    torch.manual_seed(0)
    model = job.wrap(Network())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    job.register("average", average)
    optimizer = job.optimizer(torch.optim.AdamW(groups(model), lr=0.01))
    job.scheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    training, validation = digits()

    @job.on_epoch_end
    def validate(_epoch):
        average.eval()
        error = right = 0.0
        for images, kinds in job.part(validation, batch_samples=47):
            output = average(images)
            right += (output.argmax(1) == kinds).sum().item()
            error += criterion(output, kinds).item() * len(kinds)
        sums = job.sum(error=error, right=right)
        if job.is_leader:
            print(f"accuracy {sums['right'] / len(validation):.4f}")
            print(f"loss {sums['error'] / len(validation):.6f}")

    for step in job.steps(training, shuffle=False):
        with step:
            for images, kinds in step.micro_batches():
                step.backward(criterion(model(images), kinds))
            step.apply(optimizer, clip_norm=1.0)
            average.update_parameters(model)


if __name__ == "__main__":
    main()
