"""From what the user types to mpirun's argument list; no process is started."""

import signal
from pathlib import Path

import pytest
from hvlite.launcher import channel, cli, hosts, libmpi, mpirun
from hvlite.launcher.environment import forwarded_names, job_environment
from hvlite.launcher.errors import LaunchError
from hvlite.launcher.hosts import Host
from hvlite.launcher.libmpi import Family, Library
from hvlite.launcher.mpirun import Dialect, Mpirun, Placement
from hypothesis import given
from hypothesis import strategies as st

# ---- hosts ----


def test_hosts_are_read_in_order() -> None:
    assert hosts.parse_hosts("h1:4, h2,h3.site:16") == (
        Host("h1", 4),
        Host("h2", 1),
        Host("h3.site", 16),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is not a host"),
        ("h1:4,,h2:4", "'' is not a host"),
        (":4", "':4' is not a host"),
        ("a b:2", "'a b:2' is not a host"),
        ("-x:2", "'-x:2' is not a host"),
        ("a:b:2", "'a:b:2' is not a host"),
        ("h1:", "'' in 'h1:' is not a number of slots"),
        ("h1:0", "'0' in 'h1:0' is not a number of slots"),
        ("h1:-1", "'-1' in 'h1:-1' is not a number of slots"),
        ("h1:\u0664", "is not a number of slots"),  # a digit, but not of ours
        ("h1:2,h1:2", "host 'h1' is given twice"),
    ],
)
def test_malformed_hosts_are_named(text: str, words: str) -> None:
    with pytest.raises(LaunchError) as error:
        hosts.parse_hosts(text)
    assert words in str(error.value)
    assert text in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_hosts_or_a_launch_error(text: str) -> None:
    try:
        parsed = hosts.parse_hosts(text)
    except LaunchError:
        return
    again = ",".join(f"{host.name}:{host.slots}" for host in parsed)
    assert hosts.parse_hosts(again) == parsed


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_ranks_fill_hosts_in_order(slots: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(slots)))
    machines = tuple(Host(f"h{i}", n) for i, n in enumerate(slots))
    filled = hosts.ranks_per_host(size, machines)
    assert sum(filled.values()) == size
    assert list(filled) == [h.name for h in machines[: len(filled)]]
    assert all(filled[h.name] == h.slots for h in machines[: len(filled) - 1])


def test_too_few_slots_says_how_many_there_are() -> None:
    with pytest.raises(LaunchError, match=r"-np 5 needs 5 slots but -H a:2,b:1 has 3"):
        hosts.ranks_per_host(5, (Host("a", 2), Host("b", 1)))


def test_own_names_are_local() -> None:
    assert hosts.is_local("localhost", "box")
    assert hosts.is_local("box.example.org", "box")
    assert not hosts.is_local("box2", "box")


# ---- the command line ----


def test_options_end_where_the_command_begins() -> None:
    line = ["-np", "2", "--verbose", "env", "-np", "3", "--dry-run"]
    spec = cli.parse(line)
    assert (spec.size, spec.verbose, spec.dry_run) == (2, True, False)
    assert spec.command == ("env", "-np", "3", "--dry-run")
    assert cli.parse([*line[:3], "--", *line[3:]]) == spec


def test_hosts_reach_the_spec() -> None:
    spec = cli.parse(["-np", "3", "-H", "a:2,b:2", "env"])
    assert spec.hosts == (Host("a", 2), Host("b", 2))


@pytest.mark.parametrize(
    "text", ["0", "-1", "two", "1.5", "", "\u0662"], ids=lambda text: ascii(text)
)
def test_a_number_of_ranks_is_a_whole_number(text: str) -> None:
    with pytest.raises(LaunchError, match="-np"):
        cli.parse([f"-np={text}", "env"])


def test_help_shows_three_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert shown.count("\n  hvrun ") == 3
    assert "HVLITE_MPIRUN     full path of the mpirun" in shown


def test_an_interrupt_before_the_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_launch", lambda _: signal.raise_signal(signal.SIGINT))
    assert cli.main(["-np", "1", "env"]) == 130
    assert capsys.readouterr().err == "hvrun: ended by SIGINT; nothing was started\n"


# ---- which mpirun ----

VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to": (Dialect.OPENMPI5, "5.0.11"),
    "mpirun (Open MPI) 4.1.6\n": (Dialect.OPENMPI4, "4.1.6"),
    "mpirun.openmpi (OpenRTE) 4.1.4\n": (Dialect.OPENMPI4, "4.1.4"),
    "HYDRA build details:\n    Version:     4.0.2\n": (Dialect.MPICH, "4.0.2"),
}


@pytest.mark.parametrize("text", VERSIONS)
def test_dialect_from_version(text: str) -> None:
    assert mpirun.identify(text) == VERSIONS[text]


def test_other_programs_are_no_mpirun() -> None:
    assert mpirun.identify("slurm 22.05.8") is None


def fake(folder: Path, name: str, version: str) -> str:
    """A program that answers --version as an mpirun does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '{version}'\n")
    path.chmod(0o755)
    return str(path)


OPENMPI = "mpirun (Open MPI) 5.0.11\\n"
MPICH = "HYDRA build details:\\n    Version:  5.0.2\\n"


def test_the_mpirun_of_the_library_is_chosen(tmp_path: Path) -> None:
    fake(tmp_path / "prefix/bin", "mpirun", OPENMPI)
    right = fake(tmp_path / "site/bin", "mpirun.mpich", MPICH)
    fake(tmp_path / "site/bin", "mpirun", OPENMPI)
    environ = {"PATH": f"{tmp_path}/site/bin:/usr/bin"}
    library = Library(Family.MPICH, str(tmp_path / "lib/libmpi.so.12"))
    found = mpirun.find_mpirun(library, str(tmp_path / "prefix"), environ)
    assert found == Mpirun(right, Dialect.MPICH, "5.0.2")


def test_the_mpirun_beside_the_library_comes_first(tmp_path: Path) -> None:
    right = fake(tmp_path / "mpi/bin", "mpirun", MPICH)
    fake(tmp_path / "prefix/bin", "mpirun", MPICH)
    library = Library(Family.MPICH, str(tmp_path / "mpi/lib/libmpi.so.12"))
    found = mpirun.find_mpirun(library, str(tmp_path / "prefix"), {"PATH": ""})
    assert found.path == right


def test_only_a_wrong_mpirun_is_an_error_with_both_paths(tmp_path: Path) -> None:
    wrong = fake(tmp_path / "bin", "mpirun", OPENMPI)
    library = Library(Family.MPICH, "/opt/mpich/lib/libmpi.so.12")
    with pytest.raises(LaunchError) as error:
        mpirun.find_mpirun(library, str(tmp_path), {"PATH": ""})
    for words in wrong, "/opt/mpich/lib/libmpi.so.12", 'pip install "hvlite[mpich]"':
        assert words in str(error.value)


def test_no_mpirun_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no mpirun .* pip install \"hvlite\[open"):
        mpirun.find_mpirun(None, str(tmp_path), {"PATH": str(tmp_path)})


def test_the_user_may_name_the_mpirun(tmp_path: Path) -> None:
    chosen = fake(tmp_path, "my-mpirun", OPENMPI)
    library = Library(Family.MPICH, None)
    environ = {"PATH": "", "HVLITE_MPIRUN": chosen}
    assert mpirun.find_mpirun(library, "/nowhere", environ).path == chosen


# ---- which library ----


def test_family_is_told_by_the_soname(tmp_path: Path) -> None:
    (tmp_path / "libmpi.so.40.30.4").touch()
    (tmp_path / "libmpi.so.40").symlink_to("libmpi.so.40.30.4")
    (tmp_path / "libmpi.so").symlink_to("libmpi.so.40")
    (tmp_path / "libmpich.so.12").touch()
    assert libmpi.family_of_file(str(tmp_path / "libmpi.so")) is Family.OPENMPI
    assert libmpi.family_of_file(str(tmp_path / "libmpi.so.40")) is Family.OPENMPI
    assert libmpi.family_of_file(str(tmp_path / "libmpich.so.12")) is Family.MPICH
    assert libmpi.family_of_file(str(tmp_path / "libmpi.so.12")) is None


def test_a_linker_script_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "libmpi.so").write_text("INPUT(libmpi.so.40)")
    assert libmpi.family_of_file(str(tmp_path / "libmpi.so")) is None


# ---- argument lists ----

LOCAL = Placement(4, {}, remote=False, as_root=True)
REMOTE = Placement(
    4, {"h1": 2, "h2": 2}, remote=True, as_root=False, forwarded=("A", "B")
)
OPENMPI_PLACED = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]

ARGUMENTS = {
    "openmpi5 local": (
        (Dialect.OPENMPI5, LOCAL),
        ["-n", "4", "--allow-run-as-root", *OPENMPI_PLACED],
    ),
    "openmpi4 local": (
        (Dialect.OPENMPI4, LOCAL),
        ["-n", "4", "--allow-run-as-root", *OPENMPI_PLACED],
    ),
    "openmpi5 remote": (
        (Dialect.OPENMPI5, REMOTE),
        ["-n", "4", "--host", "h1:2,h2:2", *OPENMPI_PLACED, "-x", "A", "-x", "B"],
    ),
    "openmpi4 remote": (
        (Dialect.OPENMPI4, REMOTE),
        [
            "-n",
            "4",
            "--host",
            "h1:2,h2:2",
            *OPENMPI_PLACED,
            "--enable-orterun-prefix-by-default",
            "-x",
            "A",
            "-x",
            "B",
        ],
    ),
    "mpich local": ((Dialect.MPICH, LOCAL), ["-n", "4", "-genvall"]),
    "mpich remote": (
        (Dialect.MPICH, REMOTE),
        ["-n", "4", "-hosts", "h1:2,h2:2", "-genvall"],
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_argument_lists(case: str) -> None:
    (dialect, placement), expected = ARGUMENTS[case]
    built = mpirun.build_arguments(
        Mpirun("/x/mpirun", dialect, "1"), placement, ["run", "a b;c"]
    )
    assert built == ["/x/mpirun", *expected, "run", "a b;c"]


# ---- environment ----


def test_defaults_never_overrule_the_user() -> None:
    mine = {"OMP_NUM_THREADS": "3", "OMPI_MCA_pml": "ucx", "HVLITE_LAUNCHED_SIZE": "9"}
    given = job_environment(mine, Dialect.OPENMPI5, 2, 2, one_host=True)
    assert given["OMP_NUM_THREADS"] == "3"
    assert given["OMPI_MCA_pml"] == "ucx"
    assert given["OMPI_MCA_btl"] == "self,sm,tcp"
    assert given["HVLITE_LAUNCHED_SIZE"] == "2"


def test_fast_networks_are_looked_for_across_hosts() -> None:
    given = job_environment({}, Dialect.OPENMPI5, 2, 1, one_host=False)
    assert not [name for name in given if name.startswith("OMPI_")]


def test_shared_memory_has_another_name_in_open_mpi_4() -> None:
    given = job_environment({}, Dialect.OPENMPI4, 2, 2, one_host=True)
    assert given["OMPI_MCA_btl"] == "self,vader,tcp"


def test_more_ranks_than_cores_get_one_thread() -> None:
    given = job_environment({}, Dialect.MPICH, 10_000, 10_000, one_host=True)
    assert given["OMP_NUM_THREADS"] == "1"


def test_what_describes_one_host_stays_there() -> None:
    names = ["PATH", "MINE", "HOSTNAME", "SSH_TTY", "PWD", "BASH_FUNC_f%%", "TMPDIR"]
    names += ["OMPI_COMM_WORLD_RANK", "OMPI_MCA_btl", "HVLITE_LAUNCH_TOKEN"]
    assert forwarded_names(names) == [
        "HVLITE_LAUNCH_TOKEN",
        "MINE",
        "OMPI_MCA_btl",
        "PATH",
    ]


def test_a_host_that_nobody_knows_is_named() -> None:
    with pytest.raises(
        LaunchError, match=r"^host 'no\.such\.host\.invalid' is not known"
    ):
        channel._listen("no.such.host.invalid")
