"""README.md's program, started as README.md says, prints what README.md says."""

import re
from pathlib import Path

from tests.jobs import Jobs

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_program_prints_what_is_promised(jobs: Jobs, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (console,) = re.findall(r"```console\n\$ (.*?)```", README, re.DOTALL)
    command, *promised = console.splitlines()
    script = tmp_path / "train.py"
    script.write_text(program)

    outcome = jobs.start_bare(command.replace("train.py", str(script)).split()).wait()
    assert outcome.code == 0, str(outcome)
    assert sorted(outcome.stdout.splitlines()) == promised
