"""The wrapped optimizer as an object: class, state, hooks, schedulers, steps."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvlite.torch as hvd

Wrapped = Any  # an optimizer with hvlite's methods too


@pytest.fixture(autouse=True, scope="module")
def runtime() -> None:
    hvd.init()
    # The first optimizer makes torch load its compiler, which sets a variable.
    torch.optim.SGD([torch.zeros(1)], lr=0.1).zero_grad()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def inputs(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4) * (rank + 1)


def wrap(model: nn.Module, **arguments: Any) -> Wrapped:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        **arguments,
    )


def gradients(model: nn.Module, size: int) -> list[torch.Tensor]:
    """The gradients averaged over all ranks, computed in this process alone."""
    params = list(model.parameters())
    losses = [model(inputs(rank)).square().sum() for rank in range(size)]
    return list(torch.autograd.grad(sum(losses) / size, params))


def assert_reduced(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for param, want in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, want, rtol=1e-12, atol=1e-12)


# -- the object ---------------------------------------------------------------------


def test_it_stays_what_it_was() -> None:
    model = net()
    plain = torch.optim.Adam(model.parameters(), lr=0.5)
    model(inputs(0)).sum().backward()
    plain.step()
    state, groups, defaults = plain.state, plain.param_groups, plain.defaults
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert type(optimizer).__module__.startswith("hvlite.")
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert optimizer.defaults is defaults
    with pytest.raises(ValueError, match="a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)
    hvd.DistributedOptimizer(
        torch.optim.Adam(net().parameters())
    )  # the class is as before


def test_state_dict_is_the_plain_one(rank: int) -> None:
    ours, theirs = net(), net()
    plain = torch.optim.Adam(theirs.parameters())
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(ours.parameters()))
    for model, one in ((ours, optimizer), (theirs, plain)):
        model(inputs(0)).square().sum().backward()
        one.step()
    left, right = optimizer.state_dict(), plain.state_dict()
    assert left.keys() == right.keys()
    assert left["param_groups"] == right["param_groups"]
    for index, slots in right["state"].items():
        assert left["state"][index].keys() == slots.keys()
        for name, value in slots.items():
            torch.testing.assert_close(left["state"][index][name], value)
    plain.load_state_dict(copy.deepcopy(left))
    optimizer.load_state_dict(right)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(rank))
    optimizer.step()
    assert calls == [rank]


def test_hooks_survive_and_run_once(rank: int) -> None:
    calls = []
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    plain.register_step_pre_hook(lambda *_: calls.append("pre"))
    plain.register_step_post_hook(lambda *_: calls.append("post"))
    plain.register_state_dict_post_hook(lambda *_: calls.append("state"))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    model(inputs(rank)).sum().backward()
    optimizer.step()
    optimizer.state_dict()
    assert calls == ["pre", "post", "state"]


@pytest.mark.parametrize("before", [True, False])
def test_schedulers_see_the_steps(rank: int, before: bool) -> None:
    # Warnings are errors here; a scheduler warns if it misses a step.
    model = net()
    optimizer: Wrapped = torch.optim.SGD(model.parameters(), lr=1.0)
    if before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if not before:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs(rank)).sum().backward()
        assert optimizer._reducer._reduced
        optimizer.step()
        assert not optimizer._reducer._reduced
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, nesterov=True, momentum=0.5),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adamax,
        torch.optim.NAdam,
        lambda p: torch.optim.AdamW(p, amsgrad=True, foreach=True),
        lambda p: torch.optim.Adam(p, fused=True),
    ],
)
def test_any_optimizer(rank: int, size: int, make: Callable[[Any], Wrapped]) -> None:
    ours, theirs = net(), net()
    optimizer = hvd.DistributedOptimizer(make(ours.parameters()))
    plain = make(theirs.parameters())
    for _ in range(3):
        expected = gradients(theirs, size)
        for param, gradient in zip(theirs.parameters(), expected, strict=True):
            param.grad = gradient
        plain.step()
        optimizer.zero_grad()
        ours(inputs(rank)).square().sum().backward()
        optimizer.step()
        for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(left, right)


def test_dropping_it_removes_its_hooks(rank: int) -> None:
    model = net()
    optimizer: Wrapped = wrap(model)
    model(inputs(rank)).sum().backward()
    gone = weakref.ref(optimizer._reducer)
    requests = hvd.stats()["requests"]
    del optimizer
    gc.collect()
    assert gone() is None
    kept = [param.grad for param in model.parameters()]  # their memory lives on
    model(inputs(rank)).sum().backward()
    assert hvd.stats()["requests"] == requests
    assert all(grad is not None and grad.isfinite().all() for grad in kept)


# -- when gradients are reduced -----------------------------------------------------


def test_backward_returns_with_reduced_gradients(rank: int, size: int) -> None:
    model = net()
    optimizer = wrap(model)
    expected = gradients(model, size)
    model(inputs(rank)).square().sum().backward()
    assert_reduced(model, expected)
    requests = hvd.stats()["requests"]
    optimizer.synchronize()
    optimizer.synchronize()
    assert_reduced(model, expected)
    assert hvd.stats()["requests"] == requests


def test_accumulated_gradients_are_local_until_the_last_pass(
    rank: int, size: int
) -> None:
    model = net()
    optimizer = wrap(model, backward_passes_per_step=3)
    expected = [3 * one for one in gradients(model, size)]
    requests = hvd.stats()["allreduce_requests"]
    for _ in range(2):
        model(inputs(rank)).square().sum().backward()
    assert hvd.stats()["allreduce_requests"] == requests
    model(inputs(rank)).square().sum().backward()
    assert hvd.stats()["allreduce_requests"] > requests
    assert_reduced(model, expected)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    expected = gradients(model, size)
    model(inputs(rank)).square().sum().backward()
    assert_reduced(model, expected)


def test_skip_synchronize_takes_gradients_as_they_are(rank: int) -> None:
    model = net()
    optimizer = wrap(model)
    requests = hvd.stats()["allreduce_requests"]
    for param in model.parameters():
        param.grad = torch.full_like(param, rank)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert hvd.stats()["allreduce_requests"] == requests
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()  # outside: gradients set by hand are averaged
    for param, old in zip(model.parameters(), before, strict=True):
        assert not torch.equal(param, old) or hvd.size() == 1
        assert torch.equal(param.grad, hvd.broadcast(param.grad, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_is_torchs(rank: int, size: int, set_to_none: bool) -> None:
    model = net()
    optimizer = wrap(model)
    for _ in range(2):
        expected = gradients(model, size)
        model(inputs(rank)).square().sum().backward()
        assert_reduced(model, expected)
        optimizer.zero_grad(set_to_none=set_to_none)
        for param in model.parameters():
            if set_to_none:
                assert param.grad is None
            else:
                assert param.grad is not None
                assert not param.grad.any()


@pytest.mark.parametrize("groups", [1, 3, 10])
def test_groups_are_buckets(rank: int, size: int, groups: int) -> None:
    model = net()
    optimizer = wrap(model, groups=groups)
    expected = gradients(model, size)
    requests = hvd.stats()["allreduce_requests"]
    model(inputs(rank)).square().sum().backward()
    assert hvd.stats()["allreduce_requests"] == requests + min(groups, 4)
    assert_reduced(model, expected)
    optimizer.step()


def test_groups_of_parameters(rank: int, size: int) -> None:
    model = net()
    optimizer = wrap(
        model, groups=[list(model[0].parameters()), [model[2].get_parameter("bias")]]
    )
    expected = gradients(model, size)
    requests = hvd.stats()["allreduce_requests"]
    model(inputs(rank)).square().sum().backward()
    assert hvd.stats()["allreduce_requests"] == requests + 3
    assert_reduced(model, expected)
    optimizer.step()


def test_num_groups_is_deprecated(rank: int, size: int) -> None:
    model = net()
    with pytest.warns(DeprecationWarning, match="use groups="):
        optimizer = wrap(model, num_groups=2)
    requests = hvd.stats()["allreduce_requests"]
    model(inputs(rank)).square().sum().backward()
    optimizer.step()
    assert hvd.stats()["allreduce_requests"] == requests + 2


def test_predivide(rank: int, size: int) -> None:
    model = net()
    optimizer = wrap(model, gradient_predivide_factor=4.0)
    expected = gradients(model, size)
    model(inputs(rank)).square().sum().backward()
    assert_reduced(model, expected)
    optimizer.step()


def test_counters(rank: int) -> None:
    """Requests are buckets, bytes are gradients and a flag each, repeats are cached."""
    model = net()
    optimizer = wrap(model, groups=2)
    params = list(model.parameters())
    nbytes = sum(param.nbytes for param in params) + len(params) * 8
    names = ("requests", "bytes", "cache_hits")
    steps = []
    for _ in range(4):
        before = hvd.stats()
        optimizer.zero_grad()
        model(inputs(rank)).sum().backward()
        optimizer.step()
        after = hvd.stats()
        steps.append([after[name] - before[name] for name in names])
    assert steps[1:] == [[2, nbytes, 2]] * 3  # the first has the allocation, too
