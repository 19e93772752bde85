"""What ranks tell each other: dtypes, operations, requests and orders, as plain values.

House rules: nothing here knows MPI, threads, clocks or frameworks. Every class is an
immutable tuple, so that hashing, comparing and pickling run at C speed: a request is
hashed on each submission. The table `SUPPORTED` is hvlite's whole contract on dtypes.
"""

from __future__ import annotations

import enum
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Hashable


class Kind(enum.IntEnum):
    """What a request asks for."""

    __hash__ = int.__hash__  # in C; Enum's own, in Python, would be in every look-up

    ALLREDUCE = 0
    BROADCAST = 1
    BARRIER = 2
    ALLOCATE = 3  # a segment of memory that all ranks of a node see


class Op(enum.IntEnum):
    """How an all-reduce combines the ranks' values; the numbers are Horovod's."""

    __hash__ = int.__hash__  # as above

    AVERAGE = 0
    SUM = 1
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Algorithm(enum.Enum):
    """Which way the bytes go; chosen by the coordinator, the same on every rank."""

    SHM = "shm"
    RING = "ring"
    HIERARCHICAL = "hierarchical"


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# dtype -> its name on the wire. One entry per dtype that hvlite can move.
DTYPE_NAMES: dict[np.dtype, str] = {
    dtype: dtype.name
    for dtype in [
        np.dtype(code)
        for code in (
            *("bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"),
            *("f2", "f4", "f8", "c8", "c16"),
        )
    ]
    + [BFLOAT16]
}
DTYPES: dict[str, np.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

HALF_FLOATS = (np.dtype(np.float16), BFLOAT16)


def is_complex(dtype: np.dtype) -> bool:
    """Say whether values of `dtype` have two parts (and therefore no order)."""
    return dtype.kind == "c"


def _operations(dtype: np.dtype) -> frozenset[Op]:
    if dtype.kind == "b":
        return frozenset({Op.MIN, Op.MAX, Op.PRODUCT})
    if is_complex(dtype):
        return frozenset({Op.AVERAGE, Op.SUM, Op.PRODUCT})
    return frozenset(Op)


# Dtype name -> the operations an all-reduce of it allows. Broadcast moves them all.
SUPPORTED: dict[str, frozenset[Op]] = {
    name: _operations(dtype) for dtype, name in DTYPE_NAMES.items()
}


def dtype_name(dtype: np.dtype) -> str:
    """Return the wire name of `dtype`.

    Raises:
        UsageError: hvlite cannot move this dtype.
    """
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        known = ", ".join(DTYPES)
        raise UsageError(f"dtype {dtype} is not supported; convert to one of {known}")
    return name


def check_operation(name: str, dtype: str, op: Op) -> None:
    """Refuse an all-reduce that has no meaning for its dtype.

    Raises:
        UsageError: naming the tensor, and the operation to use in its place.
    """
    if op in SUPPORTED[dtype]:
        return
    if dtype == "bool":
        remedy = "use Max (or), Min or Product (and), or convert to an integer dtype"
    else:
        remedy = "complex numbers have no order: use Sum, Average or Product"
    raise UsageError(f"allreduce '{name}': {op.name.title()} of {dtype}: {remedy}")


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor; `dtype` is a key of `DTYPES`."""

    dtype: str
    shape: tuple[int, ...]


class Key(NamedTuple):
    """What ranks match requests by.

    `sequence` is 0 for a request the user named. An unnamed one carries its count
    within (process set, kind) here, outside the request, so that it too is cached.
    """

    process_set: int
    kind: Kind
    name: str
    sequence: int


class _RequestFields(NamedTuple):
    kind: Kind
    name: str
    specs: tuple[TensorSpec, ...] = ()
    op: Op = Op.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    process_set: int = 0
    device: str = "cpu"
    segment: int = 0
    offset: int = 0
    layout: str = ""


class Request(_RequestFields):
    """One operation as one rank asks for it; equal on all ranks or an error.

    A grouped operation is one request with several specs. `segment` is 0 for memory
    of the caller's own, else the number of the node-shared segment in which the
    (single, flat) tensor lies at byte `offset`. `layout` describes what is inside the
    tensor, one line a part, and is compared like everything else: ranks that built
    different gradient buckets learn which lines differ.
    """

    # Hashed and compared as a tuple. What follows from the fields is kept in the
    # instance: the coordinator asks for it on every step, of the same few instances.

    def key(self, sequence: int) -> Key:
        """Return what this request is matched by."""
        if not sequence:
            return self._key
        return Key(self.process_set, self.kind, self.name, sequence)

    @cached_property
    def _key(self) -> Key:
        return Key(self.process_set, self.kind, self.name, 0)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all its tensors together."""
        return sum([spec_nbytes(spec) for spec in self.specs])

    @cached_property
    def dtypes(self) -> tuple[str, ...]:
        """The distinct dtypes of its tensors, in order of appearance."""
        return tuple(dict.fromkeys([spec.dtype for spec in self.specs]))

    @cached_property
    def affinity(self) -> tuple[Hashable, ...] | None:
        """What requests must have in common to be executed as one; None if it can't."""
        if self.kind is not Kind.ALLREDUCE or self.segment:
            return None
        return (
            self.process_set,
            self.dtypes,
            self.op,
            self.prescale,
            self.postscale,
            self.device,
        )


def spec_size(spec: TensorSpec) -> int:
    """Return the number of elements."""
    size = 1
    for extent in spec.shape:
        size *= extent
    return size


def spec_nbytes(spec: TensorSpec) -> int:
    """Return the number of bytes."""
    return spec_size(spec) * DTYPES[spec.dtype].itemsize


def describe(key: Key) -> str:
    """Name a request in an error: allreduce 'fc1.weight'."""
    kind = key.kind.name.lower()
    if key.kind is Kind.BARRIER:
        return kind
    return (
        f"{kind} '{key.name}'"
        if not key.sequence
        else f"unnamed {kind} #{key.sequence}"
    )
