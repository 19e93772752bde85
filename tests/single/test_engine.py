"""Several engines in one process, over the in-memory transport."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hvlite import errors, submission
from hvlite.collectives import shared_memory
from hvlite.config import Config
from hvlite.engine import coordinator
from hvlite.engine.handles import Handle
from hvlite.engine.queue import Submission
from hvlite.engine.start import start_engine
from hvlite.messages import Kind, Op, Request, TensorSpec, dtype_name
from hvlite.transport.memory import make_world

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hvlite.collectives.channel import Channel, Steps
    from hvlite.engine.coordinator import Engine
    from hvlite.transport.base import Array


TIMEOUT_S = 30


class Ranks:
    """Engines of a world, and what a caller on each of them does."""

    def __init__(
        self, size: int, nodes: tuple[int, ...] | None = None, **config: Any
    ) -> None:
        self.size = size
        transports = make_world(size, nodes)
        with ThreadPoolExecutor(size) as pool:
            started = pool.map(lambda t: start_engine(t, Config(**config)), transports)
            self.engines: list[Engine] = [engine for engine, _ in started]

    def allreduce(
        self, rank: int, array: Array, name: str = "w", op: Op = Op.SUM
    ) -> Handle:
        return self.start(Kind.ALLREDUCE, rank, array, name, op)

    def start(
        self, kind: Kind, rank: int, array: Array, name: str = "w", op: Op = Op.SUM
    ) -> Handle:
        """Submit an all-reduce, or a broadcast from rank 0."""
        engine = self.engines[rank]
        spec = TensorSpec(dtype_name(array.dtype), array.shape)
        request = Request(kind, name, (spec,), op)
        mine = submission_of(engine, request, array)
        engine.queue.put(mine)
        return mine.handle

    def leave(self, *ranks: int, cause: str = "") -> list[bool]:
        chosen = [self.engines[rank] for rank in ranks or range(self.size)]
        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(lambda engine: engine.leave(cause), chosen))


@pytest.fixture
def world() -> Iterator[Callable[..., Ranks]]:
    """Makes worlds, and ends those that a test has not ended itself."""
    made: list[Ranks] = []

    def make(size: int, nodes: tuple[int, ...] | None = None, **config: Any) -> Ranks:
        made.append(Ranks(size, nodes, leave_timeout_s=5.0, **config))
        return made[-1]

    yield make
    for ranks in made:
        if any(engine._thread.is_alive() for engine in ranks.engines):
            ranks.leave()


def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, within reason."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_opposite_orders_of_submission_give_right_sums(
    world: Callable[..., Ranks], size: int
) -> None:
    ranks = world(size)
    names = [f"t{index}" for index in range(20)]
    handles = {}
    for rank in range(size):
        for index in range(20) if rank % 2 else reversed(range(20)):
            array = np.full(index, rank + index, dtype=np.float32)
            handles[rank, index] = ranks.allreduce(rank, array, names[index])
    for (_, index), handle in handles.items():
        expected = size * (size - 1) / 2 + size * index
        np.testing.assert_array_equal(
            handle.wait(), np.full(index, expected, np.float32)
        )
    assert ranks.leave() == [True] * size


def test_a_name_in_flight_is_refused_and_then_free_again(
    world: Callable[..., Ranks],
) -> None:
    ranks = world(2)
    first = ranks.allreduce(0, np.ones(2))
    with pytest.raises(
        errors.DuplicateNameError, match=r"^allreduce 'w' is already in"
    ):
        ranks.allreduce(0, np.ones(2))
    assert not first.poll()
    ranks.allreduce(1, np.ones(2)).wait()
    first.wait()
    again = ranks.allreduce(0, np.ones(2))
    np.testing.assert_array_equal(ranks.allreduce(1, np.ones(2)).wait(), [2, 2])
    again.wait()


def test_mismatch_is_the_same_error_on_each_rank_and_the_engines_live_on(
    world: Callable[..., Ranks],
) -> None:
    ranks = world(3)
    handles = [ranks.allreduce(rank, np.ones(2 + (rank == 1))) for rank in range(3)]
    texts = []
    for handle in handles:
        with pytest.raises(errors.MismatchError) as caught:
            handle.wait()
        texts.append(str(caught.value))
    assert (
        texts
        == [
            "allreduce 'w': ranks disagree on shape: (2,) on ranks 0, 2; (3,) on rank 1"
        ]
        * 3
    )
    handles = [ranks.allreduce(rank, np.ones(2)) for rank in range(3)]
    assert [handle.wait().sum() for handle in handles] == [6.0] * 3


def test_a_rank_that_left_fails_what_needs_it_with_its_cause(
    world: Callable[..., Ranks],
) -> None:
    ranks = world(2)
    pending = ranks.allreduce(0, np.ones(2))
    leaver = threading.Thread(
        target=ranks.leave, args=(1,), kwargs={"cause": "bad batch"}
    )
    leaver.start()
    with pytest.raises(errors.RankLeftError, match=r"rank 1 has left \(bad batch\)$"):
        pending.wait()
    with pytest.raises(
        errors.RankLeftError, match=r"^allreduce 'later': rank 1 has left"
    ):
        ranks.allreduce(0, np.ones(2), "later").wait()
    assert ranks.leave(0) == [True]
    leaver.join(TIMEOUT_S)
    with pytest.raises(errors.NotInitializedError):
        ranks.allreduce(1, np.ones(2))


def test_when_the_coordinator_does_not_wait_any_longer_the_others_are_told(
    world: Callable[..., Ranks],
) -> None:
    ranks = world(2)
    pending = ranks.allreduce(1, np.ones(2), "pending")
    ranks.engines[0]._config = Config(leave_timeout_s=0.0)
    assert ranks.leave(0) == [False]
    with pytest.raises(errors.RankLeftError):
        pending.wait()
    until(lambda: not ranks.engines[1]._thread.is_alive())
    with pytest.raises(
        errors.RankLeftError, match=r"^rank 0, which coordinates, has left"
    ):
        ranks.allreduce(1, np.ones(2))
    ranks.leave(1)


def test_a_failure_while_executing_reaches_every_rank(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world(3)
    real = shared_memory.allreduce

    def fails_on_rank_1(channel: Channel, *args: Any, **options: Any) -> Steps:
        yield None
        if channel.rank == 1:
            raise MemoryError("no room")
        yield from real(channel, *args, **options)

    monkeypatch.setattr(shared_memory, "allreduce", fails_on_rank_1)
    handles = [ranks.allreduce(rank, np.ones(4)) for rank in range(3)]
    for handle in handles:
        with pytest.raises(errors.AbortedError) as caught:
            handle.wait()
        assert str(caught.value) == (
            "allreduce 'w' failed on rank 1: MemoryError: no room"
        )
    monkeypatch.setattr(shared_memory, "allreduce", real)
    handles = [ranks.allreduce(rank, np.ones(4)) for rank in range(3)]
    assert [handle.wait().sum() for handle in handles] == [12.0] * 3


# Which nodes the three ranks are on, and the setting, for each algorithm.
WAYS = {
    "shm": ((0, 0, 0), "auto"),
    "ring": ((0, 0, 0), "ring"),
    "hierarchical": ((0, 0, 1), "auto"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Kind.ALLREDUCE, Kind.BROADCAST])
def test_a_fault_at_any_step_reaches_every_rank(
    world: Callable[..., Ranks], way: str, kind: Kind
) -> None:
    nodes, setting = WAYS[way]
    ranks = world(3, nodes, allreduce=setting)
    plane = ranks.engines[1]._executor._plane
    real = plane.run
    faults_before_the_end = 0
    for step in itertools.count():
        plane.run = faulty(real, step)  # type: ignore[method-assign]
        handles = [ranks.start(kind, rank, np.full(5, rank + 1.0)) for rank in range(3)]
        texts = {outcome(handle) for handle in handles}
        failure = f"{kind.name.lower()} 'w' failed on rank 1: MemoryError: step {step}"
        # Once all have passed the closing barrier, a fault has nobody else to reach.
        assert failure in texts or texts == {"done"}
        if texts == {"done"}:
            break
        faults_before_the_end += texts == {failure}
        plane.run = real  # type: ignore[method-assign]
        handles = [ranks.start(kind, rank, np.full(5, rank + 1.0)) for rank in range(3)]
        wanted = 6.0 if kind is Kind.ALLREDUCE else 1.0
        assert [handle.wait()[4] for handle in handles] == [wanted] * 3
    # The last barrier has two rounds among three ranks, each with two waits.
    assert step - faults_before_the_end <= 4 < step


def faulty(run: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Make the steps of `run` raise in place of step `at`."""

    def steps(*arguments: Any) -> Any:
        inner = run(*arguments)
        for step in itertools.count():
            if step == at:
                inner.close()
                raise MemoryError(f"step {step}")
            try:
                pending = next(inner)
            except StopIteration as end:
                return end.value
            yield pending

    return steps


def outcome(handle: Handle) -> str:
    """How an operation ended on one rank."""
    try:
        handle.wait()
    except errors.AbortedError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("broken", [0, 1])
def test_a_dead_engine_fails_everything_everywhere_at_once(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    ranks = world(2)
    own = ranks.allreduce(broken, np.ones(2), "own")
    other = ranks.allreduce(1 - broken, np.ones(2), "other")

    def breaks() -> bool:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ranks.engines[broken], "_execute", breaks)
    with pytest.raises(errors.EngineError, match=r"ZeroDivisionError: a bug"):
        own.wait()
    with pytest.raises(
        errors.RankLeftError, match=r"ended unexpectedly: ZeroDivisionErr"
    ):
        other.wait()
    with pytest.raises(errors.EngineError, match=r"ended unexpectedly"):
        ranks.allreduce(broken, np.ones(2), "later")


def test_ranks_that_wait_for_each_other_are_told(
    world: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here the ranks are threads of one program; in a job each has its own.
    monkeypatch.setattr(coordinator, "_one_thread_besides_this", lambda: True)
    ranks = world(2)
    texts: list[str] = []

    def wait_for(rank: int) -> None:
        with pytest.raises(errors.MismatchError) as caught:
            ranks.allreduce(rank, np.ones(2), f"only on {rank}").wait()
        texts.append(str(caught.value))

    threads = [threading.Thread(target=wait_for, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (
        texts
        == [
            "ranks wait for different operations: allreduce 'only on 0' on rank 0; "
            "allreduce 'only on 1' on rank 1"
        ]
        * 2
    )


def test_stall_is_warned_of_and_ended(
    world: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = world(2, stall_warning_s=0.01, stall_abort_s=1.2)
    handle = ranks.allreduce(0, np.ones(2))
    with pytest.raises(
        errors.StallError, match=r"submitted on rank 0, missing on rank 1"
    ):
        handle.wait()
    assert "allreduce 'w' has waited" in caplog.text


def test_other_threads_may_still_submit_what_is_waited_for(
    world: Callable[..., Ranks],
) -> None:
    ranks = world(2, stall_warning_s=0.0)
    first = [ranks.allreduce(rank, np.ones(2), f"first on {rank}") for rank in (0, 1)]
    waiters = [threading.Thread(target=handle.wait) for handle in first]
    for waiter in waiters:
        waiter.start()
    until(lambda: all(handle.waiting_since is not None for handle in first))
    deadline = time.monotonic() + 2 * coordinator.REPORT_WAITING_AFTER_S
    until(lambda: time.monotonic() > deadline)  # long enough for a wrong verdict
    for rank in (0, 1):
        ranks.allreduce(1 - rank, np.ones(2), f"first on {rank}").wait()
    for waiter in waiters:
        waiter.join(TIMEOUT_S)
    assert [handle.wait().sum() for handle in first] == [4.0, 4.0]


@pytest.mark.parametrize("way", WAYS)
def test_what_all_submitted_before_they_left_is_executed(
    world: Callable[..., Ranks], way: str
) -> None:
    nodes, setting = WAYS[way]
    ranks = world(3, nodes, allreduce=setting)
    handles = [
        ranks.allreduce(rank, np.full(300_000, 1.0), f"t{index}")
        for rank in range(3)
        for index in range(10)
    ]
    assert ranks.leave() == [True] * 3
    for handle in handles:
        np.testing.assert_array_equal(handle.wait(), np.full(300_000, 3.0))


def test_counters_say_what_happened(world: Callable[..., Ranks]) -> None:
    ranks = world(2)
    for _ in range(3):
        handles = [ranks.allreduce(rank, np.ones(100, np.float32)) for rank in range(2)]
        for handle in handles:
            handle.wait()
    ranks.leave()
    stats = ranks.engines[1].stats.snapshot()
    assert stats["requests"] == stats["allreduce_requests"] == 3
    assert stats["cache_hits"] == 2
    assert stats["bytes"] == 1200
    assert stats["batches"] == 3
    assert stats["fused_requests"] == 0


def test_fusion_puts_ready_requests_together(world: Callable[..., Ranks]) -> None:
    ranks = world(2)
    for name in "abc":
        ranks.allreduce(0, np.ones(5), name)
    # What rank 1 submits in one go is reported in one message: block its engine's
    # intake by submitting from within the queue's lock.
    engine = ranks.engines[1]
    spec = TensorSpec("float64", (5,))
    held = [
        submission_of(engine, Request(Kind.ALLREDUCE, name, (spec,)), np.full(5, 2.0))
        for name in "abc"
    ]
    for one in held:
        engine.queue.in_flight[one.key] = one
    engine.queue._arrivals.extend(held)
    for one in held:
        np.testing.assert_array_equal(one.handle.wait(), np.full(5, 3.0))
    ranks.leave()
    assert engine.stats.snapshot()["requests"] == 3


def submission_of(engine: Engine, request: Request, array: Array) -> Submission:
    parts = submission._out_of_place([array])
    handle: Handle = Handle(engine.queue)
    handle.promise(parts[0].outputs[0])
    return Submission(request, 0, handle, parts)
