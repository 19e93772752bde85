"""The examples run as their docstrings say, and print what those say."""

import ast
from pathlib import Path

import pytest

from tests.jobs import Jobs

EXAMPLES = Path(__file__).parents[2] / "examples"
MNIST = ["python", str(EXAMPLES / "torch_mnist.py")]


def test_numpy_allreduce_prints_what_its_docstring_says(jobs: Jobs) -> None:
    path = EXAMPLES / "numpy_allreduce.py"
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    _, _, promised = docstring.partition("On two processes it prints")
    outcome = jobs.run(2, ["python", str(path)])
    assert outcome.code == 0, str(outcome)
    assert sorted(outcome.stdout.splitlines()) == promised.split("\n    ")[1:]


@pytest.mark.timeout(300)
def test_torch_mnist_resumes_and_recognizes_97_percent(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The script itself checks accuracy, equal weights and the single broadcast."""
    checkpoint = ["--checkpoint", str(tmp_path / "mnist.pt")]
    begun = jobs.run(2, [*MNIST, *checkpoint, "--epochs", "2", "--accuracy", "0"])
    assert begun.code == 0, str(begun)

    outcome = jobs.run(2, [*MNIST, *checkpoint], timeout_s=200)
    assert outcome.code == 0, str(outcome)
    assert "mnist.pt: 2 epochs are done" in outcome.stdout
    assert "of the test images are right" in outcome.stdout
    assert "[0] epoch 3:" in outcome.stderr
    assert "epoch 2:" not in outcome.stderr
    assert "[1]" not in outcome.stdout + outcome.stderr, "rank 0 alone reports"


def test_torch_mnist_fails_below_the_accuracy_to_reach(jobs: Jobs) -> None:
    outcome = jobs.run(1, [*MNIST, "--epochs", "1", "--accuracy", "1.1"])
    assert outcome.code == 1
    assert "fewer than 110% of the test images are right" in outcome.stderr
