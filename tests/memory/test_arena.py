"""tiers.pool.Arena: pieces of any size, in turn, round one stretch of memory, and never over one that is still in use."""

import random

import torch

from zeroshard.config import Tier
from zeroshard.engine.ledger import STAGING, Ledger
from zeroshard.tiers.pool import Arena


class Transfer:
    """Something that still reads a piece until it is waited for, or ends by itself."""

    def __init__(self):
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


def _arena(limit: int, reserve: int | None = None) -> Arena:
    arena = Arena(Ledger(), limit, 4096, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8), Tier.HOST)
    arena.reserve(limit if reserve is None else reserve)
    return arena


def test_memory_is_made_once_for_what_is_of_use_and_entered():
    arena = _arena(1 << 20, reserve=10_000)
    assert arena.nbytes == 12288 == arena.ledger.elsewhere[Tier.HOST][STAGING]
    arena.reserve(8192)
    assert arena.nbytes == 12288 and not arena.lacks(12288) and arena.lacks(12289)
    piece = arena.take(4096)
    arena.reserve(1 << 30)  # not now: a piece is in use
    assert arena.nbytes == 12288
    arena.give(piece, Transfer())
    arena.reserve(1 << 30)
    assert arena.nbytes == 1 << 20 == arena.ledger.elsewhere[Tier.HOST][STAGING] and not arena.lacks(1 << 30)
    arena.close()
    assert arena.ledger.elsewhere[Tier.HOST][STAGING] == 0


def test_a_piece_is_taken_again_when_its_transfer_is_done_and_not_before():
    arena = _arena(3 * 4096)
    first, second = arena.take(4096), arena.take(8000)
    assert second.numel() == 8000 and arena.take(1) is None
    transfer = Transfer()
    arena.give(first, transfer)
    assert arena.take(4096) is None and not transfer.over
    again = arena.take(4096, wait=True)
    assert transfer.over and again.data_ptr() == first.data_ptr()
    assert arena.take(4096, wait=True) is None  # the next one belongs to somebody
    arena.give(again)
    arena.give(second)
    assert arena.take(3 * 4096).numel() == 3 * 4096
    assert arena.take(4 * 4096, wait=True) is None


def test_pieces_in_use_never_overlap_in_any_order_of_events():
    for seed in range(30):
        draw, arena = random.Random(seed), _arena(64 * 4096)
        used: dict[int, torch.Tensor] = {}
        moving: list[tuple[int, torch.Tensor, Transfer]] = []
        for number in range(1, 251):
            piece = arena.take(draw.randint(1, 20 * 4096), wait=draw.random() < 0.3)
            moving = [entry for entry in moving if not entry[2].over]
            if piece is not None:
                piece.fill_(number)
                used[number] = piece
            for key in draw.sample(sorted(used), min(len(used), draw.randint(0, 2))):
                transfer = Transfer()
                moving.append((key, used.pop(key), transfer))
                arena.give(moving[-1][1], transfer)
            if moving and draw.random() < 0.5:
                draw.choice(moving)[2].over = True
            for key, memory in [*used.items(), *((key, memory) for key, memory, transfer in moving if not transfer.over)]:
                assert (memory == key % 256).all()
        assert number == 250
