"""The order in which an engine's threads take their work: reads first, each kind in order of arrival.

Somebody waits for a read, or will soon; a write is waited for when its memory is wanted again, and then reads wait for that
memory. So writes cannot starve where memory is bounded. (The step's last slab was read behind all writes: 180 ms for 35.)
"""

from __future__ import annotations

import queue
from collections import deque
from typing import Any


class Tasks:
    """Work for threads, of two kinds.

    Threads: any may `put` and `get`. A token follows its task into the queue, so who gets one finds a task in one of the two deques.
    """

    def __init__(self) -> None:
        self._tokens: queue.SimpleQueue = queue.SimpleQueue()  # True for each task, None for each thread that is to end
        self._reads: deque = deque()
        self._writes: deque = deque()

    def put(self, task: Any, writes: bool) -> None:
        """Add one task."""
        (self._writes if writes else self._reads).append(task)
        self._tokens.put(True)

    def end(self) -> None:
        """One thread ends when all that was put before has been taken."""
        self._tokens.put(None)

    def get(self) -> Any:
        """The next task, or None: end."""
        if self._tokens.get() is None:
            return None
        try:
            return self._reads.popleft()
        except IndexError:
            return self._writes.popleft()
