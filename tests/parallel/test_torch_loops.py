"""Training loops that people write, and backward passes out of the ordinary."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvlite.torch as hvd

Wrapped = Any  # an optimizer with hvlite's methods too


@pytest.fixture(autouse=True, scope="module")
def runtime() -> None:
    hvd.init()
    # The first optimizer makes torch load its compiler, which sets a variable.
    torch.optim.SGD([torch.zeros(1)], lr=0.1).zero_grad()


def wrap(*params: torch.Tensor, **arguments: Any) -> Wrapped:
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **arguments)


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def mean(size: int) -> float:
    """The average of rank + 1."""
    return (size + 1) / 2


def values(param: torch.Tensor) -> list[float]:
    assert param.grad is not None
    return param.grad.flatten().tolist()


def test_clipping_after_backward(rank: int, size: int) -> None:
    param = parameter(4)
    optimizer = wrap(param)
    (param * (rank + 1)).sum().backward()
    norm = nn.utils.clip_grad_norm_([param], 1.0)
    assert norm.item() == pytest.approx(2 * mean(size))
    optimizer.step()
    assert param.tolist() == pytest.approx([0.5] * 4, rel=1e-5)


@pytest.mark.parametrize("poisoned", [False, True])
def test_grad_scaler_decides_alike_everywhere(
    rank: int, size: int, poisoned: bool
) -> None:
    param = parameter(4, dtype=torch.float32)
    optimizer = wrap(param)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    factor = float("inf") if poisoned and rank == size - 1 else rank + 1.0
    scaler.scale((param * factor).sum()).backward()
    scaler.unscale_(optimizer)
    if not poisoned:
        assert values(param) == pytest.approx([mean(size)] * 4)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (8.0 if poisoned else 16.0)
    expected = 1.0 if poisoned else 1 - mean(size)
    assert param.tolist() == pytest.approx([expected] * 4)


def test_closure(rank: int, size: int) -> None:
    param = parameter(2)
    optimizer = wrap(param)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * (rank + 1)).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == pytest.approx(2 * mean(size))
    assert param.tolist() == pytest.approx([1 - mean(size)] * 2)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_goes_the_way_of_one_process(
    rank: int, size: int, search: str | None
) -> None:
    targets = torch.linspace(-1, 3, 4 * size, dtype=torch.float64).reshape(size, 4)

    def train(shard: torch.Tensor, wrapped: bool) -> torch.Tensor:
        param = parameter(4)
        optimizer: Wrapped = torch.optim.LBFGS([param], lr=0.5, line_search_fn=search)
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (param - shard).pow(4).mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return param.detach()

    torch.testing.assert_close(
        train(targets[rank : rank + 1], wrapped=True), train(targets, wrapped=False)
    )


def test_two_optimizers_in_one_backward(rank: int, size: int) -> None:
    """A GAN: the generator's loss flows through the discriminator."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
    models = (generator, critic)
    optimizers = [wrap(*model.parameters()) for model in models]
    before = generator.weight.detach().clone()
    noise = [torch.full((4, 2), r + 1.0, dtype=torch.float64) for r in range(size)]
    for _ in range(3):
        for index, sign in ((1, 1.0), (0, -1.0)):
            losses = [sign * critic(generator(z)).sigmoid().mean() for z in noise]
            params = list(models[index].parameters())
            expected = torch.autograd.grad(sum(losses) / size, params)
            for optimizer in optimizers:
                optimizer.zero_grad()
            z = noise[rank]
            spared = index == 1 and rank % 2  # scripts that detach the generator
            fake = generator(z).detach() if spared else generator(z)
            (sign * critic(fake).sigmoid().mean()).backward()
            if index == 1:
                optimizers[0].synchronize()  # reduced where its backward ran
            for param, want in zip(params, expected, strict=True):
                torch.testing.assert_close(param.grad, want)
            optimizers[index].step()
    assert not torch.equal(generator.weight, before)


def test_a_group_added_later(rank: int, size: int) -> None:
    first, second = parameter(2), parameter(3)
    optimizer = wrap(first)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [second], "lr": 0.5})
        optimizer.zero_grad()
        ((first.sum() + second.sum()) * (rank + 1)).backward()
        assert values(first) == pytest.approx([mean(size)] * 2)
        if step >= 2:
            assert values(second) == pytest.approx([mean(size)] * 3)
        else:
            second.grad = None
        optimizer.step()
    assert second.tolist() == pytest.approx([1 - mean(size)] * 3)


# -- backward passes out of the ordinary --------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_shared_under_checkpointing(
    rank: int, size: int, reentrant: bool
) -> None:
    torch.manual_seed(0)
    layer, head = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
    optimizer = wrap(*layer.parameters(), *head.parameters(), groups=4)

    def forward(scale: float, uses: int) -> torch.Tensor:
        x = torch.full((2, 3), scale, dtype=torch.float64, requires_grad=True)
        for _ in range(uses):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return head(x).sum()

    params = [*layer.parameters(), *head.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        forward(rank + 1.0, 2).backward()
        ours = [param.grad.clone() for param in params]  # type: ignore[union-attr]
        for param in params:
            param.grad = None
        wanted = [torch.zeros_like(param) for param in params]
        for other in range(size):
            x = torch.full((2, 3), other + 1.0, dtype=torch.float64)
            grads = torch.autograd.grad(head(layer(layer(x))).sum(), params)
            for want, grad in zip(wanted, grads, strict=True):
                want += grad / size
        torch.testing.assert_close(ours, wanted)
    if reentrant:
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="got another gradient after its bucket"):
            forward(rank + 1.0, 3).backward()


def test_only_checkpointed_layers(rank: int, size: int) -> None:
    """No hook runs in the outer backward: its end must be found all the same."""
    layers = [nn.Linear(2, 2, bias=False).double() for _ in range(3)]
    for layer in layers:
        nn.init.eye_(layer.weight)
    optimizer = wrap(*(layer.weight for layer in layers), groups=3)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.full((1, 2), rank + 1.0, dtype=torch.float64, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        requests = hvd.stats()["allreduce_requests"]
        x.sum().backward()
        assert hvd.stats()["allreduce_requests"] == requests + 3
        for layer in layers:
            assert values(layer.weight) == pytest.approx([mean(size)] * 4)


def test_a_backward_that_breaks_off_does_not_spoil_the_next(
    rank: int, size: int
) -> None:
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("broken off")

    early, late = parameter(2), parameter(2)
    optimizer = wrap(early, late, groups=[[early], [late]])
    for attempt in range(6):
        optimizer.zero_grad(set_to_none=attempt % 4 == 0)
        hidden = early * (rank + 1)
        if attempt % 2:
            with pytest.raises(ArithmeticError):
                (Break.apply(hidden) + late * (rank + 1)).sum().backward()
        else:
            (hidden + late * (rank + 1)).sum().backward()
            assert values(early) == pytest.approx([mean(size)] * 2)
            assert values(late) == pytest.approx([mean(size)] * 2)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_create_graph(rank: int, size: int) -> None:
    param = parameter(2)
    optimizer = wrap(param)
    param.pow(3).sum().mul(rank + 1).backward(create_graph=True)
    assert param.grad is not None
    assert param.grad.tolist() == pytest.approx([3 * mean(size)] * 2)
    penalty = param.grad.sum()
    param.grad = None
    penalty.backward()  # of this rank's own gradient: 6 p (rank + 1)
    assert values(param) == pytest.approx([6 * mean(size)] * 2)
    optimizer.zero_grad()


def test_autograd_grad_is_none_of_our_business(rank: int, size: int) -> None:
    param = parameter(2)
    optimizer = wrap(param, op=hvd.Sum)
    (param * (rank + 1)).sum().backward()
    requests = hvd.stats()["requests"]
    (grad,) = torch.autograd.grad((param * 5).sum(), [param])
    assert grad.tolist() == [5.0, 5.0]
    assert hvd.stats()["requests"] == requests
    assert values(param) == pytest.approx([size * mean(size)] * 2)
    optimizer.step()


def test_a_parameter_of_two_optimizers_is_reduced_once(rank: int, size: int) -> None:
    model = torch.nn.Linear(300, 300, bias=False)
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(2)
    ]
    wanted = torch.full((300, 300), (size + 1) / 2)
    for _ in range(20):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model.weight * (rank + 1)).sum().backward()
        torch.testing.assert_close(model.weight.grad, wanted, rtol=0, atol=0)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(model.weight.grad, wanted, rtol=0, atol=0)
    del optimizers[1], optimizer  # the later one goes; a new one takes its place
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0)).zero_grad()
