"""Bytes to lines, tracebacks held back, frames, and what reaches the screen."""

import os
from pathlib import Path

import pytest
from hvlite.launcher import leftovers, wire
from hvlite.launcher.lines import LONGEST_LINE, Line, LineSplitter, TracebackHold
from hvlite.launcher.screen import BAR_INTERVAL_S, Screen
from hypothesis import given
from hypothesis import strategies as st


def lines_of(*pieces: bytes) -> list[Line]:
    splitter = LineSplitter()
    return [line for p in pieces for line in splitter.feed(p)] + splitter.finish()


def test_lines_are_whole_however_they_arrive() -> None:
    assert lines_of(b"on", b"e\ntwo\r\nthr", b"ee") == [
        Line(b"one"),
        Line(b"two"),
        Line(b"three"),
    ]


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_no_byte_of_a_line_is_lost(pieces: list[bytes]) -> None:
    pieces = [piece.replace(b"\r", b"") for piece in pieces]
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [line.text for line in lines_of(*pieces)] == expected


def test_progress_bars_are_transient_and_their_last_state_is_not() -> None:
    assert lines_of(b"\r 0%", b"\r50%", b"\r100%\n") == [
        Line(b" 0%", transient=True),
        Line(b"50%", transient=True),
        Line(b"100%"),
    ]


def test_a_bar_before_its_carriage_return_shows_at_once() -> None:
    assert lines_of(b"working\r", b"\n") == [
        Line(b"working", transient=True),
        Line(b"working"),
    ]


def test_an_endless_line_does_not_fill_the_memory() -> None:
    lines = lines_of(b"x" * (LONGEST_LINE + 1), b"y\n")
    assert lines == [Line(b"x" * (LONGEST_LINE + 1)), Line(b"y")]


TRACEBACK = [b"Traceback (most recent call last):", b"  File", b"ValueError: x"]


def test_a_traceback_is_held_until_released() -> None:
    hold = TracebackHold()
    assert hold.feed(b"before", 1.0) == [b"before"]
    for text in TRACEBACK:
        assert hold.feed(text, 2.0) == []
    assert hold.onset == 2.0
    assert hold.due() == 2.0 + hold.patience_s
    assert hold.release() == TRACEBACK
    assert hold.release() == []
    assert hold.last_words == TRACEBACK
    assert hold.due() is None


def test_a_traceback_that_was_survived_is_no_last_word() -> None:
    hold = TracebackHold()
    for text in TRACEBACK:
        hold.feed(text, 2.0)
    hold.release()
    assert hold.feed(b"going on", 9.0) == [b"going on"]
    assert (hold.onset, hold.last_words) == (None, [])


@pytest.mark.parametrize(
    "text",
    [
        b"  + Exception Group Traceback (most recent call last):",
        b"Fatal Python error: Segmentation fault",
    ],
)
def test_other_reports_of_a_death_are_held_too(text: bytes) -> None:
    assert TracebackHold().feed(text, 0.0) == []


def test_a_flood_is_not_held() -> None:
    hold = TracebackHold(most_lines=5)
    shown = [out for text in TRACEBACK * 2 for out in hold.feed(text, 0.0)]
    assert shown == TRACEBACK * 2


# ---- frames ----


@given(
    st.lists(st.tuples(st.integers(1, 8), st.binary(max_size=50))), st.integers(1, 9)
)
def test_frames_survive_any_cutting(
    frames: list[tuple[int, bytes]], width: int
) -> None:
    stream = b"".join(wire.pack(kind, payload) for kind, payload in frames)
    reader = wire.FrameReader()
    pieces = [stream[i : i + width] for i in range(0, len(stream), width)]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


def test_a_stranger_cannot_make_us_allocate() -> None:
    with pytest.raises(wire.ProtocolError):
        wire.FrameReader().feed(b"\x01\xff\xff\xff\xff")


# ---- the screen ----


def test_a_reader_that_does_not_read_blocks_nothing() -> None:
    reading, writing = os.pipe()
    try:
        screen = Screen(writing, writing)
        for number in range(2000):
            screen.show(0, Line(b"%d " % number + b"x" * 100), 0.0, stderr=False)
        screen.advance()
        assert not screen.empty
        assert screen.waiting_for() == writing
        seen = b""
        while not screen.empty:
            seen += os.read(reading, 1 << 16)
            screen.advance()
        seen += os.read(reading, 1 << 20)
        assert seen.splitlines() == [
            b"[0] %d " % number + b"x" * 100 for number in range(2000)
        ]
    finally:
        os.close(reading)
        os.close(writing)


def test_a_reader_that_has_gone_is_noticed() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        screen = Screen(writing, writing)
        screen.show(0, Line(b"text"), 0.0, stderr=False)
        screen.advance()
        assert screen.broken
        assert screen.empty
    finally:
        os.close(writing)


def test_bars_in_a_file_are_rare(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        screen = Screen(file.fileno(), file.fileno())
        for second in range(25):
            bar = Line(b"%d%%" % second, transient=True)
            screen.show(0, bar, float(second), stderr=True)
        screen.show(0, Line(b"100%"), 25.0, stderr=True)
        screen.advance()
    assert BAR_INTERVAL_S == 10
    assert path.read_bytes() == b"[0] 10%\n[0] 20%\n[0] 100%\n"


def test_bars_on_a_terminal_stay_on_one_row() -> None:
    leader, follower = os.openpty()
    try:
        screen = Screen(follower, follower)
        screen.show(0, Line(b"50%", transient=True), 0.0, stderr=True)
        screen.show(1, Line(b"a line"), 0.0, stderr=False)
        screen.show(0, Line(b"60%", transient=True), 0.0, stderr=True)
        screen.close_bar()
        screen.advance()
        clear = b"\r\x1b[K"
        assert os.read(leader, 1000) == (
            clear + b"[0] 50%" + clear + b"[1] a line\r\n" + clear + b"[0] 60%\r\n"
        )
    finally:
        os.close(leader)
        os.close(follower)


# ---- shared memory ----


def test_only_stale_files_of_mpi_are_removed(tmp_path: Path) -> None:
    stale, held = tmp_path / "mpich_shm_1_0", tmp_path / "sm_segment.h.0.1.0"
    other = tmp_path / "psm_mine"
    for path in stale, held, other:
        path.write_text("x")
    with held.open():
        assert leftovers.remove_stale(0.0, str(tmp_path)) == [str(stale)]
    assert sorted(tmp_path.iterdir()) == sorted([held, other])


def test_files_from_before_the_job_are_left(tmp_path: Path) -> None:
    (tmp_path / "mpich_shm_1_0").write_text("x")
    assert leftovers.remove_stale(1e12, str(tmp_path)) == []
