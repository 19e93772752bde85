"""A training step: hvlite against DistributedDataParallel on gloo and no communication.

    hvrun -np 2 python benchmarks/training.py

The models: an MLP of 100 small layers (many small gradients), a wide MLP of 100 MB (few
large ones), and a transformer encoder of 6 layers (42 MB). Each side has its own copy
and takes the same steps on the same data: forward, backward, SGD with momentum. The
sides take turns step by step. Overhead is over the step without communication.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from common import (
    Row,
    Side,
    Times,
    arguments,
    duration,
    gloo_group,
    measure,
    print_machine,
    print_table,
    say,
    write_json,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import hvlite.torch as hvd


def small_layers() -> tuple[nn.Module, Tensor]:
    """100 linear layers of 128 by 128."""
    layers = (nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(100))
    return nn.Sequential(*layers), torch.randn(32, 128)


def wide() -> tuple[nn.Module, Tensor]:
    """Three linear layers with 25 million parameters."""
    widths = (1024, 4096, 4096, 1024)
    layers = (nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths))
    return nn.Sequential(*layers), torch.randn(32, 1024)


def transformer() -> tuple[nn.Module, Tensor]:
    """Six encoder layers of width 384."""
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6), torch.randn(8, 64, 384)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "MLP, 100 small layers": small_layers,
    "wide MLP, 100 MB": wide,
    "transformer, 6 layers": transformer,
}


def step(model: nn.Module, optimizer: Optimizer, data: Tensor) -> None:
    """One step of training towards zero."""
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def sides_for(build: Callable[[], tuple[nn.Module, Tensor]]) -> list[Side]:
    """The same model three times: alone, with DistributedDataParallel, with hvlite."""

    def fresh() -> tuple[nn.Module, Tensor, Optimizer]:
        torch.manual_seed(0)
        model, data = build()
        return model, data, SGD(model.parameters(), lr=1e-3, momentum=0.9)

    alone, data, optimizer = fresh()
    sides = [Side("alone", partial(step, alone, optimizer, data))]
    if torch.distributed.is_initialized():
        model, data, optimizer = fresh()
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sides.append(Side("DDP on gloo", partial(step, parallel, optimizer, data)))
    model, data, optimizer = fresh()
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sides.append(Side("hvlite", partial(step, model, wrapped, data)))
    return sides


def row(name: str, times: dict[str, Times]) -> Row:
    """Medians, overheads, and how much faster a step is with hvlite than with DDP."""
    medians = {side: measured.median for side, measured in times.items()}
    alone = medians["alone"]
    line: Row = {"model": name}
    line |= {side: duration(median) for side, median in medians.items()}
    for side in list(medians)[1:]:
        line[f"{side}, overhead"] = f"{medians[side] / alone - 1:.1%}"
    if "DDP on gloo" in medians:
        line["DDP / hvlite"] = f"{medians['DDP on gloo'] / medians['hvlite']:.2f}"
    return line


def main() -> None:
    """Measure one model after the other and print a line for each."""
    args = arguments(__doc__, rounds=20)
    hvd.init()
    if not gloo_group():
        say("DistributedDataParallel is left out")
    print_machine(args)
    cases = {}
    for name, build in MODELS.items():
        cases[name] = measure(sides_for(build), rounds=args.rounds, warmup=args.warmup)
    print_table([row(name, times) for name, times in cases.items()])
    write_json(args, cases)


if __name__ == "__main__":
    main()
