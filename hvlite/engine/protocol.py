"""The two control messages: a rank's report, and the coordinator's decision.

In steady state a report is a few integers (the ids of known requests), and so is a
decision. They travel as plain tuples, which pickle ten times as fast as named ones.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, NamedTuple

from ..messages import Algorithm

if TYPE_CHECKING:
    from ..messages import Key, Request


class Report(NamedTuple):
    """From a rank to the coordinator: what has happened here since the last one.

    Attributes:
        seen: number of the last decision received, which acknowledges it.
        known: (id, sequence) of each newly submitted request that has an id.
        new: (request, sequence) of each that has none.
        waiting: unfinished requests for which this rank's only thread waits.
        failed: (order number, cause) of each order that failed here.
        stopped: numbers of orders to abort with which this rank is done: it no longer
            writes to any memory on their behalf.
        leaving: why this rank leaves, or None if it stays.
    """

    seen: int
    known: list[tuple[int, int]]
    new: list[tuple[Request, int]]
    waiting: list[Key]
    failed: list[tuple[int, str]]
    stopped: list[int]
    leaving: str | None


class Order(NamedTuple):
    """Requests to execute together, as one step of the total order.

    `members` are (id, sequence); all have the same process set and kind.
    """

    number: int
    process_set: int
    algorithm: Algorithm
    members: tuple[tuple[int, int], ...]


class Failure(NamedTuple):
    """Requests that will never be executed; `error` names a class in `errors`."""

    keys: tuple[Key, ...]
    error: str
    text: str


class Abort(NamedTuple):
    """An order that failed on one rank after all had agreed to it.

    It comes twice. First every rank stops working on the order. When all have stopped,
    `final` comes, and each fails its handles: only now is their memory their own again.
    """

    number: int
    rank: int
    cause: str
    final: bool


class Decision(NamedTuple):
    """From the coordinator to every rank; to be applied field by field, in this order.

    Attributes:
        number: counts decisions from 1.
        evicted: ids that are no longer valid in reports.
        assigned: (id, key) of requests that got an id; each rank knows them by key.
        orders: what to execute, in order.
        failures: requests to fail.
        aborts: orders to stop, and orders that all ranks have stopped.
        finished: None to go on; "" once every rank has left: stop serving. Any other
            text says why the coordinator ends before that.
    """

    number: int
    evicted: list[int]
    assigned: list[tuple[int, Key]]
    orders: list[Order]
    failures: list[Failure]
    aborts: list[Abort]
    finished: str | None


def encode_report(report: Report) -> bytes:
    """Serialize a report."""
    return pickle.dumps(tuple(report), protocol=5)


def decode_report(payload: bytes) -> Report:
    """Reverse `encode_report`."""
    return Report._make(pickle.loads(payload))


def encode_decision(decision: Decision) -> bytes:
    """Serialize a decision."""
    orders = [
        (order.number, order.process_set, order.algorithm.value, order.members)
        for order in decision.orders
    ]
    return pickle.dumps((*tuple(decision._replace(orders=[])), orders), protocol=5)


def decode_decision(payload: bytes) -> Decision:
    """Reverse `encode_decision`."""
    *fields, orders = pickle.loads(payload)
    return Decision._make(fields)._replace(
        orders=[
            Order(number, process_set, Algorithm(algorithm), members)
            for number, process_set, algorithm, members in orders
        ]
    )
