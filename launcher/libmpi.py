"""Which MPI library mpi4py will load, found by looking at files.

hvrun itself never loads MPI: that costs a second and makes the launcher an MPI
process. The search below follows the order that mpi4py documents for its wheels
(MPI4PY_LIBMPI, the virtual environment, the user's base, the interpreter's base,
then the system's loader); an mpi4py that was compiled against one MPI names its
library inside its extension module. The answer only chooses an mpirun. The check
that counts is made by the ranks: the size of the world against
HVLITE_LAUNCHED_SIZE.
"""

import enum
import glob
import importlib.util
import mmap
import os
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


class Family(enum.Enum):
    """Libraries of one family accept one another's mpirun; others do not."""

    OPENMPI = "Open MPI"
    MPICH = "MPICH"


@dataclass(frozen=True)
class Library:
    """An MPI library: its family, and its path where the search saw one."""

    family: Family
    path: str | None


# The order in which mpi4py tries them in each folder; the plain name is a linker
# script in the wheels and is skipped there.
LIBRARY_NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")

SONAME_FAMILY = {
    "libmpi.so.40": Family.OPENMPI,
    "libmpi.so.12": Family.MPICH,
    "libmpich.so.12": Family.MPICH,
}


def find_library(environ: Mapping[str, str]) -> Library | None:
    """The library that ``import mpi4py.MPI`` would load, or None if unknown."""
    built = _compiled_extension()
    if built is not None:
        return _family_inside(built)
    for path in _candidates(environ):
        family = family_of_file(path)
        if family is not None:
            return Library(family, path)
    return None


def family_of_file(path: str) -> Family | None:
    """Judge a shared library by the soname that its file name carries."""
    real = os.path.realpath(path)
    for name in (os.path.basename(path), os.path.basename(real)):
        for soname, family in SONAME_FAMILY.items():
            if name == soname or name.startswith(soname + "."):
                return family if os.path.isfile(real) else None
    return None


def _compiled_extension() -> str | None:
    """The extension module of an mpi4py built against one MPI; None for wheels."""
    spec = importlib.util.find_spec("mpi4py")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if glob.glob(os.path.join(glob.escape(folder), "MPI.*mpi*.so")):
            return None
        for path in glob.glob(os.path.join(glob.escape(folder), "MPI.*.so")):
            return path
    return None


def _family_inside(extension: str) -> Library | None:
    with (
        open(extension, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for soname, family in SONAME_FAMILY.items():
            if content.find(soname.encode() + b"\0") >= 0:
                return Library(family, None)
    return None


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    chosen = environ.get("MPI4PY_LIBMPI")
    if chosen:
        for entry in chosen.split(os.pathsep):
            yield from _inside(entry) if os.path.isdir(entry) else (entry,)
        return
    prefixes = []
    if sys.exec_prefix != sys.base_exec_prefix:
        prefixes.append(sys.exec_prefix)
    if site.ENABLE_USER_SITE:
        prefixes.append(site.getuserbase())
    prefixes.append(sys.base_exec_prefix)
    for prefix in prefixes:
        if prefix != "/usr":
            yield from _inside(os.path.join(prefix, "lib"))
    yield from _known_to_loader(environ)


def _inside(folder: str) -> Iterator[str]:
    return (os.path.join(folder, name) for name in LIBRARY_NAMES)


def _known_to_loader(environ: Mapping[str, str]) -> Iterator[str]:
    folders = [f for f in environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    cache = _loader_cache()
    for name in LIBRARY_NAMES:
        yield from (os.path.join(folder, name) for folder in folders)
        if name in cache:
            yield cache[name]


def _loader_cache() -> dict[str, str]:
    """What ldconfig knows: soname to path; empty where it cannot be asked."""
    try:
        listing = subprocess.run(
            ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False
        ).stdout
    except OSError:
        return {}
    cache: dict[str, str] = {}
    for line in listing.splitlines():
        name, arrow, path = line.partition(" => ")
        if arrow:
            cache.setdefault(name.split()[0], path.strip())
    return cache
