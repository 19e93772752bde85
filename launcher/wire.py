"""What a supervisor and hvrun say to each other, as frames on one TCP connection.

A frame is one byte of kind, four bytes of length, and the payload. A connection
of its own, rather than mpirun's stdout, keeps ranks apart (mpirun forwards
arbitrary pieces of output and mixes them), tells each side at once when the other
has died, and lets hvrun decide how long a rank may take to end. It works the same
on one host and on many. Nothing is ever unpickled, and a connection whose HELLO
does not carry the job's token is dropped.
"""

import struct

# The variables by which a supervisor finds hvrun; the user's program has them not.
ADDRESS = "HVLITE_LAUNCH_ADDRESS"  # host:port
TOKEN = "HVLITE_LAUNCH_TOKEN"
STDIN = "HVLITE_LAUNCH_STDIN"  # for rank 0, as stdin.offer() puts it

# Supervisor to hvrun.
HELLO = 1  # "token rank child-pid host"
STDOUT = 2  # bytes of the child's standard output
STDERR = 3  # bytes of its standard error
EXIT = 4  # "code" as os.waitstatus_to_exitcode gives it: -9 is SIGKILL
DONE = 5  # the child, its descendants and all output are gone
# hvrun to supervisor.
SIGNAL = 6  # "number": pass it to the child
KILL = 7  # end the child and all descendants now
BYE = 8  # every rank is done; exit

_HEADER = struct.Struct(">BI")
MAX_PAYLOAD = 1 << 20


class ProtocolError(Exception):
    """The peer sent what no supervisor and no hvrun sends."""


def pack(kind: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _HEADER.pack(kind, len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take bytes as they came; return the frames that are now whole.

        Raises:
            ProtocolError: if a frame claims to be longer than any we send.
        """
        self._pending += data
        frames: list[tuple[int, bytes]] = []
        while len(self._pending) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._pending)
            if length > MAX_PAYLOAD:
                raise ProtocolError(f"a frame of {length} bytes")
            end = _HEADER.size + length
            if len(self._pending) < end:
                break
            frames.append((kind, bytes(self._pending[_HEADER.size : end])))
            del self._pending[:end]
        return frames
