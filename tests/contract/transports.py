"""What every transport must do: the same cases run in memory and on MPI.

Each case is a function that all ranks call with their own transport, on any number of
ranks; it leaves nothing unreceived. Each uses tags of its own.
"""

import os
from collections.abc import Callable

import numpy as np
import pytest

from hvlite.errors import TransportError
from hvlite.messages import DTYPES
from hvlite.transport.base import Pending, Transport

Case = Callable[[Transport], None]
CASES: list[Case] = []
LARGE_BYTES = 3 << 20  # far above what any MPI sends before the receiver asks


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def wait(pending: Pending) -> None:
    while not pending.test():
        os.sched_yield()


def receive(transport: Transport) -> tuple[int, bytes]:
    while (message := transport.receive()) is None:
        os.sched_yield()
    return message


def right(transport: Transport) -> int:
    return (transport.rank + 1) % transport.size


def left(transport: Transport) -> int:
    return (transport.rank - 1) % transport.size


def shift(
    transport: Transport, tag: int, sent: np.ndarray, received: np.ndarray
) -> None:
    """Passes an array to the right."""
    incoming = transport.irecv(received, left(transport), tag)
    outgoing = transport.isend(sent, right(transport), tag)
    wait(incoming)
    wait(outgoing)


def in_step(transport: Transport, tag: int) -> None:
    """Returns once all ranks are here: two rounds of a token."""
    token = np.zeros(1, np.uint8)
    for _ in range(2):
        if transport.rank == 0:
            shift(transport, tag, token, token.copy())
        else:
            wait(transport.irecv(token, left(transport), tag))
            wait(transport.isend(token, right(transport), tag))


@case
def describes_itself(transport: Transport) -> None:
    assert 0 <= transport.rank < transport.size == len(transport.nodes)
    assert transport.tags >= 32767
    assert transport.description


@case
def control_messages_of_one_source_keep_their_order(transport: Transport) -> None:
    for dest in range(transport.size):
        for number in range(20):
            transport.send(dest, bytes([transport.rank, number]))
    numbers: dict[int, list[int]] = {source: [] for source in range(transport.size)}
    for _ in range(20 * transport.size):
        source, (named, number) = receive(transport)
        assert named == source
        numbers[source].append(number)
    assert all(got == list(range(20)) for got in numbers.values())
    assert transport.receive() is None
    in_step(transport, 100)


@case
def control_messages_have_any_length(transport: Transport) -> None:
    # All ranks send before any receives: sending must not wait for the receiver.
    payloads = [b"", b"x", bytes(range(256)) * (LARGE_BYTES >> 8)]
    for payload in payloads:
        transport.send(right(transport), payload)
    for payload in payloads:
        assert receive(transport) == (left(transport), payload)
    in_step(transport, 101)


@case
def control_messages_to_itself_arrive(transport: Transport) -> None:
    transport.send(transport.rank, b"me")
    assert receive(transport) == (transport.rank, b"me")
    in_step(transport, 102)


@case
def control_and_data_never_match(transport: Transport) -> None:
    transport.send(right(transport), b"control")
    received = np.zeros(7, np.uint8)
    shift(transport, 0, np.full(7, transport.rank, np.uint8), received)
    assert received.tolist() == [left(transport)] * 7
    assert receive(transport) == (left(transport), b"control")
    in_step(transport, 103)


@case
def data_of_every_dtype_arrives(transport: Transport) -> None:
    for dtype in DTYPES.values():
        for shape in [(), (0,), (3,), (2, 5)]:
            sent = np.full(shape, transport.rank % 2, dtype)
            received = np.full(shape, 1 - left(transport) % 2, dtype)
            shift(transport, 3, sent, received)
            assert (received == np.full(shape, left(transport) % 2, dtype)).all()
            assert (sent == np.full(shape, transport.rank % 2, dtype)).all()


@case
def data_is_matched_by_source_and_tag_in_order(transport: Transport) -> None:
    tags = [transport.tags - 1, 5, 5, 6]
    sends = [
        transport.isend(np.array([transport.rank, dest, number]), dest, tag)
        for dest in range(transport.size)
        for number, tag in enumerate(tags)
    ]
    received: dict[tuple[int, int], np.ndarray] = {}
    # Posted in another order than sent, but for the two of one tag.
    for source in reversed(range(transport.size)):
        for number in [3, 1, 2, 0]:
            target = received[source, number] = np.zeros(3, np.int64)
            wait(transport.irecv(target, source, tags[number]))
    for (source, number), target in received.items():
        assert target.tolist() == [source, transport.rank, number]
    for pending in sends:
        wait(pending)


@case
def a_receive_may_be_posted_first(transport: Transport) -> None:
    received = [np.zeros(4, np.float32) for _ in range(3)]
    receives = [transport.irecv(array, left(transport), 7) for array in received]
    in_step(transport, 104)
    for number in range(3):
        sent = np.full(4, 10 * transport.rank + number, np.float32)
        wait(transport.isend(sent, right(transport), 7))
    for number, pending in enumerate(receives):
        wait(pending)
        assert (received[number] == 10 * left(transport) + number).all()
        assert pending.test()  # and stays so


@case
def large_data_arrives(transport: Transport) -> None:
    received = np.zeros(LARGE_BYTES, np.uint8)
    shift(transport, 8, np.full(LARGE_BYTES, transport.rank, np.uint8), received)
    assert (received == left(transport)).all()


@case
def another_size_than_sent_is_an_error(transport: Transport) -> None:
    for expected in 2, 6:
        outgoing = transport.isend(np.arange(4.0), right(transport), 9)
        incoming = transport.irecv(np.zeros(expected), left(transport), 9)
        with pytest.raises(TransportError, match=f"rank {left(transport)}.*tag 9"):
            wait(incoming)
        wait(outgoing)
    in_step(transport, 105)


@case
def a_cancelled_receive_matches_nothing(transport: Transport) -> None:
    given_up = np.zeros(4)
    pending = transport.irecv(given_up, left(transport), 10)
    pending.cancel()
    wait(pending)
    in_step(transport, 109)  # nobody sends before all have given up
    received = np.zeros(4)
    shift(transport, 10, np.full(4, 1.0 + transport.rank), received)
    assert (given_up == 0).all()
    assert (received == 1.0 + left(transport)).all()


@case
def cancelling_what_is_over_changes_nothing(transport: Transport) -> None:
    received = np.zeros(4)
    incoming = transport.irecv(received, left(transport), 11)
    outgoing = transport.isend(np.ones(4), right(transport), 11)
    wait(incoming)
    wait(outgoing)
    for pending in [incoming, outgoing] * 2:
        pending.cancel()
        assert pending.test()
    assert (received == 1).all()


@case
def an_array_is_free_once_its_cancelled_receive_is_over(transport: Transport) -> None:
    received = np.zeros(LARGE_BYTES, np.uint8)
    outgoing = transport.isend(np.ones(LARGE_BYTES, np.uint8), right(transport), 12)
    in_step(transport, 106)
    incoming = transport.irecv(received, left(transport), 12)
    incoming.test()  # the data may be coming in from here on
    incoming.cancel()
    wait(incoming)
    came = bool(received[0])
    assert (received == came).all()
    if not came:  # then it is still to be had, and the sender to be released
        wait(transport.irecv(received, left(transport), 12))
    wait(outgoing)
    in_step(transport, 107)


@case
def an_abandoned_send_does_not_disturb_other_tags(transport: Transport) -> None:
    transport.isend(np.zeros(LARGE_BYTES, np.uint8), right(transport), 13).cancel()
    received = np.zeros(LARGE_BYTES, np.uint8)
    shift(transport, 14, np.full(LARGE_BYTES, transport.rank + 1, np.uint8), received)
    assert (received == left(transport) + 1).all()
    wait(transport.irecv(received, left(transport), 13))
    in_step(transport, 108)
