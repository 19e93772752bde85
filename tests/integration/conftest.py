"""The fixture with which these tests start their jobs."""

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Start MPI jobs; after the test nothing may be left of them."""
    # Who waits for a job is not stuck; each job's own pytest and each wait have limits.
    faulthandler.cancel_dump_traceback_later()
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.assert_gone()
