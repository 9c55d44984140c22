"""What is alive is looked at without being in the way of other threads."""

import gc
import subprocess
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


CHANGED_MEANWHILE = """
import threading, time, torch
from zeroshard.utils.autograd import number_of

held, ended = [], threading.Event()
source = torch.ones(4, 2, 2, requires_grad=True) * 1

def change():
    while not ended.is_set():
        base = torch.empty(4, 2, 3)
        for _ in range(2):
            held[:] = [part := base[..., :2]]
            part.copy_(source)

thread = threading.Thread(target=change)
thread.start()
last, looks = time.monotonic() + 4, 0
while time.monotonic() < last:
    looks += sum(number_of(each) >= 0 for each in list(held))
ended.set()
thread.join()
assert looks > 100
print("ended")
"""


def test_a_view_that_another_thread_changes_can_be_asked_for_its_node():
    """Both threads stopped for good: one had the view's lock, the other the interpreter's. In a process of its own, that can be ended."""
    run = subprocess.run([sys.executable, "-c", CHANGED_MEANWHILE], capture_output=True, text=True, timeout=50, check=False)
    assert run.stdout == "ended\n", run.stderr
