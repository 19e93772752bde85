"""Operations on torch tensors: values, strides, in place, gradients."""

import gc
import operator
from collections.abc import Callable

import pytest
import torch

import hvlite.torch as hvd
from hvlite.messages import DTYPES as WIRE_DTYPES
from hvlite.messages import SUPPORTED, Op
from hvlite.torch.tensors import DTYPES


@pytest.fixture(autouse=True, scope="module")
def runtime() -> None:
    hvd.init()


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Small integers that differ by rank and place, exact in every dtype."""
    count = torch.Size(shape).numel()
    counted = (torch.arange(count, dtype=torch.int64) + rank) % 3
    return counted.to(dtype).reshape(shape)


def combined(
    op: Op, size: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """What all ranks' `values` give, computed in one process in int64 or complex."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = torch.stack([values(r, dtype, shape).to(wide) for r in range(size)])
    if op == hvd.Sum:
        result = stacked.sum(0)
    elif op == hvd.Average:
        result = stacked.sum(0) / size
    elif op == hvd.Product:
        result = stacked.prod(0)
    elif op == hvd.Min:
        result = stacked.amin(0)
    else:
        result = stacked.amax(0)
    if not (dtype.is_floating_point or dtype.is_complex):
        result = result.trunc()
    return result.to(dtype)


def cases() -> list:
    return [
        pytest.param(dtype, op, id=f"{name}-{op.name}")
        for name, ops in SUPPORTED.items()
        for op in sorted(ops)
        for dtype in DTYPES
        if DTYPES[dtype] == WIRE_DTYPES[name]
    ]


def test_the_dtype_table_is_complete() -> None:
    assert set(DTYPES.values()) == set(WIRE_DTYPES.values())


@pytest.mark.parametrize(("dtype", "op"), cases())
def test_allreduce(rank: int, size: int, dtype: torch.dtype, op: Op) -> None:
    for shape in [(2, 3, 4), (5,), (), (0, 3)]:
        mine = values(rank, dtype, shape)
        kept = mine.clone()
        expected = combined(op, size, dtype, shape)
        reduced = hvd.allreduce(mine, op=op)
        assert reduced.dtype == dtype
        torch.testing.assert_close(reduced, expected)
        assert torch.equal(mine, kept)
        assert hvd.allreduce_(mine, op=op) is mine
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast(rank: int, size: int, dtype: torch.dtype) -> None:
    for root in range(size):
        for shape in [(2, 3), (), (0,)]:
            mine = values(rank, dtype, shape)
            kept = mine.clone()
            received = hvd.broadcast(mine, root)
            assert torch.equal(received, values(root, dtype, shape))
            assert torch.equal(mine, kept)
            assert received.data_ptr() != mine.data_ptr() or mine.numel() == 0
            assert hvd.broadcast_(mine, root) is mine
            assert torch.equal(mine, received)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sliced": lambda t: torch.cat([t, t], dim=3)[..., ::2].copy_(t),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_in_their_own_strides(
    rank: int, size: int, dtype: torch.dtype, layout: str
) -> None:
    shape = (2, 3, 4, 5)
    mine = LAYOUTS[layout](values(rank, dtype, shape))
    assert not mine.is_contiguous()
    strides = mine.stride()
    expected = combined(hvd.Sum, size, dtype, shape)
    reduced = hvd.allreduce(mine, op=hvd.Sum)
    assert torch.equal(reduced, expected)
    assert reduced.stride() == torch.empty_like(mine).stride()
    hvd.allreduce_(mine, op=hvd.Sum)
    assert torch.equal(mine, expected)
    assert mine.stride() == strides
    root = LAYOUTS[layout](values(rank, dtype, shape))
    hvd.broadcast_(root, size - 1)
    assert torch.equal(root, values(size - 1, dtype, shape))


def test_ranks_may_have_different_strides(rank: int, size: int) -> None:
    mine = values(rank, torch.float32, (2, 3, 4, 5))
    if rank % 2:
        mine = mine.contiguous(memory_format=torch.channels_last)
    expected = combined(hvd.Sum, size, torch.float32, (2, 3, 4, 5))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), expected)
    assert torch.equal(hvd.allreduce_(mine, op=hvd.Sum), expected)


def test_lazy_conjugates_and_expanded_inputs(rank: int, size: int) -> None:
    mine = torch.complex(torch.tensor([1.0, 2]), torch.full((2,), rank + 1.0)).conj()
    assert mine.is_conj()
    total = size * (size + 1) / 2
    expected = torch.complex(torch.tensor([1.0, 2]) * size, torch.full((2,), -total))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), expected)
    assert torch.equal(hvd.allreduce_(mine, op=hvd.Sum), expected)
    wide = torch.tensor([rank + 1.0]).expand(4)
    assert torch.equal(hvd.allreduce(wide, op=hvd.Sum), torch.full((4,), total))
    with pytest.raises(ValueError, match="expanded tensor cannot be written in place"):
        hvd.allreduce_(wide)


def test_grouped(rank: int, size: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float32]
    shapes = [(3,), (2, 2), (), (0, 4)]
    pairs = list(zip(dtypes, shapes, strict=True))
    mine = [values(rank, dtype, shape) for dtype, shape in pairs]
    expected = [combined(hvd.Sum, size, dtype, shape) for dtype, shape in pairs]
    for one, want in zip(
        hvd.grouped_allreduce(mine, op=hvd.Sum), expected, strict=True
    ):
        assert torch.equal(one, want)
    handle = hvd.grouped_allreduce_async(mine, op=hvd.Sum)
    result = hvd.synchronize(handle)
    assert isinstance(result, tuple)
    assert all(map(torch.equal, result, expected))
    in_place = hvd.grouped_allreduce_([one.clone() for one in mine], op=hvd.Sum)
    assert all(map(torch.equal, in_place, expected))
    handle = hvd.grouped_allreduce_async_(mine, op=hvd.Sum)
    result = hvd.synchronize(handle)
    assert isinstance(result, tuple)
    assert all(map(operator.is_, result, mine))
    assert all(map(torch.equal, mine, expected))


def test_async_in_opposite_orders(rank: int, size: int) -> None:
    tensors = {f"t{index}": torch.full((3,), index + rank + 0.0) for index in range(20)}
    names = sorted(tensors, reverse=rank % 2 == 1)
    handles = {n: hvd.allreduce_async_(tensors[n], None, n, hvd.Sum) for n in names}
    for name in sorted(tensors, reverse=rank % 2 == 0):
        assert hvd.synchronize(handles[name]) is tensors[name]
    for index in range(20):
        want = index * size + size * (size - 1) / 2
        assert tensors[f"t{index}"].tolist() == [want] * 3


def test_handles_give_their_result_once(size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    assert torch.equal(hvd.synchronize(handle), torch.full((3,), float(size)))
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="synchronised already"):
        hvd.poll(handle)
    handle = hvd.broadcast_async(torch.ones(3), 0)
    while not hvd.poll(handle):
        pass
    assert torch.equal(hvd.synchronize(handle), torch.ones(3))


def test_an_input_may_be_dropped_while_under_way(size: int) -> None:
    handles = [hvd.allreduce_async(torch.ones(1000), op=hvd.Sum) for _ in range(10)]
    gc.collect()
    for handle in handles:
        assert torch.equal(hvd.synchronize(handle), torch.full((1000,), float(size)))


def test_factors(rank: int, size: int) -> None:
    mine = torch.full((3,), rank + 1.0)
    total = size * (size + 1) / 2
    reduced = hvd.allreduce(mine, None, None, op=hvd.Sum, prescale_factor=0.5)
    assert reduced.tolist() == [total / 2] * 3
    reduced = hvd.allreduce(mine, op=hvd.Average, postscale_factor=4.0)
    torch.testing.assert_close(reduced, torch.full((3,), 4 * total / size))


def test_average_argument(rank: int, size: int) -> None:
    mine = torch.full((3,), rank + 1.0)
    with pytest.warns(DeprecationWarning, match="op=Average or op=Sum") as caught:
        reduced = hvd.allreduce(mine, False)
    assert caught[0].filename == __file__
    assert reduced.tolist() == [size * (size + 1) / 2] * 3
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(mine, True, op=hvd.Sum)
    with pytest.raises(ValueError, match="op=2 is not known"):
        hvd.allreduce(mine, op=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.eye(2).to_sparse(), r"use \.to_dense\(\)"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "dtype torch.float8_e4m3fn is not"),
    ],
)
def test_what_cannot_be_sent_is_refused(tensor: torch.Tensor, text: str) -> None:
    for call in (hvd.allreduce, hvd.allreduce_, lambda t: hvd.broadcast(t, 0)):
        with pytest.raises(ValueError, match=text):
            call(tensor)


def test_mismatch_is_an_error_and_the_name_is_free_again(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(hvd.HorovodInternalError, match=r"allreduce 'x'.*shape"):
        hvd.allreduce(torch.ones(3 + (rank == 1)), name="x")
    assert hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum).tolist() == [size] * 3


# -- compression --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression(rank: int, size: int, name: str) -> None:
    compression = getattr(hvd.Compression, name)
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    for dtype in (torch.float32, torch.float64):
        compressed, context = compression.compress(torch.ones(2, dtype=dtype))
        assert compressed.dtype == wire
        assert compression.decompress(compressed, context).dtype == dtype
        reduced = hvd.allreduce(
            torch.full((3,), rank + 1.0, dtype=dtype), compression=compression
        )
        assert reduced.dtype == dtype
        expected = torch.full((3,), (size + 1) / 2, dtype=dtype)
        torch.testing.assert_close(reduced, expected, rtol=1e-2, atol=0)
    for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.complex64):
        tensor = torch.ones(2, dtype=dtype)
        assert (
            compression.compress(tensor) == (tensor, None) or dtype == torch.complex64
        )
        assert compression.compress(tensor)[0] is tensor
    pair = hvd.grouped_allreduce(
        [torch.ones(2), torch.ones(2, dtype=torch.int64)],
        compression=compression,
        op=hvd.Sum,
    )
    assert [one.tolist() for one in pair] == [[size, size], [size, size]]


# -- gradients ----------------------------------------------------------------------


def gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Average])
def test_gradient_of_allreduce(rank: int, size: int, op: Op) -> None:
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    weights = torch.arange(3.0) * (rank + 1)
    (hvd.allreduce(x, op=op, prescale_factor=2.0) * weights).sum().backward()
    total = size * (size + 1) / 2 * 2.0 / (size if op == hvd.Average else 1)
    torch.testing.assert_close(gradient(x), torch.arange(3.0) * total)


def test_gradient_in_place(rank: int, size: int) -> None:
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    doubled = x * 2
    reduced = hvd.allreduce_(doubled, op=hvd.Sum)
    assert reduced is doubled
    assert reduced.grad_fn is not None
    (reduced * (rank + 1)).sum().backward()
    assert gradient(x).tolist() == [size * (size + 1)] * 3


def test_in_place_on_a_leaf_writes_its_data(rank: int, size: int) -> None:
    leaf = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert leaf.tolist() == [size * (size + 1) / 2] * 3
    assert leaf.is_leaf
    with torch.no_grad():
        hvd.broadcast_(leaf, 0)
    hvd.broadcast_(leaf, 0)
    assert leaf.grad is None


def test_autograd_notices_a_write_to_what_it_saved() -> None:
    x = torch.ones(3, requires_grad=True)
    doubled = x * 2
    squared = (doubled * doubled).sum()
    with torch.no_grad():
        hvd.allreduce_(doubled, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_gradient_of_grouped_allreduce(rank: int, size: int) -> None:
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    y = torch.full((2, 2), rank + 1.0, requires_grad=True)
    first, second = hvd.grouped_allreduce([x, y], op=hvd.Sum)
    (first.sum() * (rank + 1) + second.sum() * 2).backward()
    assert gradient(x).tolist() == [size * (size + 1) / 2] * 3
    assert gradient(y).flatten().tolist() == [2.0 * size] * 4


def test_gradient_of_broadcast(rank: int, size: int) -> None:
    root = size - 1
    for form in (hvd.broadcast, hvd.broadcast_):
        x = torch.full((3,), rank + 1.0, requires_grad=True)
        received = form(x * 1, root)
        assert received.tolist() == [size] * 3
        (received * (rank + 1)).sum().backward()
        expected = (size + 1) / 2 if rank == root else 0.0
        torch.testing.assert_close(gradient(x), torch.full((3,), expected))


def test_gradient_of_a_gradient(rank: int, size: int) -> None:
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    reduced = hvd.allreduce(x, op=hvd.Sum)
    (first,) = torch.autograd.grad((reduced**3).sum(), x, create_graph=True)
    total = size * (size + 1) / 2
    torch.testing.assert_close(first, torch.full_like(x, 3 * total**2 * size))
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full_like(x, 6 * total * size * size))


def test_max_has_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="allreduce with Max has no gradient"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


def test_integers_and_no_grad_make_no_graph() -> None:
    assert hvd.allreduce(torch.ones(3, dtype=torch.int64)).grad_fn is None
    with torch.no_grad():
        assert hvd.allreduce(torch.ones(3, requires_grad=True)).grad_fn is None
