"""The same parallel tests on other paths: every algorithm, uneven nodes, no cache."""

import pytest

from tests.jobs import Jobs

OPS = "tests/parallel/test_ops.py"
TRAINING = "tests/parallel/test_torch_equivalence.py"

# Processes, ranks of each pretended node ("" for one real node), settings, tests.
VARIANTS = {
    "ring": (3, "", {"HVLITE_ALLREDUCE": "ring"}, [OPS, TRAINING]),
    "hierarchical in one node": (2, "", {"HVLITE_ALLREDUCE": "hierarchical"}, [OPS]),
    "two even nodes": (4, "2,2", {}, [OPS, TRAINING]),
    "two uneven nodes": (3, "2,1", {}, [OPS, TRAINING]),
    "a node each": (2, "1,1", {}, [OPS]),
    "no fusion, no cache": (
        3,
        "",
        {"HVLITE_FUSION_THRESHOLD": "0", "HOROVOD_CACHE_CAPACITY": "0"},
        [OPS, TRAINING],
    ),
    # Nothing larger is handed to MPI or counted at once: how counts beyond 2**31 go.
    "tiny chunks": (
        3,
        "2,1",
        {"HVLITE_CHUNK_BYTES": "1000", "HVLITE_FUSION_THRESHOLD": "5000"},
        [OPS],
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS)
def test_parallel_tests_pass(jobs: Jobs, variant: str) -> None:
    processes, nodes, settings, tests = VARIANTS[variant]
    as_nodes = ["python", "tests/as_nodes.py", nodes] if nodes else []
    command = [*as_nodes, "python", "-m", "pytest", "--color=no", "-q", *tests]
    outcome = jobs.run(processes, command, env=settings, timeout_s=280)
    assert outcome.code == 0, str(outcome)
    assert " passed in " in outcome.stdout, str(outcome)
    assert "skipped" not in outcome.stdout, str(outcome)
