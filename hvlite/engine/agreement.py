"""Do the ranks mean the same? Pure: requests in, the text of a disagreement out.

Compared in a fixed order, so that all see the same first difference: layout, number of
tensors, dtype, shape, operation, scale factors, root, device kind, memory.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..messages import Kind, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..messages import Key, Request

MAX_LISTED = 12  # differing lines of a layout; more would bury the message


def disagreement(key: Key, requests: Mapping[int, Request]) -> str:
    """Say in what the requests that ranks made under `key` differ.

    Args:
        key: what they were matched by.
        requests: rank -> its request; not all equal.

    Returns:
        One text that names the tensor, what differs, and every rank with its value.
    """
    layouts = {rank: request.layout for rank, request in requests.items()}
    if len(set(layouts.values())) > 1:
        return f"{describe(key)}: ranks disagree on {layout_differences(layouts)}"
    for noun, value in _FIELDS:
        values = {rank: value(request) for rank, request in requests.items()}
        if len(set(values.values())) > 1:
            return f"{describe(key)}: ranks disagree on {noun}: {by_value(values)}"
    return f"{describe(key)}: ranks disagree: {by_value(dict(requests))}"


def by_value(values: Mapping[int, object]) -> str:
    """Group ranks by value: 'float32 on ranks 0, 2; float16 on rank 1'."""
    ranks: dict[object, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        ranks[value].append(rank)
    return "; ".join(
        f"{value} on {name_ranks(group)}" for value, group in ranks.items()
    )


def name_ranks(ranks: list[int]) -> str:
    """Write ranks as 'rank 1' or 'ranks 0, 2, 4-7'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [
        str(low) if low == high else f"{low}{', ' if high == low + 1 else '-'}{high}"
        for low, high in runs
    ]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def layout_differences(layouts: Mapping[int, str]) -> str:
    """List the layout lines that not every rank has, with the ranks that have them."""
    lines: dict[str, list[int]] = defaultdict(list)
    for rank, layout in sorted(layouts.items()):
        for line in dict.fromkeys(layout.splitlines()):
            lines[line].append(rank)
    partial = {
        line: ranks for line, ranks in lines.items() if len(ranks) < len(layouts)
    }
    if not partial:
        return "the order or number of these parts: " + by_value(
            {rank: "[" + ", ".join(text.splitlines()[:MAX_LISTED]) + "]"
             for rank, text in layouts.items()}
        )  # fmt: skip
    listed = [
        f"\n  {line}: only on {name_ranks(ranks)}"
        for line, ranks in list(partial.items())[:MAX_LISTED]
    ]
    more = len(partial) - len(listed)
    return (
        f"{len(partial)} of {len(lines)} parts:"
        + "".join(listed)
        + (f"\n  ... and {more} more" if more else "")
    )


def _tensors(
    value: Callable[[Request], list[object]],
) -> Callable[[Request], str]:
    """Show one value as itself and several as a list."""

    def show(request: Request) -> str:
        values = value(request)
        return (
            str(values[0]) if len(values) == 1 else f"[{', '.join(map(str, values))}]"
        )

    return show


_FIELDS: tuple[tuple[str, Callable[[Request], object]], ...] = (
    ("the number of tensors", lambda request: len(request.specs)),
    ("dtype", _tensors(lambda request: [spec.dtype for spec in request.specs])),
    ("shape", _tensors(lambda request: [spec.shape for spec in request.specs])),
    ("the reduction", lambda request: request.op.name.title()),
    ("prescale_factor", lambda request: request.prescale),
    ("postscale_factor", lambda request: request.postscale),
    ("root rank", lambda request: request.root),
    ("device", lambda request: request.device),
    (
        "memory",
        lambda request: (
            "the caller's own"
            if not request.segment or request.kind is Kind.ALLOCATE
            else f"segment {request.segment} at byte {request.offset}"
        ),
    ),
)
