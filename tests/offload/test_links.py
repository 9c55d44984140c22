"""The links between tiers, which states and activations share: what is copied, counted, and told to a dry run's watcher."""

import pytest
import torch
from recording_streams import RecordingStreams

from zeroshard.comm.fake import Watcher
from zeroshard.config import Tier
from zeroshard.engine.comm.streams import Streams
from zeroshard.engine.ledger import Ledger
from zeroshard.engine.rest import Links
from zeroshard.tiers import imagine
from zeroshard.utils.work import OVER

CPU = torch.device("cpu")


def test_on_one_memory_a_copy_is_made_at_once_and_counts_for_nothing():
    links, target = Links(CPU, Streams(), Ledger()), torch.zeros(4)
    assert links.copy(target, torch.ones(4), Tier.DEVICE, Tier.HOST) is OVER and target.tolist() == [1.0] * 4
    links.count_hop(16, up=True)
    assert not links.separate and not links.ledger.moved


def test_between_two_memories_a_copy_is_late_and_counted_by_its_bytes():
    links, target = Links(CPU, RecordingStreams(separate_host=True), Ledger()), torch.zeros(4)
    copy = links.copy(target, torch.ones(4), Tier.DEVICE, Tier.HOST)
    assert not copy.done() and target.tolist() == [0.0] * 4
    copy.wait()
    assert target.tolist() == [1.0] * 4
    links.count_hop(8, up=True)
    assert links.ledger.moved == {(Tier.DEVICE, Tier.HOST): 16, (Tier.HOST, Tier.DEVICE): 8}


class Told(Watcher):
    def __init__(self):
        self.moves, self.joined = [], []

    def moved(self, source, target, nbytes):
        self.moves.append((source, target, nbytes))
        return (len(self.moves),)

    def join(self, ticket):
        self.joined.append(ticket)


def test_an_imagined_move_is_told_hop_by_hop_and_a_wait_is_for_the_last():
    streams = Told()
    links = Links(CPU, streams, Ledger())
    imagine(links, Tier.DEVICE, Tier.HOST, Tier.DISK, nbytes=12).join()
    assert streams.moves == [(Tier.DEVICE, Tier.HOST, 12), (Tier.HOST, Tier.DISK, 12)] and streams.joined == [(2,)]
    assert links.ledger.moved == {(Tier.DEVICE, Tier.HOST): 12, (Tier.HOST, Tier.DISK): 12}


@pytest.mark.parametrize("separate", [False, True])
def test_host_memory_is_aligned_for_direct_io(separate):
    links = Links(CPU, RecordingStreams(separate_host=separate), Ledger())
    assert links.host_buffer(5000).data_ptr() % 4096 == 0 and links.device_buffer(5000).nbytes == 5000
