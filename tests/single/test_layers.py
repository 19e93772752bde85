"""The architecture as a test: imports go strictly downward, and imports start nothing.

Imports inside functions and under TYPE_CHECKING count too: knowing a type is knowing.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Lowest first. A row of modules may import one another, folders in one row may not. The
# facade, hvlite/__init__.py, alone may reach everything.
LAYERS = [
    {"config", "errors", "messages", "version"},
    {"transport"},
    {"collectives"},
    {"engine"},
    {"exits", "process_sets", "runtime"},
    {"submission"},
    {"ops"},
    {"elastic"},
    {"torch", "tensorflow"},
    {"keras"},
    {"launcher"},
]
FOLDERS = {path.name for path in (ROOT / "hvlite").iterdir() if path.is_dir()}
RANK = {part: rank for rank, row in enumerate(LAYERS) for part in row}

PURE = {"agreement", "fusion", "member", "negotiation", "protocol", "stall"}
PURE_MAY_IMPORT = {
    *("__future__", "bisect", "collections", "dataclasses", "enum", "functools"),
    *("heapq", "itertools", "math", "ml_dtypes", "numpy", "operator", "pickle"),
    "typing",
    *(f"hvlite.{name}" for name in LAYERS[0]),
    *(f"hvlite.engine.{name}" for name in PURE),
}

HOME = {
    "mpi4py": "hvlite.transport.mpi",
    "torch": "hvlite.torch",
    "tensorflow": "hvlite.tensorflow",
    "keras": "hvlite.keras",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package, by the name it has when installed."""
    for folder, package in ("hvlite", "hvlite"), ("launcher", "hvlite.launcher"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *parts]).removesuffix(".__init__"), path


MODULES = dict(modules())
every_module = pytest.mark.parametrize("module", MODULES)


def imported(module: str) -> set[str]:
    """Every module that `module` imports, wherever in the file."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            origin = ".".join([*(above if node.level else []), node.module or ""])
            origin = origin.strip(".")
            # `from . import x` may import the module x, or a name of the package.
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {origin}
    return found


def part_of(module: str) -> str | None:
    """The box of the architecture in which a module lies; None outside hvlite."""
    root, *parts = module.split(".")
    return parts[0] if root == "hvlite" and parts else None


def may_import(importer: str, part: str) -> bool:
    """Whether a module of the box `importer` may know something in the box `part`."""
    if importer == part:
        return True
    if RANK[importer] == RANK[part]:
        return not {importer, part} & FOLDERS
    return RANK[part] < RANK[importer]


@every_module
def test_imports_go_downward(module: str) -> None:
    importer = part_of(module)
    if importer is not None:  # the facade
        known = {part for name in imported(module) if (part := part_of(name))}
        assert known <= RANK.keys(), "a new part of hvlite needs its place in LAYERS"
        assert {part for part in known if not may_import(importer, part)} == set()


@every_module
def test_nothing_below_the_facade_imports_the_facade(module: str) -> None:
    assert "hvlite" not in imported(module)


@every_module
def test_mpi_and_each_framework_have_one_home(module: str) -> None:
    for name in imported(module):
        home = HOME.get(name.split(".")[0])
        assert home is None or f"{module}.".startswith(f"{home}.")


@pytest.mark.parametrize("name", sorted(PURE))
def test_decisions_are_pure(name: str) -> None:
    impure = {
        other
        for other in imported(f"hvlite.engine.{name}")
        if not any(f"{other}.".startswith(f"{ok}.") for ok in PURE_MAY_IMPORT)
    }
    assert impure == set()


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import hvlite", ["mpi4py.MPI", "torch", "tensorflow", "keras"]),
        ("import hvlite.torch", ["mpi4py.MPI", "tensorflow", "keras"]),
        ("import hvlite.launcher.cli", ["mpi4py.MPI", "torch", "tensorflow", "keras"]),
    ],
)
def test_importing_starts_nothing(statement: str, absent: list[str]) -> None:
    program = f"import sys; {statement}; print(sys.modules.keys() & {absent})"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "set()\n", result.stderr
