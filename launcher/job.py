"""One running job: the only clock and the only event loop of hvrun.

It starts mpirun, which starts a supervisor for each rank (rank.py); the supervisors
connect back. Events go to the state machine (course.py), which says what to tell
the ranks; output goes to the screen. When the job is over, all that is left below
hvrun is killed, and the verdict, read from the supervisors' records, is printed
last.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from . import leftovers, processes, verdict, wire
from .channel import Channel, Frame
from .course import Course
from .lines import LineSplitter
from .output import RankOutput
from .records import RankRecord
from .screen import Screen

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READ_BYTES = 1 << 16


class Job:
    """Everything that hvrun holds while a job runs.

    Attributes:
        channel: where supervisors connect; its address and token must be in the
            environment given to run().
    """

    def __init__(self, size: int, towards: str | None, *, verbose: bool) -> None:
        self._verbose = verbose
        self._selector = selectors.DefaultSelector()
        self.channel = Channel(self._selector, towards)
        self._screen = Screen()
        self._course = Course(size)
        self._outputs: dict[int, RankOutput] = {}
        self._mpirun = 0
        self._mpirun_pipes: dict[int, LineSplitter] = {}
        self._mpirun_said: list[bytes] = []

    def run(self, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run mpirun with these arguments; returns the job's exit code."""
        since = time.time()
        processes.become_subreaper()
        wakeup = _catch_signals()
        self._selector.register(wakeup, selectors.EVENT_READ)
        self._mpirun, pipes = _start(arguments, environ)
        for pipe in pipes:
            self._mpirun_pipes[pipe] = LineSplitter()
            self._selector.register(pipe, selectors.EVENT_READ)
        while not self._course.over:
            self._step(wakeup)
        self.channel.close()
        processes.end_children({})
        for pipe in list(self._mpirun_pipes):
            while pipe in self._mpirun_pipes and self._hear_mpirun(pipe):
                pass
        code = self._conclude(time.monotonic())
        leftovers.remove_stale(since)
        self._screen.advance()
        while not self._screen.empty:
            self._step(wakeup)
        return code

    # ---- the loop ----

    def _step(self, wakeup: int) -> None:
        """Wait for an event or a deadline, and handle it."""
        writable = self._await_screen()
        for key, mask in self._selector.select(self._pause(time.monotonic())):
            if key.fd == wakeup:
                self._on_signals(os.read(wakeup, READ_BYTES))
            elif key.fd in self._mpirun_pipes:
                self._hear_mpirun(key.fd)
            else:
                for frame in self.channel.ready(key.fd, mask):
                    self._on_frame(frame, time.monotonic())
        if writable is not None:
            self._selector.unregister(writable)
        self._on_time(time.monotonic())
        self._screen.advance()

    def _await_screen(self) -> int | None:
        """Wake up when a slow reader of our output can take more."""
        fd = self._screen.waiting_for()
        if fd is not None:
            self._selector.register(fd, selectors.EVENT_WRITE)
        return fd

    def _pause(self, now: float) -> float | None:
        times = [self._course.deadline()]
        if not self._course.ending:
            times += [output.due() for output in self._outputs.values()]
        known = [at for at in times if at is not None]
        return max(0.0, min(known) - now) if known else None

    def _on_time(self, now: float) -> None:
        for order in self._course.advance(now):
            for record in self._course.records.values():
                if record.code is None or order.kind == wire.BYE:
                    self.channel.send(record.rank, order.kind, order.payload)
        if self._screen.broken and self._course.ended_by is None:
            self._course.interrupted(signal.SIGPIPE, now)
        if not self._course.ending:
            for output in self._outputs.values():
                due = output.due()
                if due is not None and due <= now:
                    output.release(now)

    # ---- events ----

    def _on_frame(self, frame: Frame, now: float) -> None:
        rank, course = frame.rank, self._course
        if frame.kind == wire.HELLO:
            _, _, pid, host = frame.payload.decode().split(" ", 3)
            self._outputs[rank] = RankOutput(rank, self._screen)
            course.started(RankRecord(rank, host, int(pid)), now)
            return
        output = self._outputs[rank]
        if frame.kind == wire.STDOUT:
            output.stdout(frame.payload, now)
        elif frame.kind == wire.STDERR:
            output.stderr(frame.payload, now)
        elif frame.kind == wire.EXIT:
            course.exited(rank, int(frame.payload), now, output.onset)
        elif frame.kind == wire.DONE:
            output.finish(now)
            course.done(rank)
        elif frame.kind is None and not course.records[rank].done:
            output.finish(now)
            course.lost(rank, now, output.onset)

    def _on_signals(self, numbers: bytes) -> None:
        now = time.monotonic()
        statuses: dict[int, int] = {}
        processes.reap(statuses)
        if self._mpirun in statuses:
            code = os.waitstatus_to_exitcode(statuses[self._mpirun])
            self._course.mpirun_ended(code, now)
        for number in numbers:
            if number in FORWARDED:
                for record in self._course.records.values():
                    self.channel.send(record.rank, wire.SIGNAL, b"%d" % number)
            elif number in ENDING:
                for output in self._outputs.values():
                    output.release(now)
                self._course.interrupted(number, now)

    def _hear_mpirun(self, pipe: int) -> bool:
        """Keep, or show, what mpirun says of its own; returns False if nothing."""
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return False
        splitter = self._mpirun_pipes[pipe]
        lines = splitter.feed(data) if data else splitter.finish()
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)
            del self._mpirun_pipes[pipe]
        for line in lines:
            if not line.text.strip(b" -\0"):
                continue
            self._mpirun_said.append(line.text)
            if self._verbose:
                self._screen.note(line.text, verdict.MPIRUN)
        return True

    # ---- the end ----

    def _conclude(self, now: float) -> int:
        """Print the report; returns the job's exit code."""
        course = self._course
        facts = verdict.JobFacts(
            records=list(course.records.values()),
            last_words={r: out.last_words() for r, out in self._outputs.items()},
            ended_by=course.ended_by,
            missing=course.missing,
            mpirun_pid=self._mpirun,
            mpirun_code=course.mpirun_code,
            mpirun_early=course.mpirun_early,
            mpirun_said=self._mpirun_said,
            told=self._verbose,
        )
        first = verdict.first_failure(facts.records)
        for record in facts.records:
            consequence = record.failed or record.stopped
            if not consequence or (self._verbose and record is not first):
                self._outputs[record.rank].release(now)
        self._screen.close_bar()
        code, lines = verdict.judge(facts)
        for prefix, text in lines:
            self._screen.note(text, prefix)
        return code


def _catch_signals() -> int:
    """Turn signals into bytes on a pipe; returns its reading end."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (*FORWARDED, *ENDING, signal.SIGCHLD):
        # nohup and background jobs of a shell have signals ignored on purpose.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return reading


def _start(
    arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[int, tuple[int, int]]:
    """Start mpirun; returns its pid and the reading ends of its stdout and stderr."""
    hvrun = os.getpid()
    process = subprocess.Popen(
        arguments,
        env=dict(environ),
        stdin=subprocess.DEVNULL,  # rank 0 gets hvrun's without its help
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C is for hvrun alone; mpirun would leave the ranks a quarter second.
        start_new_session=True,
        # SIGTERM, on which mpirun removes its temporary files.
        preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM, hvrun),
    )
    # Reaped by our own loop together with adopted processes.
    process.returncode = 0
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = (os.dup(process.stdout.fileno()), os.dup(process.stderr.fileno()))
    process.stdout.close()
    process.stderr.close()
    for pipe in pipes:
        os.set_blocking(pipe, False)
    return process.pid, pipes
