"""Turning each rank's bytes into lines, and knowing a traceback when one begins.

Pure: bytes and times go in, lines come out. Lines stay bytes, so any encoding
passes through unchanged.
"""

import re
from dataclasses import dataclass, field

# A line longer than this is shown in pieces rather than kept in memory.
LONGEST_LINE = 1 << 16

_TRACEBACK = re.compile(
    rb"\s*(\+ )?((Exception Group )?Traceback \(most recent call last\):"
    rb"|Fatal Python error: )"
)
# The piece after the last line end; \r\n is one end, and so is a lone \r.
_ENDS = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Line:
    """One line without its end.

    Attributes:
        text: the bytes.
        transient: whether a carriage return ended it, so that the program meant
            to write over it, as progress bars do.
    """

    text: bytes
    transient: bool = False


class LineSplitter:
    """Cuts one stream of one rank into lines."""

    def __init__(self) -> None:
        self._pending = b""
        self._after_return = False
        self._last: Line | None = None

    def feed(self, data: bytes) -> list[Line]:
        """Take bytes as they came; return the lines that are now whole.

        Bars are written as a carriage return and the text, or the text and a
        carriage return. Such a text has no end until the next one begins, so it is
        also returned, as transient, when it arrives.
        """
        self._pending += data
        lines: list[Line] = []
        start = 0
        for end in _ENDS.finditer(self._pending):
            lone_return = end[0] == b"\r"
            if lone_return and end.end() == len(self._pending):
                break  # the \n of a \r\n may be on its way
            text = self._pending[start : end.start()]
            if text or not lone_return:
                lines.append(Line(text, transient=lone_return))
            self._after_return = lone_return
            start = end.end()
        self._pending = self._pending[start:]
        if len(self._pending) > LONGEST_LINE:
            lines.append(Line(self._pending))
            self._pending = b""
        elif self._pending.strip() and (
            self._after_return or self._pending.endswith(b"\r")
        ):
            lines.append(Line(self._pending.rstrip(b"\r"), transient=True))
        return [line for line in lines if self._is_news(line)]

    def finish(self) -> list[Line]:
        """The stream has ended; return its last line if it has no end."""
        rest, self._pending = self._pending.rstrip(b"\r"), b""
        return [Line(rest)] if rest else []

    def _is_news(self, line: Line) -> bool:
        repeated = line.transient and line == self._last
        self._last = line
        return not repeated


@dataclass
class TracebackHold:
    """Holds a rank's traceback back until it is known which rank failed first.

    A program may print a traceback and live on, so what is held is released after
    ``patience_s`` without news of a failure. It is still remembered as the rank's
    last words until the rank prints something else on stderr.

    Attributes:
        onset: when the traceback began, in seconds of the caller's clock.
        last_words: its lines, and those that followed.
        holding: whether nobody has seen those lines yet.
    """

    patience_s: float = 1.5
    most_lines: int = 400
    onset: float | None = None
    last_words: list[bytes] = field(default_factory=list)
    holding: bool = False

    def feed(self, text: bytes, now: float) -> list[bytes]:
        """Take one line of stderr; return what may be shown now."""
        if not self.holding:
            if not _TRACEBACK.match(text):
                self._forget()
                return [text]
            self._forget()
            self.holding, self.onset = True, now
        self.last_words.append(text)
        if len(self.last_words) > self.most_lines:
            return self.release()
        return []

    def due(self) -> float | None:
        """When release() should be called; None if nothing is held."""
        if not self.holding or self.onset is None:
            return None
        return self.onset + self.patience_s

    def release(self) -> list[bytes]:
        """Stop holding; return what was held. It stays in ``last_words``."""
        if not self.holding:
            return []
        self.holding = False
        return list(self.last_words)

    def _forget(self) -> None:
        self.onset = None
        self.last_words.clear()
