"""From the bytes that ranks print to lines on the screen, tracebacks held back."""

from .lines import Line, LineSplitter, TracebackHold
from .screen import Screen


class RankOutput:
    """The two streams of one rank."""

    def __init__(self, rank: int, screen: Screen) -> None:
        self._rank = rank
        self._screen = screen
        self._out = LineSplitter()
        self._err = LineSplitter()
        self._hold = TracebackHold()

    @property
    def onset(self) -> float | None:
        """When the traceback began that is the rank's last word on stderr."""
        return self._hold.onset

    def stdout(self, data: bytes, now: float) -> None:
        """Show what came on standard output."""
        for line in self._out.feed(data):
            self._screen.show(self._rank, line, now, stderr=False)

    def stderr(self, data: bytes, now: float) -> None:
        """Show what came on standard error, or hold it."""
        self._take(self._err.feed(data), now)

    def finish(self, now: float) -> None:
        """Both streams have ended: take last lines that have no line end."""
        for line in self._out.finish():
            self._screen.show(self._rank, line, now, stderr=False)
        self._take(self._err.finish(), now)

    def due(self) -> float | None:
        """When release() should be called; None if nothing is held."""
        return self._hold.due()

    def release(self, now: float) -> None:
        """Show what is held."""
        self._show(self._hold.release(), now)

    def last_words(self) -> list[bytes]:
        """The traceback that ended stderr, for the report of a failure."""
        return self._hold.last_words

    def _take(self, lines: list[Line], now: float) -> None:
        for line in lines:
            if line.transient and not self._hold.holding:
                self._screen.show(self._rank, line, now, stderr=True)
            elif not line.transient:
                self._show(self._hold.feed(line.text, now), now)

    def _show(self, texts: list[bytes], now: float) -> None:
        for text in texts:
            self._screen.show(self._rank, Line(text), now, stderr=True)
