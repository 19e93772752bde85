"""hvrun's end of the connections: listening, who is who, frames in and out."""

import hmac
import secrets
import selectors
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import wire
from .errors import LaunchError

READ_BYTES = 1 << 16


@dataclass
class _Peer:
    connection: socket.socket
    reader: wire.FrameReader = field(default_factory=wire.FrameReader)
    outgoing: bytearray = field(default_factory=bytearray)
    rank: int | None = None


@dataclass(frozen=True)
class Frame:
    """One frame from a rank; ``kind`` None means that its connection has ended."""

    rank: int
    kind: int | None
    payload: bytes = b""


class Channel:
    """All supervisors of one job.

    Attributes:
        address: ``host:port`` where supervisors connect; the port is chosen by
            the kernel, so that two jobs on one machine never collide.
        token: what they must say first, known only to processes of this user.
    """

    def __init__(self, selector: selectors.BaseSelector, towards: str | None) -> None:
        self._selector = selector
        self._peers: dict[int, _Peer] = {}
        self._by_rank: dict[int, _Peer] = {}
        self._listener = _listen(towards)
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self.token = secrets.token_hex(16)
        selector.register(self._listener, selectors.EVENT_READ, self)

    def ready(self, fd: int, mask: int) -> Iterator[Frame]:
        """Serve one ready socket; yields what ranks have said."""
        if fd == self._listener.fileno():
            self._accept()
            return
        peer = self._peers.get(fd)
        if peer is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(peer)
            if mask & selectors.EVENT_READ:
                yield from self._receive(peer)
        except BlockingIOError:
            return
        except (OSError, wire.ProtocolError, ValueError):
            yield from self._drop(peer)

    def send(self, rank: int, kind: int, payload: bytes = b"") -> None:
        """Queue a frame for a rank; one that has gone needs it no more."""
        peer = self._by_rank.get(rank)
        if peer is not None:
            peer.outgoing += wire.pack(kind, payload)
            self._watch(peer)

    def close(self) -> None:
        """Close everything; supervisors still there end by themselves."""
        for peer in list(self._peers.values()):
            for _ in self._drop(peer):
                pass
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._peers[connection.fileno()] = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ, self)

    def _receive(self, peer: _Peer) -> Iterator[Frame]:
        data = peer.connection.recv(READ_BYTES)
        if not data:
            yield from self._drop(peer)
        for kind, payload in peer.reader.feed(data):
            if peer.rank is None:
                self._greet(peer, kind, payload)
            if peer.rank is not None:
                yield Frame(peer.rank, kind, payload)

    def _greet(self, peer: _Peer, kind: int, payload: bytes) -> None:
        token, rank, _ = payload.decode().split(" ", 2)
        known = hmac.compare_digest(token.encode(), self.token.encode())
        if kind != wire.HELLO or not known or int(rank) in self._by_rank:
            raise wire.ProtocolError("not a supervisor of this job")
        peer.rank = int(rank)
        self._by_rank[peer.rank] = peer

    def _flush(self, peer: _Peer) -> None:
        sent = peer.connection.send(peer.outgoing)
        del peer.outgoing[:sent]
        self._watch(peer)

    def _watch(self, peer: _Peer) -> None:
        mask = selectors.EVENT_READ
        if peer.outgoing:
            mask |= selectors.EVENT_WRITE
        self._selector.modify(peer.connection, mask, self)

    def _drop(self, peer: _Peer) -> Iterator[Frame]:
        if self._peers.pop(peer.connection.fileno(), None) is None:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None:
            del self._by_rank[peer.rank]
            yield Frame(peer.rank, None)


def _listen(towards: str | None) -> socket.socket:
    """Listen on the one address by which ``towards`` reaches this machine.

    Args:
        towards: another host of the job, or None if all ranks are here.
    """
    if towards is None:
        return socket.create_server(("127.0.0.1", 0))
    try:
        found = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise LaunchError(
            f"host '{towards}' is not known here ({error.strerror}); check -H"
        ) from error
    family, _, _, _, target = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Sends nothing: it makes the kernel choose the outgoing address.
        probe.connect(target)
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family)
