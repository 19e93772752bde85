"""Shared memory of ranks that did not end together: files that MPI could not remove.

MPICH and Open MPI remove their files in /dev/shm in MPI_Finalize, which a killed
rank never reaches. Those files have the vendors' names; one is removed only if it
is this user's, was made while the job ran, and no living process has it open.
"""

import contextlib
import glob
import os
import re
from collections.abc import Iterator

FOLDER = "/dev/shm"

MPI_NAMES = re.compile(r"(mpich_shm_|mpich-ofi|sm_segment\.|vader_segment\.).+")


def remove_stale(since: float, folder: str = FOLDER) -> list[str]:
    """Remove what no process holds any more; returns the paths removed.

    Args:
        since: start of the job, in seconds since the epoch.
        folder: where to look.
    """
    ours = list(_candidates(since, folder))
    if not ours:
        return []
    held = set(_held(folder))
    removed = [path for path in ours if path not in held]
    for path in removed:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return removed


def _candidates(since: float, folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not MPI_NAMES.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                made = entry.stat(follow_symlinks=False)
                if made.st_uid == os.geteuid() and made.st_ctime >= since - 1:
                    yield entry.path


def _held(folder: str) -> Iterator[str]:
    """Files in the folder that some process has mapped or open."""
    for process in glob.iglob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):
            with open(f"{process}/maps", errors="replace") as maps:
                for line in maps:
                    if folder in line:
                        yield folder + line.rstrip("\n").split(folder, 1)[1]
            for fd in os.listdir(f"{process}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(f"{process}/fd/{fd}")
