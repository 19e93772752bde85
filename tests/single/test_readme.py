"""What README.md states is so; tests/integration/test_readme.py runs its program."""

import dataclasses
import re
from pathlib import Path

import pytest

from hvlite.config import Config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
VERBS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_settings_table_is_complete() -> None:
    told = re.findall(r"^\| `(HVLITE_\w+)` \|", README, re.MULTILINE)
    settings = [field.metadata["setting"] for field in dataclasses.fields(Config)]
    assert told == sorted(f"HVLITE_{setting.variable}" for setting in settings)


def test_defaults_in_the_settings_table() -> None:
    told = dict(re.findall(r"^\| `HVLITE_(\w+)` \| (.*?) ?\|", README, re.MULTILINE))
    for field in dataclasses.fields(Config):
        default = field.default
        if isinstance(default, int) and default >= 1 << 20:
            default = f"{default >> 20} MB"
        elif isinstance(default, float):
            default = f"{default:.0f}"
        assert told[field.metadata["setting"].variable].strip("`") == str(default)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_verb_and_link_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    assert set(re.findall(r"\bmake ([a-z]+)\b(?!-)", text)) - {"hvlite"} <= VERBS
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / link).exists(), link
