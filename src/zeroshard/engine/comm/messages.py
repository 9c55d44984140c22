"""Encoding of plain values as bytes, for messages between ranks. Decoding never runs code, whatever the bytes are.

    value  = tag (1 byte), then by tag: nothing (None, True, False) | 8 bytes (int, float) | length (8 bytes), content
    list, tuple, dict: the count stands for the length, values follow. error: class name, text, fields (values)

Strings, bytes, numbers, None, lists, tuples and dictionaries keep their type; instances of subclasses and NumPy scalars
are decoded as the plain type, tensors on the host. An error is decoded as the nearest class that this library
(or `_BUILTIN`) knows, without its traceback and cause; no constructor runs. Decoding allocates at most a multiple of the
number of bytes, whatever lengths they announce.
"""

from __future__ import annotations

import builtins
import itertools
import math
import struct
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import MalformedMessage, ZeroshardError

_MOST_NESTED = 64  # levels: bounds the recursion of `decode`, whatever the bytes are
_INT, _FLOAT, _LENGTH = struct.Struct("<cq"), struct.Struct("<cd"), struct.Struct("<cQ")
_BUILTIN = (  # classes of errors that keep their class, besides this library's own
    "OSError FileNotFoundError FileExistsError PermissionError NotADirectoryError IsADirectoryError TimeoutError "
    "ValueError TypeError KeyError IndexError AttributeError RuntimeError NotImplementedError MemoryError "
    "AssertionError"
).split()
_OS_FIELDS = ("errno", "strerror", "filename")  # attributes of an OSError that are not in its __dict__
# classes of plain values, a subclass before its base
_KINDS: dict[type, None] = dict.fromkeys(
    (type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, np.generic, torch.dtype, Tensor, BaseException)
)


def encode(value: object) -> bytes:
    """Return a value as bytes. Raises TypeError for a value that is not plain."""
    out = bytearray()
    _put(value, out, _MOST_NESTED)
    return bytes(out)


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given. Raises MalformedMessage for bytes that it did not make."""
    try:
        value, end = _take(data, 0, _MOST_NESTED)
    except MalformedMessage:
        raise
    except (struct.error, IndexError, UnicodeDecodeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _malformed(data, str(error)) from None
    if end != len(data):
        raise _malformed(data, f"{len(data) - end} bytes follow the value")
    return value


def _malformed(data: bytes, why: str) -> MalformedMessage:
    return MalformedMessage(
        f"{len(data)} bytes from another rank can not be decoded: {why}. Run the same version of zeroshard on every rank."
    )


def sendable(value: object) -> bool:
    """Return True if `encode` takes the value."""
    try:
        encode(value)
    except TypeError:
        return False
    return True


class Exchanging(Protocol):
    """A Comm, or what stands for one where a rank is alone."""

    def exchange(self, payload: bytes, label: str) -> list[bytes]: ...


def exchange_values(comm: Exchanging, value: object, label: str) -> list[Any]:
    """Return every rank's value, in rank order (collective)."""
    return [decode(part) for part in comm.exchange(encode(value), label)]


# -- writing -------------------------------------------------------------------------------------------------


def _put(value: Any, out: bytearray, depth: int) -> None:
    """Append the bytes of a value to `out`."""
    if depth == 0:
        raise TypeError(f"a value nested more than {_MOST_NESTED} levels deep can not be sent to other ranks: flatten it")
    kind: type | None = type(value)
    if kind not in _KINDS:  # a subclass is encoded as its plain base class
        kind = next((base for base in _KINDS if isinstance(value, base)), None)
    if kind is int:
        if -(1 << 63) <= value < 1 << 63:
            out += _INT.pack(b"i", value)
        else:
            _put_bytes(b"I", int(value).to_bytes(value.bit_length() // 8 + 1, "little", signed=True), out)
    elif kind is str:
        _put_bytes(b"s", value.encode("utf-8", "surrogatepass"), out)  # paths may hold surrogates
    elif kind is list or kind is tuple:
        _put_items(b"l" if kind is list else b"t", len(value), value, out, depth)
    elif kind is dict:
        _put_items(b"d", len(value), itertools.chain.from_iterable(value.items()), out, depth)
    elif kind is type(None) or kind is bool:
        out += b"N" if value is None else b"T" if value else b"F"
    elif kind is float:
        out += _FLOAT.pack(b"f", value)
    elif kind is bytes or kind is bytearray:
        _put_bytes(b"b", value, out)
    elif kind is np.generic:
        _put(value.item(), out, depth - 1)
    elif kind is torch.dtype:
        _put_bytes(b"y", str(value).removeprefix("torch.").encode(), out)
    elif kind is Tensor:
        _put_tensor(value, out, depth)
    elif kind is BaseException:
        _put_error(value, out, depth)
    else:
        found = type(value)
        raise TypeError(
            f"a {found.__module__}.{found.__qualname__} can not be sent to other ranks: expected None, numbers, strings, bytes, tensors, "
            "dtypes, or lists, tuples and dictionaries of these"
        )


def _put_bytes(tag: bytes, data: bytes | bytearray, out: bytearray) -> None:
    out += _LENGTH.pack(tag, len(data))
    out += data


def _put_items(tag: bytes, count: int, values: Iterable[object], out: bytearray, depth: int) -> None:
    out += _LENGTH.pack(tag, count)
    for each in values:
        if depth > 1 and type(each) is str:  # the usual cases, encoded here without a call
            content = each.encode("utf-8", "surrogatepass")
            out += _LENGTH.pack(b"s", len(content)) + content
        elif depth > 1 and type(each) is int and -(1 << 63) <= each < 1 << 63:
            out += _INT.pack(b"i", each)
        else:
            _put(each, out, depth - 1)


def _put_tensor(value: Tensor, out: bytearray, depth: int) -> None:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise TypeError(
            f"a tensor of layout {value.layout} and dtype {value.dtype} on {value.device} can not be sent to other ranks: expected a dense "
            "tensor with values, not quantized"
        )
    flat = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    out += b"x"
    _put((value.dtype, tuple(value.shape), raw), out, depth - 1)


def _put_error(error: BaseException, out: bytearray, depth: int) -> None:
    kinds = _error_kinds()
    kind = next((each for each in type(error).__mro__ if kinds.get(each.__name__) is each), None)
    text = str(error) if type(error) is not KeyError else str(error.args[0]) if error.args else ""
    if kind is None:  # no class that the reader knows: the text begins with the name of the class
        kind, text = ZeroshardError, f"{type(error).__name__}: {text}".removesuffix(": ")
    fields = {name: value for name, value in vars(error).items() if sendable(value)}
    if isinstance(error, OSError):
        values = {name: getattr(error, name) for name in _OS_FIELDS}
        fields |= {name: value for name, value in values.items() if value is not None and sendable(value)}
    out += b"e"
    _put((kind.__name__, text, fields), out, depth - 1)


# -- reading -------------------------------------------------------------------------------------------------


def _take(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Return the value that begins at byte `at`, and the offset of its end."""
    tag = data[at]
    if tag == 0x73:  # s
        end = at + 9 + _LENGTH.unpack_from(data, at)[1]
        if end <= len(data):
            return data[at + 9 : end].decode("utf-8", "surrogatepass"), end
    if tag == 0x69:  # i
        return _INT.unpack_from(data, at)[1], at + 9
    if tag in _FIXED:
        return _FIXED[tag], at + 1
    if tag == 0x66:  # f
        return _FLOAT.unpack_from(data, at)[1], at + 9
    if depth == 0:
        raise _malformed(data, f"its values are nested more than {_MOST_NESTED} levels deep")
    if tag in _MADE:
        parts, end = _take(data, at + 1, depth - 1)
        return _MADE[tag](*parts), end
    length, at = _LENGTH.unpack_from(data, at)[1], at + 9
    if length > len(data) - at:  # every value has at least one byte
        raise _malformed(data, f"{length} bytes or values are announced at byte {at}, which do not follow")
    if tag in _CONTENT:
        return _CONTENT[tag](data[at : at + length]), at + length
    if tag not in b"ltd":
        raise _malformed(data, f"no type of value has the tag {tag}")
    values: list[object] = []
    for _ in range(2 * length if tag == 0x64 else length):  # d
        if data[at] == 0x69:  # i: the usual case, decoded here without a call
            values.append(_INT.unpack_from(data, at)[1])
            at += 9
        else:
            value, at = _take(data, at, depth - 1)
            values.append(value)
    if tag == 0x64:
        return dict(zip(values[::2], values[1::2], strict=True)), at
    return (values if tag == 0x6C else tuple(values)), at


def _dtype(content: bytes) -> torch.dtype:
    found = getattr(torch, content.decode("ascii"), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {content!r:.40}")
    return found


_FIXED = {ord("N"): None, ord("T"): True, ord("F"): False}
_CONTENT: dict[int, Callable[[bytes], object]] = {
    ord("b"): bytes,
    ord("I"): lambda content: int.from_bytes(content, "little", signed=True),
    ord("y"): _dtype,
}


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: bytes) -> Tensor:
    numel = math.prod(shape)
    if min(shape, default=0) < 0 or numel * dtype.itemsize != len(raw):
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} does not take {len(raw)} bytes")
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _error(name: str, text: str, fields: dict[str, object]) -> BaseException:
    kind = _error_kinds().get(name)
    if kind is None or not all(type(key) is str for key in fields):
        raise ValueError(f"unknown class of error {name!r:.40}")
    base: Any = kind
    while base.__module__ != "builtins":  # the builtin base, whose __new__ makes an object without running __init__
        base = base.__base__
    error: BaseException = base.__new__(kind)
    error.args = (str(text),)
    if isinstance(error, OSError):
        for key in _OS_FIELDS:
            if key in fields:
                setattr(error, key, fields.pop(key))
    vars(error).update(fields)
    return error


_MADE: dict[int, Callable[..., object]] = {ord("x"): _tensor, ord("e"): _error}


def _error_kinds() -> dict[str, type[BaseException]]:
    """Return name -> class of all errors of this library, wherever they are defined, and of those in `_BUILTIN`."""
    found: dict[str, type[BaseException]] = {name: getattr(builtins, name) for name in _BUILTIN}
    queue = [ZeroshardError]
    while queue:
        kind = queue.pop()
        if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            found[kind.__name__] = kind
            queue += kind.__subclasses__()
    return found
