"""Ranks that meet at each other's doors, in threads."""

import threading

from zeroshard.comm.transport import ProcessTransport


def world(rank_doors, places=None, timeout_s=10.0, before_last=lambda: None):
    """Transports of ranks in threads, the last of which comes late; or their errors. places: of the doors, as ranks are told."""
    ends, places = {}, places or [door.address for door in rank_doors]

    def connect(rank):
        try:
            ends[rank] = ProcessTransport(rank, rank_doors[rank], places, timeout_s)
        except Exception as error:
            ends[rank] = error

    threads = [threading.Thread(target=connect, args=(rank,), name=f"rank {rank}") for rank in range(len(rank_doors))]
    for thread in threads[:-1]:
        thread.start()
    before_last()
    threads[-1].start()
    for thread in threads:
        thread.join(timeout_s + 10)
        assert not thread.is_alive()
    return [ends[rank] for rank in range(len(rank_doors))]
