"""The negotiation as a whole: N members and a coordinator, joined by hand."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvlite.config import Config
from hvlite.engine.member import Member
from hvlite.engine.negotiation import Coordinator
from hvlite.engine.protocol import Decision, Failure
from hvlite.messages import Algorithm, Key, Kind, Op, Request, TensorSpec


class World:
    """Ranks whose messages wait in queues until a test lets them through."""

    def __init__(self, size: int, **config: Any) -> None:
        self.size = size
        self.now = 0.0
        self.coordinator = Coordinator(size, Config(**config), Algorithm.SHM)
        self.members = [Member() for _ in range(size)]
        self.in_flight: list[dict[Key, Request]] = [{} for _ in range(size)]
        self.mail: list[deque[Decision]] = [deque() for _ in range(size)]
        self.executed: list[list[tuple[Key, ...]]] = [[] for _ in range(size)]
        self.failures: list[dict[Key, Failure]] = [{} for _ in range(size)]
        self.finished: list[str | None] = [None] * size
        self.hits = 0

    def submit(self, rank: int, request: Request, sequence: int = 0) -> None:
        self.in_flight[rank][request.key(sequence)] = request
        self.hits += self.members[rank].submit(request, sequence) is not None

    def report(self, rank: int) -> None:
        """Let what `rank` has to say reach the coordinator."""
        report = self.members[rank].report()
        if report is not None:
            self.coordinator.report(rank, report, self.now)

    def decide(self) -> Decision | None:
        """Let the coordinator decide and send."""
        decision = self.coordinator.decide()
        if decision is not None:
            for mail in self.mail:
                mail.append(decision)
        return decision

    def obey(self, rank: int) -> None:
        """Let `rank` receive the next decision, if one is on its way."""
        if not self.mail[rank]:
            return
        decision = self.mail[rank].popleft()
        mine = self.in_flight[rank]
        self.members[rank].receive(decision, mine.get)
        for order in decision.orders:
            keys = tuple(self.members[rank].key(*member) for member in order.members)
            for key in keys:
                del mine[key]
            self.executed[rank].append(keys)
        for failure in decision.failures:
            for key in failure.keys:
                if mine.pop(key, None) is not None:
                    self.failures[rank][key] = failure
        if decision.finished is not None:
            self.finished[rank] = decision.finished

    def settle(self) -> None:
        """Let everything through until nothing is under way."""
        for _ in range(3):  # a decision can cause reports that acknowledge it
            for rank in range(self.size):
                self.report(rank)
            while self.decide():
                pass
            for rank in range(self.size):
                while self.mail[rank]:
                    self.obey(rank)


def tensor(
    name: str, count: int = 4, dtype: str = "float32", **changes: Any
) -> Request:
    return Request(Kind.ALLREDUCE, name, (TensorSpec(dtype, (count,)),))._replace(
        **changes
    )


def key(name: str, kind: Kind = Kind.ALLREDUCE, sequence: int = 0) -> Key:
    return Key(0, kind, name, sequence)


NAMES = "abcdef"


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, list[list[str]], list[tuple[str, int]]]:
    """A world size, each rank's order of submission, and an interleaving of events."""
    size = draw(st.integers(1, 5))
    orders = [draw(st.permutations(NAMES)) for _ in range(size)]
    event = st.tuples(
        st.sampled_from(["submit", "report", "decide", "obey"]),
        st.integers(0, size - 1),
    )
    return size, orders, draw(st.lists(event, max_size=60))


@settings(deadline=None, max_examples=300)
@given(schedules(), st.integers(0, 100), st.sampled_from([0, 2, 4096]))
def test_any_interleaving_gives_one_order_on_all_ranks(
    schedule: tuple[int, list[list[str]], list[tuple[str, int]]],
    threshold: int,
    capacity: int,
) -> None:
    size, orders, events = schedule
    world = World(size, fusion_threshold_bytes=threshold, cache_capacity=capacity)
    for _ in range(2):  # the second round goes through the cache
        waiting = [deque(order) for order in orders]
        for action, rank in events:
            if action == "submit" and waiting[rank]:
                name = waiting[rank].popleft()
                world.submit(rank, tensor(name, count=1 + NAMES.index(name)))
            elif action != "submit":
                getattr(world, action)(*([] if action == "decide" else [rank]))
        for rank in range(size):
            for name in waiting[rank]:
                world.submit(rank, tensor(name, count=1 + NAMES.index(name)))
        world.settle()
    assert all(executed == world.executed[0] for executed in world.executed)
    assert not any(world.failures)
    done = [member.name for batch in world.executed[0] for member in batch]
    assert sorted(done) == sorted(NAMES * 2)
    for batch in world.executed[0]:
        nbytes = sum(4 * (1 + NAMES.index(member.name)) for member in batch)
        assert len(batch) == 1 or nbytes <= threshold


def test_known_requests_travel_as_integers() -> None:
    world = World(2)
    for step in range(3):
        for rank in (0, 1):
            world.submit(rank, tensor("w"))
        report = world.members[1].report()
        assert report is not None
        assert len(report.known) == (step > 0)
        assert len(report.new) == (step == 0)
        world.coordinator.report(1, report, 0.0)
        world.settle()
    assert world.hits == 4


def test_unnamed_requests_are_cached_whatever_their_count() -> None:
    world = World(2)
    for sequence in (1, 2, 3):
        for rank in (1, 0):
            world.submit(rank, tensor(""), sequence)
        world.settle()
    assert world.executed[1] == [(key("", sequence=count),) for count in (1, 2, 3)]
    assert world.hits == 4


def test_evicted_id_is_understood_until_every_rank_has_acknowledged() -> None:
    world = World(2, cache_capacity=1)
    for name in "ab":
        for rank in (0, 1):
            world.submit(rank, tensor(name))
        world.settle()
    # The coordinator now evicts "a"; rank 1 does not know it yet and reports its id.
    world.submit(1, tensor("a"))
    report = world.members[1].report()
    assert report is not None
    assert report.known
    for rank in (0, 1):
        world.submit(rank, tensor("c"))
    world.report(0)
    world.report(1)
    world.decide()
    world.coordinator.report(1, report, 0.0)
    world.submit(0, tensor("a"))
    world.settle()
    assert world.executed[0][-1] == (key("a"),)
    assert world.executed[0] == world.executed[1]


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (
            tensor("w", dtype="float64"),
            "dtype: float32 on ranks 0, 2; float64 on rank 1",
        ),
        (tensor("w", 5), r"shape: \(4,\) on ranks 0, 2; \(5,\) on rank 1"),
        (tensor("w", op=Op.MAX), "the reduction: Sum on ranks 0, 2; Max on rank 1"),
        (
            tensor("w", prescale=0.5),
            "prescale_factor: 1.0 on ranks 0, 2; 0.5 on rank 1",
        ),
        (
            tensor("w", postscale=2.0),
            "postscale_factor: 1.0 on ranks 0, 2; 2.0 on rank 1",
        ),
        (tensor("w", root=2), "root rank: 0 on ranks 0, 2; 2 on rank 1"),
        (tensor("w", device="cuda"), "device: cpu on ranks 0, 2; cuda on rank 1"),
        (
            tensor("w", segment=7),
            "memory: the caller's own on ranks 0, 2; segment 7 at byte 0 on rank 1",
        ),
        (
            tensor("w", layout="fc.weight float32"),
            r"1 of 1 parts:\n  fc.weight float32: only on rank 1",
        ),
    ],
)
def test_mismatch_is_one_error_that_names_every_value(
    theirs: Request, text: str
) -> None:
    world = World(3)
    for rank, request in enumerate([tensor("w"), theirs, tensor("w")]):
        world.submit(rank, request)
    world.settle()
    failures = [world.failures[rank][key("w")] for rank in range(3)]
    assert failures == [failures[0]] * 3
    assert failures[0].error == "MismatchError"
    with pytest.raises(ValueError, match=rf"^allreduce 'w': ranks disagree on {text}$"):
        raise ValueError(failures[0].text)
    # The name is free again, and works.
    for rank in range(3):
        world.submit(rank, tensor("w"))
    world.settle()
    assert world.executed[2] == [(key("w"),)]


def test_layouts_that_differ_in_order_are_told() -> None:
    world = World(2)
    world.submit(0, tensor("w", layout="a\nb"))
    world.submit(1, tensor("w", layout="b\na"))
    world.settle()
    assert "the order or number of these parts" in world.failures[0][key("w")].text


def test_ranks_that_wait_for_each_other_are_told_at_once() -> None:
    world = World(2)
    broadcast = tensor("x", kind=Kind.BROADCAST)
    world.submit(0, tensor("x"))
    world.submit(1, broadcast)
    world.settle()
    assert not any(world.failures)  # either rank may still submit the other one
    world.members[0].wait(key("x"))
    world.settle()
    assert not any(world.failures)
    world.members[1].wait(key("x", Kind.BROADCAST))
    world.settle()
    failure = world.failures[0][key("x")]
    assert failure == world.failures[1][key("x", Kind.BROADCAST)]
    assert failure.text == (
        "ranks wait for different operations: "
        "allreduce 'x' on rank 0; broadcast 'x' on rank 1"
    )


def test_a_wait_that_ended_is_forgotten() -> None:
    world = World(2)
    world.submit(0, tensor("a"))
    world.members[0].wait(key("a"))
    world.settle()
    world.submit(1, tensor("a"))
    world.settle()
    world.submit(1, tensor("b"))
    world.members[1].wait(key("b"))
    world.settle()
    assert not any(world.failures)


def test_only_what_needs_a_rank_that_left_fails() -> None:
    world = World(3)
    world.submit(0, tensor("needs 1"))
    for rank in (0, 1, 2):
        world.submit(rank, tensor("complete"))
    world.members[1].leave("ValueError: bad batch")
    world.settle()
    failure = world.failures[0][key("needs 1")]
    assert failure.error == "RankLeftError"
    assert failure.text == (
        "allreduce 'needs 1': rank 1 has left (ValueError: bad batch)"
    )
    assert world.executed[2] == [(key("complete"),)]
    world.submit(2, tensor("later"))
    world.settle()
    assert world.failures[2][key("later")].error == "RankLeftError"
    world.members[0].leave("")
    world.settle()
    assert world.finished == [None] * 3
    world.members[2].leave("")
    world.settle()
    assert world.finished == [""] * 3


def test_an_abort_is_final_once_every_rank_has_stopped() -> None:
    world = World(2)
    for member in world.members:  # both fail, the second one as a consequence
        member.fail(7, "MemoryError: no room")
    world.report(1)
    decision = world.decide()
    assert decision is not None
    assert decision.aborts == [(7, 1, "MemoryError: no room", False)]
    world.report(0)
    assert world.decide() is None
    world.members[0].stop(7)
    world.report(0)
    assert world.decide() is None
    world.members[1].stop(7)
    world.report(1)
    decision = world.decide()
    assert decision is not None
    assert decision.aborts == [(7, 1, "MemoryError: no room", True)]


def test_stalls_are_warned_of_once_and_end_after_the_limit() -> None:
    world = World(3, stall_warning_s=60, stall_abort_s=100)
    world.submit(0, tensor("w"))
    world.submit(2, tensor("w"))
    world.settle()
    assert world.coordinator.check_stalls(59.0) == []
    (warning,) = world.coordinator.check_stalls(61.0)
    assert warning.startswith(
        "allreduce 'w' has waited 61 s: submitted on ranks 0, 2, missing on rank 1"
    )
    assert world.coordinator.check_stalls(62.0) == []
    world.coordinator.check_stalls(100.0)
    world.settle()
    assert world.failures[0][key("w")].error == "StallError"
