"""What ranks tell each other as bytes: plain values come back, and bytes that are none never do more than raise."""

import math
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zeroshard as zs
from zeroshard import errors
from zeroshard.checkpoint.source import Untrusted
from zeroshard.engine.comm.messages import decode, encode, sendable

KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.tuples(st.integers(), st.text()))
SCALARS = st.one_of(KEYS, st.floats(allow_nan=False), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)),
    max_leaves=30,
)


def kinds(value):
    """The types all through a value, in which 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return dict, [(kinds(key), kinds(each)) for key, each in value.items()]
    return (type(value), [kinds(each) for each in value]) if isinstance(value, (list, tuple)) else type(value)


@given(VALUES)
def test_a_value_comes_back_as_it_was(value):
    again = decode(encode(value))
    assert again == value and kinds(again) == kinds(value)


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=200), VALUES.map(encode)), st.data())
def test_bytes_that_are_no_value_raise_one_error(data, draw):
    """Random ones, and those of a value with some exchanged, cut off or added."""
    data = bytearray(data)
    for _ in range(draw.draw(st.integers(0, 4))):
        at = draw.draw(st.integers(0, len(data)))
        data[at : at + draw.draw(st.integers(0, 9))] = draw.draw(st.binary(max_size=9))
    try:
        value = decode(bytes(data))
    except zs.ZeroshardError as error:
        assert type(error) is errors.MalformedMessage and "from another rank can not be decoded" in str(error)
    else:  # another value
        assert sendable(value)


@pytest.mark.parametrize("tag", [b"s", b"b", b"l", b"t", b"d", b"I"])
@pytest.mark.parametrize("announced", [1 << 40, (1 << 64) - 1])
def test_what_is_announced_and_does_not_come_takes_no_memory(tag, announced):
    with pytest.raises(errors.MalformedMessage, match="are announced"):
        decode(tag + announced.to_bytes(8, "little") + bytes(100))


def test_tensors_that_are_announced_and_do_not_come_take_no_memory():
    for shape in ((1 << 40,), (-1, -1), (0, 1 << 62, 1 << 62), ("a",), 3):
        with pytest.raises(errors.MalformedMessage):
            decode(b"x" + encode((torch.float32, shape, b"1234")))


RELATIVES = [(np.int32(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), (torch.Size([2]), (2,))]


@pytest.mark.parametrize("value, plain", RELATIVES)
def test_relatives_come_as_the_plain_type(value, plain):
    again = decode(encode(value))
    assert again == plain and type(again) is type(plain)


def test_depth_is_bounded_on_both_sides():
    nested = []
    for _ in range(100):
        nested = [nested]
    with pytest.raises(TypeError, match="nested"):
        encode(nested)
    one = b"l" + (1).to_bytes(8, "little")
    for data in (one * 100_000 + b"N", b"x" * 100_000, b"e" * 100_000):
        with pytest.raises(errors.MalformedMessage):
            decode(data)


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_not_run(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(errors.MalformedMessage):
            decode(pickle.dumps(Harm(tmp_path / "made"), protocol))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [{1, 2}, Harm("x"), len, 1j, torch.zeros(2, device="meta"), [object()]])
def test_what_is_not_plain_is_refused_before_it_is_sent(value):
    assert not sendable(value)
    with pytest.raises(TypeError, match="can not be sent"):
        encode(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_tensors_come_back_bit_for_bit(dtype, shape):
    value = torch.ones(shape).mul(-1.5).to(dtype)
    again = decode(encode({"step": value.t() if value.dim() == 2 else value}))["step"]
    again = again.t() if value.dim() == 2 else again
    assert again.dtype is dtype and again.shape == value.shape and torch.equal(again, value)
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("error", [
    zs.ConfigError("what"), zs.PeerFailed(3, "why", "what"), zs.StallError(""), errors.HostMemoryError("a table"),
    errors.OffloadIOError("file", 4096, 5, "reading"), errors.CheckpointReadError("file", None, 2, "gone", 1),
    errors.CheckpointWriteError("path", 28, 100, None, "saving"), errors.CheckpointCorrupt("file", 1, "a", "b", "c"),
    errors.CheckpointNotFound("none"), Untrusted("no"), FileNotFoundError(2, "No such file", "name"), OSError("odd"),
    KeyError("key"), ValueError("two", "words"), TypeError(),
], ids=lambda error: type(error).__name__)  # fmt: skip
def test_errors_come_back_with_class_text_and_fields(error):
    again = decode(encode(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
    for name in ("errno", "filename", "rank", "offset"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_errors_of_unknown_classes_come_as_the_nearest_that_is_known():
    class Mine(zs.ConfigError):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")
            self.one, self.two = one, Harm(two)

    again = decode(encode(Mine("x", "y")))
    assert type(again) is zs.ConfigError and str(again) == "x and y" and vars(again) == {"one": "x"}
    again = decode(encode(ZeroDivisionError("by nothing")))
    assert type(again) is zs.ZeroshardError and str(again) == "ZeroDivisionError: by nothing"
    for name in ("SystemExit", "Popen", "__import__", "ZeroDivisionError"):
        with pytest.raises(errors.MalformedMessage):
            decode(b"e" + encode((name, "text", {})))
