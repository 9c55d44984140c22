"""The one-step delayed update (ZeRO-Offload, arXiv 2101.06840, section 4.3): a step on the host overlaps with the next F and B.

    device  | F1 B1 | F2 B2 | F3 B3 |            forward 3 uses the parameters of step 1
    host            | step 1 | step 2 |          a thread, which alone uses masters and states while it runs

Where gradients rest as shards they are handed over, not copied: two resting places take turns.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .offloaded_step import HostStepper, Job


class DelayedStep:
    """Runs a HostStepper in a thread, one step at a time.

    Threads: all methods are for the rank's own thread. From `start` to the end of `wait`, the step's thread alone uses the
    stepper, masters, states and gradients handed over. The rank's own keeps the Comm, and tells peers of failures (`wait`).
    """

    def __init__(self, host: HostStepper) -> None:
        self.host = host
        self.unpublished: list[Job] = []  # jobs stepped, or being stepped, whose parameters are not written yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.ticket: Any = None  # stands for an imagined step

    def start(self, jobs: list[Job]) -> None:
        """Step the jobs in the background. `wait`, and publish, before the next start."""
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
        """Return when the running step is done. Raises what it raised, at every call, since masters are then half stepped."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.ticket is not None:
            self.host.tiers.streams.join(self.ticket)
        self.host.tiers.check()  # tells the peers
        if self._error is not None:
            raise self._error

    def take(self) -> list[Job]:
        """Wait; return the jobs whose masters are now to be published."""
        self.wait()
        jobs, self.unpublished = self.unpublished, []
        return jobs
