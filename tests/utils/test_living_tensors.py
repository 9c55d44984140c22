"""What is alive is looked at without being in the way of other threads."""

import gc
import sys
import threading

import torch

from zeroshard.utils.autograd import collections, living_tensors


class Named(torch.Tensor):
    pass


def test_all_tensors_are_found_with_those_of_subclasses():
    since = collections()
    mine = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2)), torch.zeros(1).as_subclass(Named)]
    for generation in (None, 0, 1, 2):  # they grow older
        if generation is not None:
            gc.collect(generation)
        found = living_tensors(since)
        assert all(any(each is x for each in found) for x in mine)


def test_a_tuple_that_another_thread_is_making_is_not_held():
    """CPython then says "SystemError: bad argument to internal function" in that thread. It did, in this test, within a second."""
    ended, errors, before = threading.Event(), [], sys.getswitchinterval()

    def make():
        try:
            while not ended.is_set():
                tuple([number] for number in range(50))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for _ in range(60):
            living_tensors((-1, -1, -1))  # among all that there is
    finally:
        ended.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join()
    assert not errors
