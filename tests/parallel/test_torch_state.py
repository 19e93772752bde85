"""Broadcasting parameters, optimizer state and objects."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvlite.torch as hvd


@pytest.fixture(autouse=True, scope="module")
def runtime() -> None:
    hvd.init()
    # The first optimizer makes torch load its compiler, which sets a variable.
    torch.optim.SGD([torch.zeros(1)], lr=0.1).zero_grad()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 2, 3, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # torch takes a tensor, too


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "dict of parameters": lambda model: dict(model.named_parameters()),
    "generator": lambda model: model.named_parameters(),
    "pairs": lambda model: list(model.named_parameters()),
    "tensors": lambda model: model.parameters(),
}


@pytest.mark.parametrize("form", FORMS)
def test_broadcast_parameters(rank: int, size: int, form: str) -> None:
    root = size - 1
    model, expected = net(rank), net(root)
    places = [param.data_ptr() for param in model.parameters()]
    with torch.no_grad():
        model[1].get_buffer("running_mean").fill_(rank)
        model[1].get_buffer("num_batches_tracked").fill_(rank)
    hvd.broadcast_parameters(FORMS[form](model), root)
    for param, want in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, want)
        assert param.requires_grad
    assert places == [param.data_ptr() for param in model.parameters()]
    if form == "state_dict":
        assert model[1].get_buffer("running_mean").tolist() == [root] * 3
        assert model[1].get_buffer("num_batches_tracked").item() == root


def test_order_does_not_matter_for_names(rank: int) -> None:
    pairs = list(net(rank).state_dict().items())
    params = OrderedDict(reversed(pairs) if rank % 2 else pairs)
    hvd.broadcast_parameters(params, 0)
    for name, tensor in net(0).state_dict().items():
        assert torch.equal(params[name], tensor)


def test_different_shapes_are_an_error(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(hvd.HorovodInternalError, match=r"broadcast 'w'.*shape"):
        hvd.broadcast_parameters({"w": torch.ones(2 + (rank == 0))}, 0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.01, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "lr tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4),
}


def laid_out(model: nn.Module, name: str) -> nn.Module:
    """In channels_last, which LBFGS does not take."""
    if name != "lbfgs":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        torch.testing.assert_close(left, right, rtol=0, atol=0, check_stride=True)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_ranks_get_the_roots_state(
    rank: int, size: int, name: str, wrapped: bool
) -> None:
    """The root has resumed with three steps of training, the others have nothing."""
    root = size - 1
    expected = laid_out(net(root), name)
    reference = OPTIMIZERS[name](expected.parameters())
    train(expected, reference, steps=3)
    model = laid_out(net(rank), name)
    optimizer = OPTIMIZERS[name](model.parameters())
    if rank == root:
        model.load_state_dict(expected.state_dict())
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    else:
        optimizer.param_groups[0]["lr"] = 77.0
    for group in optimizer.param_groups:
        group["note"] = (rank, {"of": [rank]})
    before = [param.detach().clone() for param in model.parameters()]
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root, model)
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old), "a parameter moved"
        assert param.grad is None
    for group in reference.param_groups:
        group["note"] = (root, {"of": [root]})
    assert_same(optimizer.state_dict(), reference.state_dict())
    hvd.broadcast_parameters(model.state_dict(), root)
    train(expected, reference, steps=2)
    train(model, optimizer, steps=2)
    for param, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, want)


def test_another_state_is_replaced(rank: int) -> None:
    model = net(rank)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, steps=rank + 1)
    hvd.broadcast_optimizer_state(optimizer, 0)
    steps = {int(state["step"]) for state in optimizer.state.values()}
    assert steps == {1}


def test_another_optimizer_refuses_and_leaves_nobody_waiting(
    rank: int, size: int
) -> None:
    param, extra = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    odd = rank == size - 1 and rank > 0
    optimizer = torch.optim.Adam([param, extra] if odd else [param])
    if rank == 0:
        param.grad = torch.ones(2)
        optimizer.step()
    if odd:
        with pytest.raises(
            ValueError, match=r"has groups of \[2\] .* rank 0 has \[1\]"
        ):
            hvd.broadcast_optimizer_state(optimizer, 0)
        assert not optimizer.state
    else:
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert len(optimizer.state) == 1


def test_broadcast_object(rank: int, size: int) -> None:
    thing = {"rank": rank, "text": "x" * rank, "nested": [(rank, None)]}
    got = hvd.broadcast_object(thing if rank == size - 1 else rank, size - 1)
    assert got == {
        "rank": size - 1,
        "text": "x" * (size - 1),
        "nested": [(size - 1, None)],
    }
