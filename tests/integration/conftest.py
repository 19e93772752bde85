"""The fixture with which these tests start their jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Starts MPI jobs; after the test nothing may be left of them."""
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.assert_gone()
