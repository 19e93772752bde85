"""Starts MPI jobs for the integration tests, and proves that nothing of them is left.

Every process of a job inherits one environment variable that no other process has.
That mark finds the job's processes wherever they went: into another process group,
another session, or up to init as orphans.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MARK = "HVLITE_TEST_JOB"
GONE_WITHIN_S = 5.0
SHARED_MEMORY = Path("/dev/shm")

# Beside the interpreter lie the hvrun and the mpirun that belong to it.
BIN = Path(sys.executable).parent

# What a user would type after mpirun's name differs by vendor; the variables do not.
BARE_MPIRUN = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

Starter = Literal["hvrun", "mpirun"]


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        """All of it, for the message of an assertion."""
        return f"exit code {self.code}\n{self.stdout}\n--- stderr ---\n{self.stderr}"


class Job:
    """A job that was started: its output so far, its processes, its end."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], directory: Path
    ) -> None:
        """Start `command` in a session of its own, its output in `directory`."""
        mark = uuid.uuid4().hex
        self._bare = Path(command[0]).name == "mpirun"
        self._mark = f"{MARK}={mark}".encode()
        self._stdout = directory / f"{mark}.out"
        self._stderr = directory / f"{mark}.err"
        self._shared_memory_before = set(os.listdir(SHARED_MEMORY))
        with self._stdout.open("w") as stdout, self._stderr.open("w") as stderr:
            self.starter = subprocess.Popen(
                command,
                env={**os.environ, **env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def so_far(self) -> Outcome:
        """The output until now; the exit code is -1 while the job runs."""
        code = self.starter.poll()
        return Outcome(
            -1 if code is None else code,
            self._stdout.read_text(errors="replace"),
            self._stderr.read_text(errors="replace"),
        )

    def wait(self, timeout_s: float = 60) -> Outcome:
        """Wait until the starter has ended; a job that takes longer fails."""
        self._wait_until(lambda: self.starter.poll() is not None, timeout_s, "end")
        return self.so_far()

    def wait_for_output(self, text: str, timeout_s: float = 60) -> None:
        """Wait until the job has printed `text`; a job that ends first fails."""

        def printed() -> bool:
            seen = self.so_far()
            assert seen.code == -1 or text in seen.stdout, f"no {text!r} in {seen}"
            return text in seen.stdout

        self._wait_until(printed, timeout_s, repr(text))

    def processes(self) -> dict[int, str]:
        """The living processes of this job: process id to command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace").strip()
            except OSError:  # it has ended meanwhile, or is a zombie
                continue
        return found

    def kill(self) -> None:
        """End every process of the job, whatever state the job is in."""
        while running := self.processes():
            for pid in running:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
        self.starter.wait()

    def assert_gone(self) -> None:
        """Fails, after ending them, if processes or shared memory outlive the job."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()
        assert not left, f"left behind by {self.starter.args!r}: {left}"

    def _wait_until(
        self, condition: Callable[[], bool], timeout_s: float, what: str
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self.kill()
                seen = self.so_far()
                raise AssertionError(f"no {what} within {timeout_s} s: {seen}")
            time.sleep(0.02)

    def _leftovers(self) -> list[str]:
        processes = [f"process {pid}: {cmd}" for pid, cmd in self.processes().items()]
        new = set(os.listdir(SHARED_MEMORY)) - self._shared_memory_before
        if self._bare:
            new -= _remove_segments_of_open_mpi(new)
        # Another job on this machine may have made it: then a living process holds it.
        return processes + [str(SHARED_MEMORY / name) for name in new - _held_names()]


class Jobs:
    """Starts the jobs of one test; the fixture of this name ends them after it."""

    def __init__(self, directory: Path) -> None:
        """Start nothing yet; output will be kept in `directory`."""
        self._directory = directory
        self._started: list[Job] = []

    def start(
        self,
        processes: int,
        command: Sequence[str],
        *,
        starter: Starter = "hvrun",
        env: Mapping[str, str] | None = None,
    ) -> Job:
        """Start `command` on so many processes and return at once.

        Args:
            processes: The number of ranks.
            command: The program and its arguments; `python` is this interpreter.
            starter: `hvrun`, or the bare `mpirun` of this environment.
            env: Variables to add to the environment.
        """
        return self.start_bare([starter, "-np", str(processes), *command], env=env)

    def start_bare(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> Job:
        """Start a command line of any form: no starter, or one with more options."""
        ours = {"python", "hvrun", "mpirun"}
        resolved = [str(BIN / word) if word in ours else word for word in command]
        added = BARE_MPIRUN if command[0] == "mpirun" else {}
        job = Job(resolved, {**added, **(env or {})}, self._directory)
        self._started.append(job)
        return job

    def run(
        self,
        processes: int,
        command: Sequence[str],
        *,
        starter: Starter = "hvrun",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> Outcome:
        """Start a job, wait for it, and return how it ended."""
        job = self.start(processes, command, starter=starter, env=env)
        return job.wait(timeout_s)

    def assert_gone(self) -> None:
        """Fail if anything is left of any job; a job still running is something."""
        for job in self._started:
            job.assert_gone()


def _remove_segments_of_open_mpi(names: set[str]) -> set[str]:
    """Remove what a bare mpirun leaves of ranks that were killed; return the names.

    They are Open MPI's own files; under hvrun they may not be left.
    """
    segments = {name for name in names if name.startswith("sm_segment.")}
    for name in segments - _held_names():
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    return segments


def _held_names() -> set[str]:
    """Names in /dev/shm that a living process has mapped or open."""
    paths: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text(errors="replace").splitlines()
            paths += [line.rpartition(" ")[2] for line in maps]
            paths += [os.readlink(fd) for fd in (process / "fd").iterdir()]
        except OSError:  # it has ended meanwhile
            continue
    return {Path(p).name for p in paths if p.startswith(f"{SHARED_MEMORY}/")}
