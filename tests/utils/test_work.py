"""Two operations one after the other: the second starts when somebody asks, once, and then holds nothing."""

import gc
import weakref

import pytest
import torch

from zeroshard.utils.work import OVER, Then, Work


class Slow(Work):
    """An operation that is over when the test says so."""

    over = False
    waited = 0

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.waited += 1
        self.over = True


def test_the_second_operation_starts_once_and_after_the_first():
    first, second, started = Slow(), Slow(), []
    work = Then(first, lambda: started.append(first.over) or second)
    assert not work.done() and not started and not first.waited  # a poll does not wait
    assert work.start() is second and started == [True] and first.waited == 1
    assert not work.done()
    work.wait()
    assert work.done() and second.waited == 1 and started == [True]


def test_a_poll_starts_the_second_operation_when_the_first_is_over():
    second = Slow()
    assert not Then(OVER, lambda: second).done() and Then(OVER, Work).done()


def test_what_the_second_operation_needed_is_let_go_when_it_has_started():
    buffer = torch.empty(8)
    gone, work = weakref.ref(buffer), Then(OVER, lambda buffer=buffer: OVER if buffer is not None else Slow())
    del buffer
    assert gone() is not None
    work.start()
    gc.collect()
    assert gone() is None


def test_a_second_operation_that_can_not_start_says_so_at_every_wait():
    class Refused(Exception):
        pass

    def refuse() -> Work:
        raise Refused

    work = Then(OVER, refuse)
    for wait in (work.wait, work.join, work.start, work.done):
        with pytest.raises(Refused):
            wait()
