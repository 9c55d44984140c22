"""`zeroshard.testing.run_threads`: what must hold of a world of threads for others' tests to be worth something."""

import gc

import pytest

from zeroshard.testing import run_threads


def test_no_automatic_collection_while_ranks_run():
    """Else torch.get_rng_state() in one thread and a finalizer in another can wait for each other for ever."""
    assert gc.isenabled()
    assert run_threads(2, lambda rank: gc.isenabled()) == [False, False]
    assert gc.isenabled()


def test_collection_comes_back_after_an_error():
    def fails(rank):
        raise ValueError("rank")

    with pytest.raises(ValueError, match="rank"):
        run_threads(2, fails)
    assert gc.isenabled()
