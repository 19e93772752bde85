"""Host lists as the user writes them, and how ranks fill them. Pure."""

from dataclasses import dataclass

from .errors import LaunchError

LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Host:
    """One machine and the number of ranks that it may run."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``"h1:4,h2:4"``; a name without a number has one slot, as for mpirun.

    Args:
        text: what the user gave to ``-H``.

    Raises:
        LaunchError: naming the part that is malformed or given twice.
    """
    hosts = tuple(_parse_host(token.strip(), text) for token in text.split(","))
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise LaunchError(
                f"-H {text}: host '{host.name}' is given twice;"
                f" give it once with all its slots, e.g. {host.name}:4"
            )
        seen.add(host.name)
    return hosts


def _parse_host(token: str, text: str) -> Host:
    name, colon, slots = token.rpartition(":")
    if not colon:
        name, slots = token, "1"
    malformed = not name or ":" in name or any(c.isspace() for c in name)
    if malformed or name.startswith("-"):
        raise LaunchError(
            f"-H {text}: '{token}' is not a host; write NAME:SLOTS, e.g. -H h1:4,h2:4"
        )
    if not (slots.isascii() and slots.isdecimal()) or int(slots) < 1:
        raise LaunchError(
            f"-H {text}: '{slots}' in '{token}' is not a number of slots;"
            f" write a whole number from 1, e.g. {name}:4"
        )
    return Host(name, int(slots))


def ranks_per_host(size: int, hosts: tuple[Host, ...]) -> dict[str, int]:
    """Fill the hosts in the order given; hosts left without a rank are absent.

    Raises:
        LaunchError: if there are fewer slots than ranks.
    """
    total = sum(host.slots for host in hosts)
    if total < size:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {size} needs {size} slots but -H {listed} has {total};"
            f" raise the slots of a host or use -np {total}"
        )
    filled: dict[str, int] = {}
    for host in hosts:
        ranks = min(host.slots, size - sum(filled.values()))
        if ranks:
            filled[host.name] = ranks
    return filled


def is_local(name: str, own_name: str) -> bool:
    """Whether ``name`` means the machine whose host name is ``own_name``."""
    return name in LOCAL_NAMES or name.split(".")[0] == own_name.split(".")[0]
