"""What `DistributedOptimizer` refuses, before it needs a runtime or changes a thing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvlite.torch as hvd
from hvlite.process_sets import ProcessSet


@pytest.fixture(autouse=True, scope="module")
def compiler() -> None:
    # The first optimizer makes torch load its compiler, which sets a variable.
    torch.optim.SGD([torch.zeros(1)], lr=0.1).zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"op": hvd.Max}, "op must be Average or Sum, not .*MAX"),
        ({"op": 2}, "op must be Average or Sum, not 2"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "works with op=Average"),
        ({"backward_passes_per_step": 0}, "must be at least 1, not 0"),
        ({"process_set": ProcessSet(1)}, "global process set only"),
        ({"groups": 0}, "groups must be at least 1, not 0"),
        ({"groups": "ab"}, "a number or a list of lists"),
        ({"groups": [[1]]}, "no parameter of the optimizer: int"),
        ({"groups": [[torch.zeros(1)]]}, "no parameter of the optimizer: Tensor"),
        ({"named_parameters": ["a"]}, "must give .name, parameter. tuples"),
        ({"named_parameters": []}, r"lacks parameter 0 of group 0 .* shape \(3, 2\)"),
    ],
)
def test_arguments(arguments: dict, text: str) -> None:
    optimizer = adam(model())
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(optimizer, **arguments)
    assert type(optimizer) is torch.optim.Adam


def test_names() -> None:
    net = model()
    twice = [("a", param) for param in net.parameters()]
    with pytest.raises(ValueError, match="has the name 'a' twice"):
        hvd.DistributedOptimizer(adam(net), twice)
    some = [pair for pair in net.named_parameters() if pair[0] != "1.bias"]
    with pytest.raises(ValueError, match=r"lacks parameter 3 of group 0 .*\(4,\)"):
        hvd.DistributedOptimizer(adam(net), some)


def test_a_parameter_in_two_groups() -> None:
    net = model()
    params = list(net.parameters())
    with pytest.raises(ValueError, match=r"groups has parameter '0\.bias' twice"):
        hvd.DistributedOptimizer(
            adam(net), net.named_parameters(), groups=[params[:2], params[1:]]
        )


def test_a_step_replaced_on_the_object() -> None:
    optimizer = adam(model())
    optimizer.step = lambda: None  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match="wrap the optimizer first"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.DistributedOptimizer(adam(model())),
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.broadcast_parameters(model().state_dict(), 0),
        lambda: hvd.broadcast_optimizer_state(adam(model()), 0),
    ],
)
def test_before_init(call: Callable[[], object]) -> None:
    with pytest.raises(hvd.HorovodInternalError, match=r"call init\(\) first"):
        call()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (torch.ones(2), "not a Tensor"),
        (3, "not a int"),
        ({"a": torch.ones(1), "b": 3}, "'b' is a int, not a tensor"),
        ([("a", "x")], "'a' is a str, not a tensor"),
    ],
)
def test_what_broadcast_parameters_refuses(params: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.broadcast_parameters(params, 0)  # type: ignore[arg-type]


def test_all_is_sorted_and_complete() -> None:
    assert hvd.__all__ == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


def test_an_optimizer_is_needed() -> None:
    parameters: Any = model().parameters()
    with pytest.raises(ValueError, match="a torch optimizer is needed, not generator"):
        hvd.DistributedOptimizer(parameters)


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_async, hvd.allreduce_])
@pytest.mark.parametrize("value", [3.0, [1.0]])
def test_a_tensor_is_needed(call: Callable[..., object], value: object) -> None:
    with pytest.raises(ValueError, match=r"a torch.Tensor is needed, not (float|list)"):
        call(value)
