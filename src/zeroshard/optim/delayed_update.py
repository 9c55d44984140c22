"""The one-step delayed update (ZeRO-Offload, arXiv 2101.06840, section 4.3): the host steps beside the next step.

    device  | F1 B1 | F2 B2 | F3 B3 |            forward 3 uses the parameters that step 1 made
    host            | step 1 | step 2 |          a thread; masters and states are its own while it runs

Gradients are handed over, not copied, where they rest as shards: two resting places take turns.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .offloaded_step import HostStepper, Job


class DelayedStep:
    """Runs a HostStepper in a thread, one step at a time.

    Threads: all methods are the rank's own thread's. Between `start` and the end of `wait` the stepper, masters and states, and
    the gradients handed over are the step's; the Comm stays with the rank's own, which tells the peers of failures (`wait`).
    """

    def __init__(self, host: HostStepper) -> None:
        self.host = host
        self.unpublished: list[Job] = []  # stepped, or being stepped: parameters do not show it yet
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.ticket: Any = None  # of an imagined step

    def start(self, jobs: list[Job]) -> None:
        """Step the jobs in the background. `wait` and publish before the next start."""
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
        """True while masters and states belong to the thread."""
        return self._thread is not None

    def wait(self) -> None:
        """Return when the step under way is done. Raises what it raised, at every call: masters are half stepped then."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.ticket is not None:
            self.host.tiers.streams.join(self.ticket)
        self.host.tiers.check()  # tells the peers
        if self._error is not None:
            raise self._error

    def take(self) -> list[Job]:
        """Wait; the jobs whose masters are to be published now."""
        self.wait()
        jobs, self.unpublished = self.unpublished, []
        return jobs
