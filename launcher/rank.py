"""The supervisor: the process that mpirun starts for each rank.

It runs the user's command as its child, which inherits the MPI environment and so
is the MPI process; sends all that the child prints to hvrun; reports how the child
ended; and sees to it that nothing of the rank outlives the job.

mpirun watches the supervisor, not the child, and the supervisor stays until hvrun
says that all ranks are done. So mpirun, which would kill the other ranks within a
quarter of a second of the first death, stays out of it: hvrun alone decides how long
they may take, and a rank that ends early, even without MPI_Finalize, disturbs nobody.

Who ends whom: hvrun's death closes the connection, and the supervisor kills the
child and all its descendants; mpirun's death sends the supervisor a death signal,
to the same effect; the supervisor's death sends the child SIGKILL, and the child's
descendants become children of hvrun, which kills them.

Single-threaded. Started as ``python -S -E``, so imports are few and light.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from . import leftovers, processes, stdin, wire
from .child import become

# A signal that nobody else sends. The kernel means the parent *thread*: mpirun may
# end a thread that started ranks, so the receiver checks that its parent is new.
PARENT_DIED = signal.SIGURG

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)

# How long helpers of a child that has ended may take to end by themselves:
# multiprocessing's resource tracker needs it to remove shared memory.
HELPERS_S = 0.5

READ_BYTES = 1 << 16
# Reading from the child pauses while this much waits to be sent to hvrun, so a
# child that prints faster than the screen is slowed down and memory stays bounded.
BACKLOG_BYTES = 1 << 18


def main() -> NoReturn:
    """Run ``sys.argv[1:]`` as this rank's program."""
    rank = _own_rank(os.environ)
    token = os.environ.pop(wire.TOKEN, None)
    host, _, port = os.environ.pop(wire.ADDRESS, "").rpartition(":")
    offered = os.environ.pop(wire.STDIN, stdin.NOTHING)
    if token is None or not port:
        sys.exit(
            f"hvrun: mpirun did not hand {wire.TOKEN} to rank {rank} on"
            f" {socket.gethostname()}; its environment has to reach every host"
        )
    try:
        connection = socket.create_connection((host, int(port)), timeout=20)
    except OSError as error:
        sys.exit(
            f"hvrun: rank {rank} on {socket.gethostname()} cannot reach hvrun at"
            f" {host}:{port} ({error}); open the firewall between the hosts"
        )
    connection.setblocking(False)
    stdin.take(offered if rank == "0" else stdin.NOTHING)
    supervisor = Supervisor(connection, sys.argv[1:])
    hello = f"{token} {rank} {supervisor.child} {socket.gethostname()}"
    supervisor.send(wire.HELLO, hello.encode())
    os._exit(supervisor.run())


def _own_rank(environ: "os._Environ[str]") -> str:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        if name in environ:
            return environ[name]
    sys.exit("hvrun: mpirun gave this process no rank; `hvrun --check` tells why")


class Supervisor:
    """One child, its two output pipes, and the connection to hvrun.

    Attributes:
        child: process id of the user's command.
    """

    def __init__(self, connection: socket.socket, command: list[str]) -> None:
        self._connection = connection
        self._connected = True
        self._reader = wire.FrameReader()
        self._outgoing = bytearray()
        self._parent = os.getppid()
        self._since = time.time()
        self._code: int | None = None
        self._helpers_until = 0.0
        self._reported_done = False
        self._dismissed = False
        processes.become_subreaper()
        self._signals = self._catch_signals()
        processes.die_with_parent(PARENT_DIED, self._parent)
        self._pipes: dict[int, int] = {}
        self.child = self._start(command)

    def _catch_signals(self) -> int:
        """Turn signals into bytes on a pipe; returns its reading end."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (*FORWARDED, signal.SIGCHLD, PARENT_DIED):
            signal.signal(number, lambda *_: None)
        return reading

    def _start(self, command: list[str]) -> int:
        out_reading, out_writing = os.pipe()
        err_reading, err_writing = os.pipe()
        supervisor = os.getpid()
        child = os.fork()
        if child == 0:
            os.dup2(out_writing, 1)
            os.dup2(err_writing, 2)
            handled = (*FORWARDED, signal.SIGCHLD, PARENT_DIED)
            become(command, supervisor, handled)
        os.close(out_writing)
        os.close(err_writing)
        self._pipes = {out_reading: wire.STDOUT, err_reading: wire.STDERR}
        return child

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Queue a frame for hvrun."""
        self._outgoing += wire.pack(kind, payload)

    def run(self) -> int:
        """Serve until hvrun says BYE or is gone; returns the exit code."""
        while not (self._dismissed and not self._outgoing):
            self._wait()
            if self._code is None:
                self._collect()
            elif not self._reported_done:
                self._finish_output()
            if not self._connected:
                self._kill()
                leftovers.remove_stale(self._since)
                return 1
        code = self._code or 0
        return 128 - code if code < 0 else code

    def _wait(self) -> None:
        """Sleep until something happens, and handle it."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        sending = select.POLLOUT if self._outgoing else 0
        poll.register(self._connection.fileno(), select.POLLIN | sending)
        if len(self._outgoing) < BACKLOG_BYTES:
            for pipe in self._pipes:
                poll.register(pipe, select.POLLIN)
        finishing = self._code is not None and not self._reported_done
        for fd, event in poll.poll(20 if finishing else None):
            if fd == self._signals:
                self._on_signals()
            elif fd in self._pipes:
                self._read(fd)
            else:
                self._on_connection(event)

    def _on_signals(self) -> None:
        for number in os.read(self._signals, 256):
            if number == PARENT_DIED:
                if os.getppid() != self._parent:
                    self._connected = False
            elif number != signal.SIGCHLD:
                self._signal_child(number)

    def _signal_child(self, number: int) -> None:
        """Pass a signal on, as long as the child's pid is certainly its own."""
        if self._code is not None:
            return
        # A terminal sends Ctrl-C to the whole group; all else is for the program.
        group = number in (signal.SIGINT, signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-self.child if group else self.child, number)

    def _on_connection(self, event: int) -> None:
        try:
            if event & select.POLLOUT:
                sent = self._connection.send(self._outgoing)
                del self._outgoing[:sent]
            if event & ~select.POLLOUT:
                data = self._connection.recv(READ_BYTES)
                self._connected = bool(data)
                for kind, payload in self._reader.feed(data):
                    self._obey(kind, payload)
        except BlockingIOError:
            pass
        except OSError:
            self._connected = False

    def _obey(self, kind: int, payload: bytes) -> None:
        if kind == wire.SIGNAL:
            self._signal_child(int(payload))
        elif kind == wire.KILL:
            self._kill()
        elif kind == wire.BYE:
            self._dismissed = True

    def _kill(self) -> None:
        statuses: dict[int, int] = {}
        self._signal_child(signal.SIGKILL)
        processes.end_children(statuses)
        self._note_end(statuses)

    def _read(self, pipe: int) -> bool:
        """Pass on what a pipe holds; returns False at its end."""
        data = os.read(pipe, READ_BYTES)
        if data:
            self.send(self._pipes[pipe], data)
            return True
        os.close(pipe)
        del self._pipes[pipe]
        return False

    def _collect(self) -> None:
        statuses: dict[int, int] = {}
        processes.reap(statuses)
        self._note_end(statuses)

    def _note_end(self, statuses: dict[int, int]) -> None:
        """Report the child's end, after all that it wrote before."""
        if self._code is not None or self.child not in statuses:
            return
        for pipe in list(self._pipes):
            while _has_data(pipe) and self._read(pipe):
                pass
        self._code = os.waitstatus_to_exitcode(statuses[self.child])
        self._helpers_until = time.monotonic() + HELPERS_S
        self.send(wire.EXIT, str(self._code).encode())

    def _finish_output(self) -> None:
        """Report DONE once helpers have ended, or were killed, and pipes are empty."""
        processes.reap({})
        if processes.children():
            if time.monotonic() < self._helpers_until:
                return
            processes.end_children({})
        for pipe in list(self._pipes):
            while _has_data(pipe) and self._read(pipe):
                pass
        self._reported_done = True
        self.send(wire.DONE)


def _has_data(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(0))
