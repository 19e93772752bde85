"""Settings, read from the environment once, in `init()`.

`HVLITE_NAME` wins over `HOROVOD_NAME`. A value that does not parse is an error that
names the variable, never a silent default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
MiB = 1 << 20
ALGORITHMS = ("auto", "shm", "ring", "hierarchical")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def _bytes(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError
        return text.lower()

    parse.__doc__ = "one of " + ", ".join(allowed)
    return parse


@dataclass(frozen=True)
class _Setting:
    """How one field is read: the variable's name, its parser, and what it accepts."""

    variable: str
    parse: Callable[[str], object]
    accepts: str


def _setting(default: T, variable: str, parse: Callable[[str], T], accepts: str) -> T:
    value: T = field(
        default=default, metadata={"setting": _Setting(variable, parse, accepts)}
    )
    return value


@dataclass(frozen=True)
class Config:
    """All settings of one runtime, the same on every rank unless said otherwise."""

    fusion_threshold_bytes: int = _setting(
        64 * MiB,
        "FUSION_THRESHOLD",
        _bytes,
        "a number of bytes, 0 to switch fusion off",
    )
    cache_capacity: int = _setting(
        4096, "CACHE_CAPACITY", _bytes, "a number of requests, 0 to switch it off"
    )
    allreduce: str = _setting(
        "auto", "ALLREDUCE", _choice(*ALGORITHMS), "one of " + ", ".join(ALGORITHMS)
    )
    # Largest piece handed to MPI or copied in one go; bounds counts and scratch memory.
    chunk_bytes: int = _setting(MiB, "CHUNK_BYTES", _positive, "a number of bytes >= 1")
    bucket_bytes: int = _setting(
        25 * MiB, "BUCKET_BYTES", _positive, "a number of bytes >= 1"
    )
    stall_warning_s: float = _setting(
        60.0, "STALL_CHECK_TIME_SECONDS", _seconds, "seconds, 0 to switch it off"
    )
    stall_abort_s: float = _setting(
        0.0, "STALL_SHUTDOWN_TIME_SECONDS", _seconds, "seconds, 0 for never"
    )
    leave_timeout_s: float = _setting(
        30.0, "LEAVE_TIMEOUT_SECONDS", _seconds, "seconds to wait in shutdown()"
    )
    # May differ from rank to rank: ranks with equal labels count as one node.
    node: str = _setting("", "NODE", str, "any label")
    log_level: str = _setting(
        "warning", "LOG_LEVEL", _choice(*LOG_LEVELS), "one of " + ", ".join(LOG_LEVELS)
    )


def read(environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings from `environ` (default: the process's environment).

    Raises:
        UsageError: a variable has a value that is not understood.
    """
    environ = os.environ if environ is None else environ
    values = {}
    for name, spec in Config.__dataclass_fields__.items():
        setting: _Setting = spec.metadata["setting"]
        for prefix in ("HVLITE_", "HOROVOD_"):
            text = environ.get(prefix + setting.variable)
            if text is not None and text.strip():
                values[name] = _parse(setting, prefix, text.strip())
                break
    return Config(**values)  # type: ignore[arg-type]  # each parser returns its field's type


def _parse(setting: _Setting, prefix: str, text: str) -> object:
    try:
        return setting.parse(text)
    except ValueError:
        raise UsageError(
            f"{prefix}{setting.variable}={text!r} is not understood: "
            f"it must be {setting.accepts}"
        ) from None
