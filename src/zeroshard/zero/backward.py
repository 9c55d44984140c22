"""State of one backward of a model. A new object is made for each backward; dropping it resets the state.

    a gradient reaches the model's output ... units, parameters ... end: the callback that autograd was given

Autograd does not call the callback of a backward that fails, and reports the failure to nobody: it only drops the callback. So
`Backward` keeps a weak reference to the callback: a dead one, before the end was reached, means that the backward failed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from ..utils import torch_compat


class Backward:
    """State of one backward. begun: it has reached a unit; scaled: the loss scale was applied.

    thread: number of the thread on which its first hook ran; None once it has failed.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """Construct it inside the backward; `at_end` is called when the backward ends, if it has begun."""
        self.begun = self.scaled = False
        self.thread: int | None = threading.get_ident()

        def end() -> None:
            if self.begun:
                at_end()

        self._end = weakref.ref(end)
        torch_compat.at_end_of_backward(end)

    @property
    def alive(self) -> bool:
        """True until autograd has dropped the callback: the backward has ended or failed."""
        return self._end() is not None
