"""Parts of a parameter that lies in several maps: where each stretch of the flattened part is in the whole."""

import pytest
import torch

from zeroshard.checkpoint.fingerprint import _places
from zeroshard.tensor.part import Part

PARTS = [
    Part(0, 2, 4, (12, 5), 3),  # queries, keys, values of one linear map
    Part(1, 2, 4, (3, 12), 3),  # of GPT-2's, whose weight is (in, out)
    Part(1, 0, 3, (2, 12, 4), 2),  # gate and up of all experts
    Part(1, 2, 4, (2, 12), around=Part(0, 2, 4, (6, 12))),
    Part(0, 1, 3, (9,), 3),  # biases
]


@pytest.mark.parametrize("part", PARTS)
def test_every_stretch_has_its_boxes_and_places(part):
    whole = torch.arange(torch.Size(part.whole_shape).numel()).view(part.whole_shape)
    flat = part.of(whole).flatten()
    assert part.of(whole).shape == part.extents
    for start in range(flat.numel()):
        for stop in range(start, flat.numel() + 1):
            boxes = [box for box, _ in part.boxes(start, stop)]
            found = [whole[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=False))].flatten() for b in boxes]
            assert torch.equal(torch.cat([flat[:0], *found]), flat[start:stop])
            assert torch.equal(_places(start, stop, part), flat[start:stop])
