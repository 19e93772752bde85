"""Knows when the user's `backward()` ends. The one file on torch's private engine API.

A backward pass may start others from inside (reentrant checkpointing does, for each
segment). The engine calls back at the end of each of them, but only the end of the
outermost is the moment when all gradients are there. An inner one is recognised by
the node that is running it; it passes the watch on to the pass which that node
belongs to.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_engine = torch.autograd.Variable._execution_engine
_task_id: Callable[[], int] = torch._C._current_graph_task_id
_running_node: Callable[[], Any] = torch._C._current_autograd_node


def after_other_callbacks(function: Callable[[], None]) -> None:
    """Run `function` at the end of this backward, after what is queued by now."""
    _engine.queue_callback(function)


class BackwardWatch:
    """Tells the first hook of a backward pass from the others, and calls at its end.

    Owned by the reducer. Hooks of one backward may run on several threads (one a
    device), one at a time.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._task = -1
        self._watched: weakref.ref[_Watched] | None = None

    def enters_new(self) -> bool:
        """Say whether the hook that calls this is the first one of a backward pass."""
        task = _task_id()
        if task == self._task:
            return False
        self._task = task
        watched = self._watched() if self._watched is not None else None
        is_new = watched is None
        if watched is None:
            watched = _Watched(self._at_end)
            self._watched = weakref.ref(watched)
        watched.join(task)
        return is_new


class _Watched:
    """One outermost backward pass and the ones inside it.

    Only autograd keeps it alive, through the callbacks that it queues. So it is gone
    as soon as the pass has ended, also when that was by an exception, after which
    torch calls nobody back.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._tasks: set[int] = set()

    def join(self, task: int) -> None:
        """Be called back at the end of the pass `task`, which is running."""
        if task not in self._tasks:
            self._tasks.add(task)
            _engine.queue_callback(self._task_ends)

    def _task_ends(self) -> None:
        node = _running_node()
        if node is None:
            self._at_end()
            return

        def outer_goes_on(*_: object) -> None:
            handle.remove()
            self.join(_task_id())

        handle = node.register_hook(outer_goes_on)
