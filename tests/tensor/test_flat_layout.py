"""FlatLayout: slots, shards, pieces and paddings fit together for any shapes and any world size. No communication."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.engine.flat_buffer import slot_views
from zeroshard.engine.flat_layout import ALIGNMENT, FlatLayout, Slot, round_up

# scalars (), empty tensors (a zero among the dimensions) and sizes around the alignment
dims = st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 64, 65, 127]))
shapes = st.lists(st.lists(dims, max_size=3).map(tuple), max_size=8)
worlds = st.integers(1, 9)


@given(shapes, worlds)
def test_slots_ascend_aligned_and_hold_their_shapes(given_shapes, world_size):
    layout = FlatLayout.build(given_shapes, world_size)
    assert [slot.shape for slot in layout.slots] == given_shapes
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end and slot.offset % ALIGNMENT == 0
        assert slot.numel == math.prod(slot.shape) == slot.stop - slot.offset
        end = slot.stop
    assert end <= layout.numel
    assert layout.true_numel == sum(map(math.prod, given_shapes))


@given(shapes, worlds)
def test_shards_tile_the_buffer_and_start_aligned(given_shapes, world_size):
    layout = FlatLayout.build(given_shapes, world_size)
    ranges = [layout.shard_range(rank) for rank in range(world_size)]
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert all(begin % ALIGNMENT == 0 and stop - begin == layout.shard_numel > 0 for begin, stop in ranges)


@given(shapes, worlds)
def test_pieces_of_all_ranks_tile_each_slot(given_shapes, world_size):
    layout = FlatLayout.build(given_shapes, world_size)
    for index, slot in enumerate(layout.slots):
        reached = 0
        for rank in range(world_size):
            piece = layout.pieces(rank)[index]
            assert piece == layout.piece(index, rank) and piece.index == index
            if piece.numel == 0:
                assert piece == (type(piece))(index, 0, 0, 0)  # empty pieces look all alike
                continue
            assert piece.start == reached
            # the same element, counted from the buffer's beginning and through the shard
            assert slot.offset + piece.start == layout.shard_range(rank)[0] + piece.shard_offset
            assert piece.shard_offset >= 0 and piece.shard_offset + piece.numel <= layout.shard_numel
            assert piece.shard_offset % ALIGNMENT == 0  # kernels see no ragged beginning
            reached = piece.stop
        assert reached == slot.numel


@given(shapes, worlds)
def test_slots_and_paddings_tile_the_buffer(given_shapes, world_size):
    layout = FlatLayout.build(given_shapes, world_size)
    covered = torch.zeros(layout.numel, dtype=torch.int32)
    for slot in layout.slots:
        covered[slot.offset : slot.stop] += 1
    for start, stop in layout.paddings():
        assert start < stop
        covered[start:stop] += 1
    assert bool((covered == 1).all())


@given(shapes, worlds)
def test_padding_is_bounded(given_shapes, world_size):
    """Less than ALIGNMENT after each slot; cutting in N rounds each shard up by at most ALIGNMENT."""
    layout = FlatLayout.build(given_shapes, world_size)
    assert layout.numel - layout.true_numel <= (len(given_shapes) + world_size) * ALIGNMENT


@given(shapes, worlds)
def test_values_survive_being_cut_and_put_together(given_shapes, world_size):
    layout = FlatLayout.build(given_shapes, world_size)
    flat = torch.arange(layout.numel, dtype=torch.float32)
    views = slot_views(flat, layout)
    for index, view in enumerate(views):
        assert tuple(view.shape) == layout.slots[index].shape
        parts = []
        for rank in range(world_size):
            shard = flat[slice(*layout.shard_range(rank))]
            piece = layout.piece(index, rank)
            parts.append(shard[piece.shard_offset : piece.shard_offset + piece.numel])
        assert torch.equal(torch.cat(parts), view.reshape(-1))


@given(st.integers(0, 10**12), st.integers(1, 10**6))
def test_round_up_is_the_least_multiple(value, multiple):
    result = round_up(value, multiple)
    assert result % multiple == 0 and value <= result < value + multiple


@pytest.mark.parametrize(
    "slots, shard_numel",
    [
        ((Slot((4,), 0, 4), Slot((4,), 0, 4)), 64),  # overlap
        ((Slot((4,), 8, 4),), 64),  # not aligned
        ((Slot((4,), 0, 5),), 64),  # numel is not that of the shape
        ((Slot((200,), 0, 200),), 64),  # past the end
        ((), 33),  # ragged shards
    ],
)
def test_an_impossible_layout_is_refused(slots, shard_numel):
    with pytest.raises(AssertionError):
        FlatLayout(slots, 2, shard_numel)
