"""The one-step delayed update (ZeRO-Offload, arXiv 2101.06840, section 4.3): a step on the host overlaps with the next F and B.

    device  | F1 B1 | F2 B2 | F3 B3 |            forward 3 uses the parameters of step 1
    host            | step 1 | step 2 |          a thread, which alone uses masters and states while it runs

Gradients that rest as shards are not copied for the step: a group then has two resting places, and while the step reads
one of them, backward writes into the other (zero/flat_buffer.py:hand_over).
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .offloaded_step import HostStepper, Job


class DelayedStep:
    """Runs a HostStepper in a thread, one step at a time.

    Threads: the rank's own thread calls all methods. From `start` to the end of `wait`, only the step's thread uses the stepper,
    the masters, the states and the gradients of the jobs. It never uses the Comm: `wait`, on the rank's own thread, reports a
    failure to the peers.
    """

    def __init__(self, host: HostStepper) -> None:
        self.host = host
        self.unpublished: list[Job] = []  # jobs stepped, or being stepped, whose parameters are not written yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.ticket: Any = None  # in a dry run, in place of the thread

    def start(self, jobs: list[Job]) -> None:
        """Step the jobs in the background. The caller publishes the result (`take`) before it calls `start` again."""
        assert self._thread is None and not self.unpublished
        self.unpublished = jobs
        num_threads = torch.get_num_threads()

        def body() -> None:
            torch.set_num_threads(num_threads)  # OpenMP keeps the number per thread
            try:
                with torch.no_grad(), self.host.tiers.beside_comm():
                    self.host.step(jobs)
            except BaseException as error:
                self._error = error

        if self.host.tiers.comm.imagined:  # fake tensors belong to one thread
            self.ticket = self.host.tiers.streams.run_beside(lambda: self.host.step(jobs))[1]
            return
        self._thread = threading.Thread(target=body, name="zeroshard-delayed-step", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True while masters and states belong to the step's thread."""
        return self._thread is not None

    def wait(self) -> None:
        """Wait until the running step is done. If it failed, every call raises its error, since masters are then half stepped."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.ticket is not None:
            self.host.tiers.streams.join(self.ticket)
        self.host.tiers.check()  # raises an I/O error of the step, and reports it to the peers
        if self._error is not None:
            raise self._error

    def take(self) -> list[Job]:
        """Wait for the running step; return its jobs, whose masters the caller must now write into the parameters."""
        self.wait()
        jobs, self.unpublished = self.unpublished, []
        return jobs
