"""Runs tests/parallel, which is right for any number of processes, on 1, 2, 3 and 4."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.jobs import Jobs

PYTEST = ["python", "-m", "pytest", "--color=no", "tests/parallel"]


def counts(report: str) -> Counter[str]:
    """The numbers in pytest's closing line, of which a job must print exactly one."""
    (closing,) = re.findall(r"=+ (.*) in [\d.]+s.* =+", report)
    return Counter({word: int(n) for n, word in re.findall(r"(\d+) (\w+)", closing)})


@pytest.fixture(scope="module")
def collected() -> int:
    """The number of tests that there are, counted without running one."""
    command = [sys.executable, *PYTEST[1:], "--collect-only", "--quiet"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"(\d+) tests? collected", report)[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_parallel_test_passes(
    jobs: Jobs,
    processes: int,
    collected: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    outcome = jobs.run(processes, [*PYTEST, "--verbose"], timeout_s=580)
    with capfd.disabled():  # the log of CI shall name each test that ran
        print(f"\n{outcome.stdout}")
    assert outcome.code == 0, outcome.stderr
    ran = counts(outcome.stdout)
    assert ran["passed"] > 0
    # Combinations that this number of ranks cannot have are skipped, with the reason.
    assert ran["passed"] + ran["skipped"] == collected
