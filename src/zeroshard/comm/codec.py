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
import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import MalformedMessage, ZeroshardError

_MOST_NESTED = 64  # levels: bounds the recursion of `decode`, whatever the bytes are
_INT, _FLOAT, _LENGTH = struct.Struct("<cq"), struct.Struct("<cd"), struct.Struct("<cQ")
_BUILTIN = (  # classes of errors that keep their class, besides this library's own
    "OSError FileNotFoundError FileExistsError PermissionError NotADirectoryError IsADirectoryError TimeoutError "
    "ValueError TypeError KeyError IndexError AttributeError RuntimeError NotImplementedError MemoryError "
    "AssertionError"
).split()
_OS_FIELDS = ("errno", "strerror", "filename")  # attributes of an OSError that are not in its __dict__


def encode(value: Any) -> bytes:
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


def sendable(value: Any) -> bool:
    """Return True if `encode` takes the value."""
    try:
        encode(value)
    except TypeError:
        return False
    return True


def exchange_values(comm: Any, value: Any, label: str) -> list[Any]:
    """Return every rank's value, in rank order (collective)."""
    return [decode(part) for part in comm.exchange(encode(value), label)]


# -- writing -------------------------------------------------------------------------------------------------


def _put(value: Any, out: bytearray, depth: int) -> None:
    if depth == 0:
        raise TypeError(f"a value nested more than {_MOST_NESTED} levels deep can not be sent to other ranks: flatten it")
    put = _PUT.get(type(value))
    if put is None:  # a subclass is encoded as its plain base class
        put = next((put for kind, put in _PUT.items() if isinstance(value, kind)), None)
    if put is None:
        kind = type(value)
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} can not be sent to other ranks: expected None, numbers, strings, bytes, tensors, "
            "dtypes, or lists, tuples and dictionaries of these"
        )
    put(value, out, depth)


def _put_int(value: int, out: bytearray, depth: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += _INT.pack(b"i", value)
    else:
        _put_bytes(b"I", int(value).to_bytes(value.bit_length() // 8 + 1, "little", signed=True), out)


def _put_items(tag: bytes, values: Any, out: bytearray, depth: int) -> None:
    out += _LENGTH.pack(tag, len(values))
    for each in values:
        if type(each) is str:  # the usual case, encoded here without a call
            content = each.encode("utf-8", "surrogatepass")
            out += _LENGTH.pack(b"s", len(content)) + content
        else:
            put = _PUT.get(type(each), _put) if depth > 1 else _put
            put(each, out, depth - 1)


def _put_dict(value: dict, out: bytearray, depth: int) -> None:
    out += _LENGTH.pack(b"d", len(value))
    for item in value.items():
        for each in item:
            _put(each, out, depth - 1)


def _put_bytes(tag: bytes, data: Any, out: bytearray) -> None:
    out += _LENGTH.pack(tag, len(data))
    out += data


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


_PUT: dict[type, Callable[[Any, bytearray, int], None]] = {
    type(None): lambda value, out, depth: out.extend(b"N"),
    bool: lambda value, out, depth: out.extend(b"T" if value else b"F"),
    int: _put_int,
    float: lambda value, out, depth: out.extend(_FLOAT.pack(b"f", value)),
    str: lambda value, out, depth: _put_bytes(b"s", value.encode("utf-8", "surrogatepass"), out),  # paths may hold surrogates
    bytes: lambda value, out, depth: _put_bytes(b"b", value, out),
    bytearray: lambda value, out, depth: _put_bytes(b"b", value, out),
    list: lambda value, out, depth: _put_items(b"l", value, out, depth),
    tuple: lambda value, out, depth: _put_items(b"t", value, out, depth),
    dict: _put_dict,
    np.generic: lambda value, out, depth: _put(value.item(), out, depth - 1),
    torch.dtype: lambda value, out, depth: _put_bytes(b"y", str(value).removeprefix("torch.").encode(), out),
    Tensor: _put_tensor,
    BaseException: _put_error,
}


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
    values: list[Any] = []
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


def _big_int(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


def _dtype(content: bytes) -> torch.dtype:
    found = getattr(torch, content.decode("ascii"), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {content!r:.40}")
    return found


_FIXED = {ord("N"): None, ord("T"): True, ord("F"): False}
_CONTENT: dict[int, Callable[[bytes], Any]] = {ord("b"): bytes, ord("I"): _big_int, ord("y"): _dtype}


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: bytes) -> Tensor:
    numel = math.prod(shape)
    if min(shape, default=0) < 0 or numel * dtype.itemsize != len(raw):
        raise ValueError(f"a tensor of shape {shape} and dtype {dtype} does not take {len(raw)} bytes")
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _error(name: str, text: str, fields: dict[str, Any]) -> BaseException:
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


_MADE: dict[int, Callable[..., Any]] = {ord("x"): _tensor, ord("e"): _error}


def _error_kinds() -> dict[str, type[BaseException]]:
    """Return name -> class of all errors of this library, wherever they are defined, and of those in `_BUILTIN`."""
    found: dict[str, type[BaseException]] = dict(_builtin_kinds())
    queue = [ZeroshardError]
    while queue:
        kind = queue.pop()
        if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            found[kind.__name__] = kind
            queue += kind.__subclasses__()
    return found


@functools.cache
def _builtin_kinds() -> dict[str, type[BaseException]]:
    return {name: getattr(builtins, name) for name in _BUILTIN}
