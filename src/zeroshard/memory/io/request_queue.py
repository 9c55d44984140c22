"""The queue from which an engine's threads take their work: reads first, each kind in order of arrival.

A caller needs a read's values soon, but waits for a write only when it needs the memory again. Further reads need that memory,
too, so writes can not starve where memory is bounded. (In order of arrival, a step's last read took 180 ms, not 35.)
"""

from __future__ import annotations

import queue
from collections import deque
from typing import Any


class Tasks:
    """Queue of two kinds of work for threads.

    Threads: any may `put` and `get`. A token follows each task into the queue, so a thread that gets one finds a task.
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
        """Let one thread end when all tasks put before this call have been taken."""
        self._tokens.put(None)

    def get(self) -> Any:
        """Return the next task; None: the thread is to end."""
        if self._tokens.get() is None:
            return None
        try:
            return self._reads.popleft()
        except IndexError:
            return self._writes.popleft()
