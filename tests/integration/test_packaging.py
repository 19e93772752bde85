"""The wheel holds the library whole, once, and nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ["LICENSE", "README.md", "pyproject.toml", "setup.py"]


def run(*command: str, **env: str) -> str:
    """Run a command that must succeed and return what it printed."""
    environment = {**os.environ, **env}
    return subprocess.run(
        command, env=environment, cwd="/", stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_wheel_holds_every_module_once(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, since building leaves files in the tree
    for folder in "hvlite", "launcher", "tests":
        shutil.copytree(ROOT / folder, source / folder)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("hvlite-*.whl")

    expected = {"hvlite/py.typed"}
    for folder, package in ("hvlite", "hvlite"), ("launcher", "hvlite/launcher"):
        for path in (ROOT / folder).rglob("*.py"):
            expected.add(f"{package}/{path.relative_to(ROOT / folder)}")
    names = zipfile.ZipFile(wheel).namelist()
    library = [name for name in names if ".dist-info/" not in name]
    assert sorted(library) == sorted(expected)

    site = tmp_path / "site"
    run(*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    program = "import hvlite.launcher.cli as cli; print(cli.__file__)"
    imported = run(sys.executable, "-c", program, PYTHONPATH=str(site))
    assert Path(imported.strip()) == site / "hvlite" / "launcher" / "cli.py"
