"""What the supervisors report of each rank: the facts that the verdict rests on."""

from dataclasses import dataclass

# The kernel closes a killed process's connections before its parent hears of the
# death, so its peers can fail, and be heard of, first.
KILLED_UNHEARD_S = 0.5


@dataclass
class RankRecord:
    """What is known of one rank.

    Attributes:
        rank: its rank.
        host: name of its machine.
        pid: process id of the user's command there.
        code: exit code, or minus the signal; None while it runs.
        ended: when the report of its end arrived (seconds, hvrun's clock).
        onset: when the traceback began that was its last word, if one was.
        stopped: whether hvrun had told it to end before it did.
        lost: whether its supervisor vanished without a report.
        done: whether nothing of it is left.
    """

    rank: int
    host: str
    pid: int
    code: int | None = None
    ended: float | None = None
    onset: float | None = None
    stopped: bool = False
    lost: bool = False
    done: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ended badly by itself."""
        return bool(self.code) and not self.stopped

    @property
    def began(self) -> float:
        """When its failure began: a traceback comes before the exit it causes."""
        known = [t for t in (self.onset, self.ended) if t is not None]
        began = min(known, default=float("inf"))
        killed = (self.code or 0) < 0 and not self.stopped
        return began - KILLED_UNHEARD_S if killed else began
