"""The in-memory transport keeps the contract, with a thread a rank."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hvlite.transport.memory import make_world
from tests.contract import transports


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", transports.CASES, ids=lambda case: case.__name__)
def test_contract(case: transports.Case, size: int) -> None:
    with ThreadPoolExecutor(size) as pool:
        for _ in pool.map(case, make_world(size)):
            pass  # but raise what it raised


def test_ranks_share_one_node_unless_told_otherwise() -> None:
    assert make_world(3)[1].nodes == (0, 0, 0)
    assert make_world(3, [0, 1, 1])[2].nodes == (0, 1, 1)


def test_node_numbers_must_be_as_many_as_ranks() -> None:
    with pytest.raises(ValueError, match=r"^2 ranks but 3 node numbers$"):
        make_world(2, [0, 0, 0])


def test_a_closed_rank_takes_nothing_in() -> None:
    first, second = make_world(2)
    first.send(1, b"before")
    second.close(together=False)
    first.send(1, b"after")
    assert first.isend(np.ones(3), 1, 5).test()
    assert second.receive() is None


def test_closing_twice_is_allowed() -> None:
    (alone,) = make_world(1)
    alone.close(together=True)
    alone.close(together=True)


def test_a_send_is_buffered() -> None:
    first, second = make_world(2)
    sent, received = np.ones(3), np.zeros(3)
    first.isend(sent, 1, 5)
    sent[:] = 2
    assert second.irecv(received, 0, 5).test()
    assert received.tolist() == [1, 1, 1]
