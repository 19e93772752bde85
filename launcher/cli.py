"""The command line: arguments to one LaunchSpec, errors to one line, exit codes."""

import argparse
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from . import environment, hosts, stdin, wire
from .errors import LaunchError
from .spec import LaunchSpec

USAGE_ERROR = 2

DESCRIPTION = """\
Run a command once in each of N ranks of one MPI job, on this machine or on several.
The job ends with the command's exit code. If a rank fails, the whole job ends within
seconds, and the last lines printed say which rank failed first and why.
"""

EXAMPLES = """\
examples:
  hvrun -np 2 python train.py --epochs 3
      two ranks on this machine; output lines are marked [0] and [1]
  hvrun -np 8 -H node1:4,node2:4 python train.py
      four ranks on each of two machines, reached by ssh
  hvrun --check
      say what is installed here and whether it fits together

Standard input, if it is a file or a pipe, goes to rank 0.

environment:
  OMP_NUM_THREADS   threads in each rank; unless set, cores / ranks
  HVLITE_MPIRUN     full path of the mpirun to use, instead of the one found
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}; `hvrun --help` shows three examples")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvrun; returns its exit code."""
    try:
        options = _parser().parse_args(arguments)
        if options.version:
            return _print_version()
        if options.check:
            from .doctor import check

            return check()
        return _launch(_to_spec(options))
    except LaunchError as error:
        print(f"hvrun: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:  # before the job had begun to watch for it
        print("hvrun: ended by SIGINT; nothing was started", file=sys.stderr)
        return 128 + signal.SIGINT


def parse(arguments: Sequence[str]) -> LaunchSpec:
    """Turn a command line into what is to be run.

    Raises:
        LaunchError: for a bad option, a malformed host, too few slots, or a
            command that does not exist.
    """
    return _to_spec(_parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hvrun",
        usage="hvrun -np N [-H HOST:SLOTS,...] [options] command ...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--np", dest="size", metavar="N", help="number of ranks")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="where to run them")
    add("--verbose", action="store_true", help="show all that mpirun and ranks say")
    add("--dry-run", action="store_true", help="print what would be run")
    add("--check", action="store_true", help="check the installation")
    add("--version", action="store_true", help="print hvlite's version")
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def _to_spec(options: argparse.Namespace) -> LaunchSpec:
    command = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if options.size is None:
        raise LaunchError(
            "the number of ranks is missing; give it with -np,"
            " e.g. hvrun -np 2 python train.py"
        )
    if not (options.size.isascii() and options.size.isdecimal()) or not int(
        options.size
    ):
        raise LaunchError(
            f"-np {options.size}: not a number of ranks; give a whole number from 1"
        )
    if not command:
        raise LaunchError(
            "the command is missing; give it last, e.g. hvrun -np 2 python train.py"
        )
    listed = hosts.parse_hosts(options.hosts) if options.hosts is not None else ()
    spec = LaunchSpec(
        size=int(options.size),
        command=tuple(command),
        hosts=listed,
        verbose=options.verbose,
        dry_run=options.dry_run,
    )
    if listed:
        hosts.ranks_per_host(spec.size, listed)
    if shutil.which(command[0]) is None:
        raise LaunchError(_not_found(command[0]))
    return spec


def _not_found(name: str) -> str:
    if os.access(name, os.X_OK) and os.path.isfile(name):
        return f"'{name}' is not on PATH; for the file here: hvrun ... ./{name}"
    if os.path.isfile(name):
        return f"'{name}' is not executable; for a script: hvrun ... python {name}"
    if name.startswith("-"):
        return f"unknown option {name}; `hvrun --help` lists the options"
    return f"command '{name}' not found; check its spelling and PATH"


def _print_version() -> int:
    from importlib import metadata

    print(f"hvrun (hvlite) {metadata.version('hvlite')}")
    return 0


def _launch(spec: LaunchSpec) -> int:
    from .job import Job

    own_name = socket.gethostname()
    per_host = hosts.ranks_per_host(spec.size, spec.hosts) if spec.hosts else {}
    away = [name for name in per_host if not hosts.is_local(name, own_name)]
    arguments, job_environ = _plan(spec, per_host, remote=bool(away))
    if spec.dry_run:
        changed = {k: v for k, v in job_environ.items() if os.environ.get(k) != v}
        print(shlex.join([f"{k}={v}" for k, v in sorted(changed.items())] + arguments))
        return 0
    job = Job(spec.size, away[0] if away else None, verbose=spec.verbose)
    rank_0_is_here = next(iter(per_host), None) not in away
    job_environ[wire.ADDRESS] = job.channel.address
    job_environ[wire.TOKEN] = job.channel.token
    job_environ[wire.STDIN] = stdin.offer() if rank_0_is_here else stdin.NOTHING
    if spec.verbose:
        print("hvrun:", shlex.join(arguments), file=sys.stderr)
    return job.run(arguments, job_environ)


def _plan(
    spec: LaunchSpec, per_host: Mapping[str, int], *, remote: bool
) -> tuple[list[str], dict[str, str]]:
    """The arguments, mpirun first, and the environment of the whole job."""
    from . import libmpi, mpirun

    environ = os.environ
    found = mpirun.find_mpirun(libmpi.find_library(environ), sys.prefix, environ)
    job_environ = environment.job_environment(
        environ,
        found.dialect,
        spec.size,
        max(per_host.values(), default=spec.size),
        one_host=not remote,
    )
    placement = mpirun.Placement(
        size=spec.size,
        hosts=per_host,
        remote=remote,
        as_root=os.geteuid() == 0,
        forwarded=environment.forwarded_names(
            [*job_environ, wire.ADDRESS, wire.TOKEN, wire.STDIN]
        ),
    )
    program = [*supervisor_command(), *spec.command]
    return mpirun.build_arguments(found, placement, program), job_environ


def supervisor_command() -> list[str]:
    """How mpirun starts a supervisor, in front of the user's command.

    Imported as a top-level package from a folder at the end of sys.path, and
    without site packages, so that it starts in 20 ms whatever is installed and
    nothing of the user's can shadow the standard library.
    """
    folder, package = os.path.split(os.path.dirname(os.path.abspath(__file__)))
    start = (
        "import sys; sys.path.append(sys.argv.pop(1));"
        f" from {package}.rank import main; main()"
    )
    return [sys.executable, "-P", "-S", "-E", "-c", start, folder]
