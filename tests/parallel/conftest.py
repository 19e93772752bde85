"""Makes the pytest sessions of all ranks behave as one.

Start it as `hvrun -np N python -m pytest tests/parallel` (or with a bare mpirun, or
without either on one process). After each phase of each test the ranks tell each
other how it went, which has three effects: a test that fails on one rank fails on
all, and the report names the rank; no rank runs ahead into the next test; and a
rank that does not arrive is named while the others wait for it. Rank 0 alone prints.

This talks over a communicator of its own with plain point-to-point messages, so that
the verdict stands when hvlite's engine, or a collective, is what is broken.
"""

import io
import sys
import time
from collections.abc import Generator
from typing import NamedTuple, TypeVar

import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD.Dup()
NAME_LATE_RANKS_AFTER_S = 20

broken_modules: list[str] = []

T = TypeVar("T")


class Word(NamedTuple):
    """What one rank tells the others about one phase of one test."""

    outcome: str
    text: str

    def __str__(self) -> str:
        """The outcome, and why."""
        return f"{self.outcome}\n{self.text}".rstrip()


@pytest.fixture(scope="session")
def rank() -> int:
    """This process's rank in the world, as MPI has it."""
    return WORLD.rank


@pytest.fixture(scope="session")
def size() -> int:
    """The number of processes, as MPI has it."""
    return WORLD.size


@pytest.fixture
def allowed_threads() -> frozenset[str]:
    """The engine lives as long as its process: tests share one."""
    return frozenset({"hvlite-engine"})


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let the other ranks report into memory instead of onto the terminal."""
    if WORLD.rank > 0:
        config.pluginmanager.unregister(name="terminalreporter")
        unseen = pytest.TerminalReporter(config, io.StringIO())
        config.pluginmanager.register(unseen, "terminalreporter")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Remember the modules that this rank could not import."""
    if report.failed:
        broken_modules.append(f"rank {WORLD.rank}: {report.longreprtext}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Run nothing unless every rank has collected the same tests in the same order."""
    collected = [item.nodeid for item in session.items]
    words = exchange((collected, broken_modules), "collection")
    problems = [text for _, broken in words for text in broken]
    if any(tests != collected for tests, _ in words):
        problems.append("the ranks have collected different tests")
    if problems:
        session.shouldfail = "\n".join(problems)
        raise session.Failed(session.shouldfail)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace each rank's own outcome by the common one, the same on every rank."""
    report = yield
    captured = [f"--- {title} ---\n{text}" for title, text in report.sections]
    mine = Word(report.outcome, "\n".join([report.longreprtext, *captured]))
    words = exchange(mine, f"{item.nodeid} ({call.when})")
    if report.failed or len({word.outcome for word in words}) > 1:
        report.outcome, report.longrepr = "failed", verdict(words)
        report.sections.clear()  # they are in the text
    return report


def pytest_unconfigure() -> None:
    """Keep every rank until rank 0 has printed: the first to fail ends the MPI job."""
    exchange(None, "the end of the session")


def verdict(words: list[Word]) -> str:
    """One text for all ranks: how it went where, and why; equal reasons once."""
    ranks_of: dict[Word, list[str]] = {}
    for rank, word in enumerate(words):
        if word.outcome != "passed":
            ranks_of.setdefault(word, []).append(str(rank))
    return "\n\n".join(
        f"{word.outcome} on rank {', '.join(ranks)} of {WORLD.size}:\n{word.text}"
        for word, ranks in ranks_of.items()
    )


def exchange(word: T, where: str) -> list[T]:
    """Return every rank's word in rank order, naming the ranks that are late.

    Polls with pauses, because MPI's own waits spin and the late rank may need the core.
    """
    words = {WORLD.rank: word}
    missing = set(range(WORLD.size)) - {WORLD.rank}
    sent = [WORLD.isend(word, dest=peer) for peer in missing]
    name_them_at = time.monotonic() + NAME_LATE_RANKS_AFTER_S
    while missing:
        for peer in [peer for peer in missing if WORLD.iprobe(source=peer)]:
            words[peer] = WORLD.recv(source=peer)
            missing.remove(peer)
        if missing and time.monotonic() > name_them_at:
            name_them_at = float("inf")
            late = ", ".join(map(str, sorted(missing)))
            mine = f"; here: {word}" if isinstance(word, Word) else ""
            print(f"{where}: no word from rank {late}{mine}", file=sys.stderr)
        time.sleep(0.0005)
    MPI.Request.waitall(sent)
    return [words[rank] for rank in range(WORLD.size)]
