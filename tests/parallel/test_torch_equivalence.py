"""N ranks with batch B/N train the weights that one process with batch B does.

The model has a frozen branch, a branch that rank 0 alone uses and one that nobody
does; branches run in another order on odd ranks, and a random delay in each
parameter's backward makes the ranks drift apart.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hvlite.torch as hvd
from hvlite.messages import Op

STEPS = 20
BATCH = 72  # shards of 1 to 4 ranks divide by 2 and by 3
TOLERANCE = 1e-10

Batch = tuple[torch.Tensor, torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


@pytest.fixture(autouse=True, scope="module")
def runtime() -> None:
    hvd.init()
    # The first optimizer makes torch load its compiler, which sets a variable.
    torch.optim.SGD([torch.zeros(1)], lr=0.1).zero_grad()


class Net(nn.Module):
    """Branches that are used everywhere, nowhere, frozen, or on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.only_rank_0 = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 1)
        self.head = nn.Linear(8, 1)
        self.double()

    def features(self, x: torch.Tensor, order: int) -> torch.Tensor:
        stem = torch.tanh(self.stem(x))
        branches = [*self.branches, self.frozen][::order]
        return sum((torch.tanh(branch(stem)) for branch in branches), start=stem)

    def forward(self, x: torch.Tensor, order: int = 1) -> torch.Tensor:
        return self.head(self.features(x, order))

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return self.only_rank_0(self.features(x, 1)).square().mean()


@dataclass(frozen=True)
class Recipe:
    """How one training run is done."""

    optimizer: str
    parts: int = 1  # backward passes a step, over as many parts of the shard
    passes_per_step: int = 1
    op: Op = hvd.Average
    groups: int | None = None


def batches() -> list[Batch]:
    torch.manual_seed(2)
    return [
        (torch.randn(BATCH, 6).double(), torch.randn(BATCH, 1).double())
        for _ in range(STEPS)
    ]


def in_one_process(recipe: Recipe, size: int) -> list[torch.Tensor]:
    """Train on whole batches; the extra loss of rank 0's shard counts as it would."""
    net = Net()
    optimizer = OPTIMIZERS[recipe.optimizer](net.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        loss = mse_loss(net(x), y) + net.extra(x[: BATCH // size]) / size
        loss.backward()
        optimizer.step()
    return [param.detach() for param in net.parameters()]


def delay(net: nn.Module, rank: int) -> None:
    """Make this rank lose a random, reproducible time in each parameter's backward."""
    generator = random.Random(rank)

    def lose_time(_grad: torch.Tensor) -> None:
        for _ in range(generator.randrange(3000)):
            pass

    for param in net.parameters():
        if param.requires_grad:
            param.register_hook(lose_time)


def in_parallel(
    recipe: Recipe, rank: int, size: int, *, reduce: bool = True
) -> list[torch.Tensor]:
    """Train on this rank's shard of each batch, in `parts` backward passes a step."""
    net = Net()
    delay(net, rank)
    optimizer = OPTIMIZERS[recipe.optimizer](net.parameters())
    if reduce:
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            net.named_parameters(),
            backward_passes_per_step=recipe.passes_per_step,
            op=recipe.op,
            groups=recipe.groups,
        )
    weight = 1 / recipe.parts / (size if recipe.op == hvd.Sum else 1)
    order = -1 if rank % 2 else 1
    for x, y in batches():
        optimizer.zero_grad()
        x, y = x.chunk(size)[rank], y.chunk(size)[rank]
        parts = zip(x.chunk(recipe.parts), y.chunk(recipe.parts), strict=True)
        for part_x, part_y in parts:
            loss = mse_loss(net(part_x, order), part_y)
            if rank == 0:
                loss = loss + net.extra(part_x)
            (loss * weight).backward()
        optimizer.step()
    assert net.unused.weight.grad is None
    assert net.frozen.weight.grad is None
    return [param.detach() for param in net.parameters()]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="plain"),
        pytest.param({"groups": 4}, id="four buckets"),
        pytest.param({"op": hvd.Sum, "groups": 3}, id="sum"),
        pytest.param({"parts": 2, "passes_per_step": 2}, id="accumulation"),
        pytest.param({"parts": 2, "groups": 4}, id="two backward passes"),
        pytest.param({"parts": 3, "op": hvd.Sum}, id="three backward passes, sum"),
        pytest.param({"parts": 3, "passes_per_step": 2}, id="one pass more"),
        pytest.param(
            {"parts": 3, "passes_per_step": 2, "op": hvd.Sum}, id="one more, sum"
        ),
        pytest.param({"parts": 2, "passes_per_step": 3}, id="leftover passes"),
    ],
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_weights_as_one_process(
    rank: int, size: int, optimizer: str, variant: dict
) -> None:
    recipe = Recipe(optimizer, **variant)
    expected = in_one_process(recipe, size)
    ours = in_parallel(recipe, rank, size)
    assert largest_difference(ours, expected) < TOLERANCE
    for param in ours:
        assert torch.equal(param, hvd.broadcast(param, 0)), "bits differ between ranks"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_reduction_the_weights_differ(
    rank: int, size: int, optimizer: str
) -> None:
    recipe = Recipe(optimizer)
    expected = in_one_process(recipe, size)
    difference = largest_difference(
        in_parallel(recipe, rank, size, reduce=False), expected
    )
    assert difference < TOLERANCE if size == 1 else difference > 1e-4
