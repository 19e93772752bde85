"""What holds for every test, whatever starts it: it leaves nothing behind."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Take SIGINT as a terminal would send it, also when started in the background.

    A shell starts background jobs with SIGINT ignored, which everything inherits.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def allowed_threads() -> frozenset[str]:
    """Names of the threads that may outlive a test; folders override it."""
    return frozenset()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(allowed_threads: frozenset[str]) -> Iterator[None]:
    """Fail a test that leaves a thread running or an environment variable changed."""
    threads, variables = set(threading.enumerate()), _environment()
    yield
    left = {
        thread.name
        for thread in set(threading.enumerate()) - threads
        # Native threads that once called Python show up as dummies and never leave.
        if not isinstance(thread, threading._DummyThread)
    }
    if left - allowed_threads:
        pytest.fail(f"threads left running: {sorted(left)}", pytrace=False)
    if changed := {name for name, _ in variables.items() ^ _environment().items()}:
        pytest.fail(f"environment left changed: {sorted(changed)}", pytrace=False)


def _environment() -> dict[str, str]:
    """The environment without what pytest itself writes there."""
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
