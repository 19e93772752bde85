"""Memory that several ranks see, made in every way, and refused in every way."""

import gc
import os
import resource
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvlite.collectives import segments
from hvlite.collectives.channel import Channel
from hvlite.collectives.segments import Method, Segment
from hvlite.errors import SharedMemoryError
from hvlite.transport.memory import make_world
from tests.contract import lockstep

SHARED = pytest.mark.parametrize("method", segments.SHARED_METHODS)


def create(
    size: int, rank_bytes: int, methods: tuple[Method, ...] = segments.SHARED_METHODS
) -> list[Segment]:
    channels = lockstep.channels(make_world(size), tag=1)
    made = [segments.create(channel, rank_bytes, methods) for channel in channels]
    return lockstep.run(made)


@SHARED
@pytest.mark.parametrize("rank_bytes", [0, 1, 4096, 1_000_003])
def test_each_rank_sees_all_regions(method: Method, rank_bytes: int) -> None:
    made = create(3, rank_bytes, (method,))
    for segment in made:
        assert segment.method is method
        assert segment.rank_bytes == rank_bytes
        assert len(segment.regions) == 3
        for region in segment.regions:
            assert region.dtype == np.uint8
            assert region.ctypes.data % 4096 == 0
            assert not region.any()  # zero at first
    for rank, segment in enumerate(made):
        segment.regions[rank][:] = rank + 1
    for segment in made:
        for rank, region in enumerate(segment.regions):
            assert (region == rank + 1).all()


def test_a_rank_alone_needs_no_shared_memory() -> None:
    (segment,) = create(1, 5000, methods=())
    assert segment.method is Method.PRIVATE
    assert segment.regions[0].ctypes.data % 4096 == 0
    assert segment.regions[0].tolist() == [0] * 5000


def test_memfd_comes_first() -> None:
    assert create(2, 10)[1].method is Method.MEMFD


@SHARED
def test_nothing_is_left(method: Method) -> None:
    before = leftovers()
    made = create(2, 100_000, (method,))
    assert named_files() == before[1]  # no name, even while in use
    regions = [segment.regions for segment in made]
    del made
    regions[0][1][:] = 7  # the memory lives as long as the arrays
    assert (regions[1][1] == 7).all()
    del regions
    gc.collect()
    assert leftovers() == before


def named_files() -> list[str]:
    """Ours; MPI has files there too, of jobs that come and go."""
    return [name for name in os.listdir("/dev/shm") if name.startswith("hvlite-")]


def leftovers() -> tuple[int, list[str]]:
    return len(os.listdir("/proc/self/fd")), named_files()


def refusals(size: int, rank_bytes: int) -> list[str]:
    """Returns what each rank is told."""

    def refusal(channel: Channel) -> Generator[Any, None, str]:
        with pytest.raises(SharedMemoryError) as caught:
            yield from segments.create(channel, rank_bytes)
        return str(caught.value)

    channels = lockstep.channels(make_world(size), tag=1)
    return lockstep.run([refusal(channel) for channel in channels])


def test_when_everything_is_refused_each_rank_hears_why() -> None:
    before = leftovers()
    first, second = refusals(2, 1 << 45)
    assert first == second
    assert first.startswith(
        f"the 2 ranks of this node cannot share {1 << 45} bytes each "
        "(memfd: making it: Cannot allocate memory (local rank 0); "
        "file: making it: Cannot allocate memory (local rank 0)): "
    )
    assert leftovers() == before


def test_too_few_descriptors_are_a_refusal_and_not_a_crash() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        told = refusals(2, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "memfd: making it: Too many open files (local rank 0)" in told[1]


CREATE_TWO = """
from hvlite.transport.memory import make_world
from hvlite.collectives import segments
from tests.contract import lockstep
channels = lockstep.channels(make_world(2), tag=1)
made = lockstep.run([segments.create(c, 1 << 20) for c in channels])
made[0].regions[1][:] = 3
assert (made[1].regions[1] == 3).all()
print(made[1].method.value)
"""


def in_private_mounts(*mounts: str) -> subprocess.CompletedProcess[str]:
    """Makes a segment where these tmpfs mounts hide what was there."""
    script = " && ".join([*mounts, f'exec "{sys.executable}" -c "$1"'])
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", CREATE_TWO],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0
    or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0,
    reason="only root can hide /proc and /dev/shm from a process",
)


@needs_mounts
def test_a_hidden_proc_leaves_the_file_in_dev_shm() -> None:
    job = in_private_mounts("mount -t tmpfs none /proc")
    assert (job.stdout, job.returncode) == ("file\n", 0), job.stderr


@needs_mounts
def test_a_small_dev_shm_does_not_matter_to_memfd() -> None:
    job = in_private_mounts("mount -t tmpfs -o size=64k none /dev/shm")
    assert (job.stdout, job.returncode) == ("memfd\n", 0), job.stderr


@needs_mounts
def test_without_either_the_reasons_and_the_remedy_are_told() -> None:
    job = in_private_mounts(
        "mount -t tmpfs -o size=64k none /dev/shm", "mount -t tmpfs none /proc"
    )
    assert job.returncode == 1
    *_, last = job.stderr.splitlines()
    assert last == (
        "hvlite.errors.SharedMemoryError: the 2 ranks of this node cannot share "
        "1048576 bytes each (memfd: opening it: No such file or directory (local rank "
        "0); file: reserving 1048576 bytes: No space left on device (local rank 0)): "
        "give the job more memory or a larger /dev/shm (Docker: --shm-size; "
        "Kubernetes: an emptyDir of medium Memory mounted there), or set "
        "HVLITE_ALLREDUCE=ring"
    )
