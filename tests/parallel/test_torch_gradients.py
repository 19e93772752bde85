"""What backward leaves in `p.grad`: whose, where, and of what."""

from typing import Any

import pytest
import torch
from torch import nn

import hvlite.torch as hvd
from hvlite.messages import Op

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


# -- who has a gradient -------------------------------------------------------------


def test_unused_here_counts_as_zero_and_unused_everywhere_stays_none(
    rank: int, size: int
) -> None:
    everywhere, somewhere, nowhere = parameter(2), parameter(3), parameter(4)
    optimizer = wrap(everywhere, somewhere, nowhere)
    for _ in range(3):
        optimizer.zero_grad()
        loss = everywhere.sum() * (rank + 1)
        if rank == size - 1:
            loss = loss + somewhere.sum() * 6
        loss.backward()
        assert values(everywhere) == pytest.approx([mean(size)] * 2)
        assert values(somewhere) == pytest.approx([6 / size] * 3)
        assert nowhere.grad is None
        optimizer.step()
    assert nowhere.tolist() == [1.0] * 4


def test_a_rank_whose_loss_reaches_no_parameter(rank: int, size: int) -> None:
    param, other = parameter(2), torch.ones(2, requires_grad=True)
    optimizer = wrap(param)
    for _ in range(2):
        optimizer.zero_grad()
        (param if rank == 0 else other).sum().backward()
        optimizer.step()
    assert param.tolist() == pytest.approx([1 - 2 / size] * 2)


def test_no_backward_anywhere_keeps_none() -> None:
    param = parameter(2)
    optimizer = wrap(param)
    optimizer.step()
    assert param.grad is None
    assert param.tolist() == [1.0, 1.0]


def test_frozen_now_and_later(rank: int, size: int) -> None:
    frozen, thawed, param = parameter(2), parameter(2), parameter(2)
    frozen.requires_grad_(False)
    thawed.requires_grad_(False)
    optimizer = wrap(frozen, thawed, param)
    for step in range(4):
        thawed.requires_grad_(step >= 1)
        param.requires_grad_(step != 2)
        optimizer.zero_grad()
        ((frozen + thawed + param) * (rank + 1)).sum().backward() if step else (
            param * (rank + 1)
        ).sum().backward()
        assert frozen.grad is None
        assert (thawed.grad is not None) == (step >= 1)
        assert (param.grad is not None) == (step != 2)
        for one in (thawed, param):
            assert one.grad is None or values(one) == pytest.approx([mean(size)] * 2)
        optimizer.step()


def test_tied_weights_are_one_parameter(rank: int, size: int) -> None:
    torch.manual_seed(0)
    embed = nn.Embedding(5, 3).double()
    head = nn.Linear(3, 5, bias=False).double()
    head.weight = embed.weight
    model = nn.Sequential(embed, head)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    tokens = [torch.tensor([r % 5, (r + 1) % 5]) for r in range(size)]
    losses = [model(one).square().sum() for one in tokens]
    (expected,) = torch.autograd.grad(sum(losses) / size, [embed.weight])
    model(tokens[rank]).square().sum().backward()
    torch.testing.assert_close(embed.weight.grad, expected)
    optimizer.step()


def test_gradients_set_by_hand_count(rank: int, size: int) -> None:
    by_hand, computed = parameter(2), parameter(2)
    optimizer = wrap(by_hand, computed)
    by_hand.grad = torch.full((2,), rank + 1.0, dtype=torch.float64)
    (computed.sum() * (rank + 1)).backward()
    assert values(by_hand) == pytest.approx([mean(size)] * 2)
    assert values(computed) == pytest.approx([mean(size)] * 2)
    optimizer.zero_grad()
    computed.grad = torch.full((2,), rank + 1.0, dtype=torch.float64)
    optimizer.step()
    assert computed.tolist() == pytest.approx([1 - mean(size)] * 2)


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_a_second_backward_leaves_what_it_does_not_reach(
    rank: int, size: int, op: Op
) -> None:
    both, once = parameter(2), parameter(2)
    optimizer = wrap(both, once, op=op)
    ((both + once) * (rank + 1)).sum().backward()
    (both * (rank + 1)).sum().backward()
    total = mean(size) * (size if op == hvd.Sum else 1)
    assert values(both) == pytest.approx([2 * total] * 2)
    assert values(once) == pytest.approx([total] * 2)
    optimizer.step()


def test_a_gradient_that_was_given_other_memory(rank: int, size: int) -> None:
    here, elsewhere = parameter(2), parameter(2)
    optimizer = wrap(here, elsewhere)
    for _ in range(3):
        ((here + elsewhere) * 9).sum().backward()
        for one in (here, elsewhere):
            assert one.grad is not None
            one.grad.data = torch.full((2,), rank + 1.0, dtype=torch.float64)
        (here * (rank + 1)).sum().backward()
        assert values(here) == pytest.approx([2 * mean(size)] * 2)
        assert values(elsewhere) == pytest.approx([mean(size)] * 2)
        optimizer.zero_grad(set_to_none=False)


def test_a_model_that_is_cast_after_wrapping(rank: int, size: int) -> None:
    layer = nn.Linear(2, 2)
    optimizer = wrap(*layer.parameters())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        layer.to(dtype)
        optimizer.zero_grad()
        (layer(torch.ones(1, 2, dtype=dtype)).sum() * (rank + 1)).backward()
        assert layer.bias.grad is not None
        assert layer.bias.grad.dtype == dtype
        assert values(layer.bias) == pytest.approx([mean(size)] * 2)
        optimizer.step()


# -- where it lies ------------------------------------------------------------------


def test_a_gradient_is_a_resident_view_in_its_own_strides(rank: int, size: int) -> None:
    conv = nn.Conv2d(3, 4, 2)
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    transposed = nn.Parameter(torch.ones(3, 5).t())
    scalar = nn.Parameter(torch.tensor(2.0))
    optimizer = wrap(*conv.parameters(), transposed, scalar)
    x = torch.ones(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    places = set()
    for _ in range(3):
        optimizer.zero_grad()
        (conv(x).sum() * (rank + 1) + (transposed * scalar).sum()).backward()
        assert conv.weight.grad is not None
        assert conv.weight.grad.stride() == conv.weight.stride()
        torch.testing.assert_close(
            conv.weight.grad, torch.full_like(conv.weight, 50 * mean(size))
        )
        assert transposed.grad is not None
        assert transposed.grad.stride() == transposed.stride()
        assert values(scalar) == [15.0]
        places.add(conv.weight.grad.data_ptr())
    assert len(places) == 1


def test_mixed_dtypes_get_buckets_of_their_own(rank: int, size: int) -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    params = [parameter(3, dtype=dtype) for dtype in dtypes]
    params.append(nn.Parameter(torch.ones(3, dtype=torch.complex64)))
    optimizer = wrap(*params)
    sum((param * (rank + 1)).sum().abs() for param in params).backward()  # type: ignore[union-attr]
    for param in params:
        assert param.grad is not None
        assert param.grad.dtype == param.dtype
        expected = torch.full_like(param.grad, mean(size))
        torch.testing.assert_close(param.grad, expected, rtol=1e-2, atol=0)
    optimizer.step()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression_stages_and_leaves_gradients_apart(
    rank: int, size: int, name: str
) -> None:
    compression = getattr(hvd.Compression, name)
    param, unused = parameter(3, dtype=torch.float32), parameter(2)
    optimizer = wrap(param, unused, compression=compression)
    before = hvd.stats()["bytes"]
    for _ in range(2):
        optimizer.zero_grad()
        loss = (param * (rank + 1)).sum()
        if rank == 0:
            loss = loss + unused.sum()
        loss.backward()
        assert param.grad is not None
        assert param.grad.dtype == torch.float32
        assert values(param) == pytest.approx([mean(size)] * 3, rel=1e-2)
        assert values(unused) == pytest.approx([1 / size] * 2, rel=1e-2)
        optimizer.step()
    assert hvd.stats()["bytes"] - before < 2 * 4 * (3 + 2) + 2 * 2 * 2 + 8 * 9


def test_sparse_gradients_need_a_word(rank: int, size: int) -> None:
    embed = nn.Embedding(4, 2, sparse=True)
    nn.init.ones_(embed.weight)
    wrapped = wrap(embed.weight)
    with pytest.raises(
        ValueError, match=r"has a sparse gradient.*sparse_as_dense=True"
    ):
        embed(torch.tensor([1])).sum().backward()
    del wrapped
    embed.zero_grad()
    optimizer = wrap(embed.weight, sparse_as_dense=True)
    for _ in range(2):
        optimizer.zero_grad()
        embed(torch.tensor([rank % 4])).sum().backward()
        counts = [len(range(row, size, 4)) / size for row in range(4)]
        want = [count for count in counts for _ in range(2)]
        assert values(embed.weight) == pytest.approx(want)
        optimizer.step()


# -- disagreement -------------------------------------------------------------------


def test_different_models_are_told_apart(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank agrees with itself")
    odd = rank == size - 1
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5 if odd else 4))
    optimizer: Wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    with pytest.raises(hvd.HorovodInternalError) as caught:
        model(torch.ones(1, 2)).sum().backward()
    text = str(caught.value)
    assert "1.weight" in text
    assert "(5, 3)" in text
    assert "(4, 3)" in text
    assert "0.weight" not in text
    del optimizer
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
