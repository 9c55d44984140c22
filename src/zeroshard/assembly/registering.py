"""`zeroshard.seam.register`: a program gives its own codec, resting place or communicator a name, which options then know."""

from __future__ import annotations

import inspect

from ..comm.backend_select import OWN_COMMS
from ..comm.wrapped import WrappedComm
from ..config import OWN_RESTS
from ..engine.rest import Rest
from ..errors import ConfigError
from ..packing.codecs import Codec
from ..utils.compression import OWN_CODECS
from ..utils.registry import Registered


def register(
    name: str, *, codec: Codec | None = None, rest: type[Rest] | None = None, comm: type[WrappedComm] | None = None
) -> Registered:
    """Give a codec, a resting place or a communicator a name, by which options of this process then know it, until `remove()` of
    what is returned. Every rank registers the same, before zs.shard; ranks that are threads of one process, once.

    codec: sends gradients or parameters: zero_quantized_gradients=name, zero_quantized_weights=name, zs.Compression(name, ...).
    rest: holds optimizer states and masters: offload_optimizer=name, zs.Offload(name, ...). The ledger and the check of the host's
        memory count its elements at their full size.
    comm: is put around the communicator of all ranks: comm=name, or ZEROSHARD_COMM.

    Raise ConfigError if the name is one of zeroshard's or registered already, if not one thing is given, or if the thing is none.
    """
    given = [thing for thing in (codec, rest, comm) if thing is not None]
    if len(given) != 1:
        raise ConfigError(f"register: expected one of codec=, rest= and comm=, got {len(given)} of them.")
    if codec is not None:
        if not isinstance(codec, Codec):
            raise ConfigError(f"register: codec: expected an object of a subclass of zeroshard.seam.Codec, got {codec!r}.")
        if type(codec).__module__.startswith("zeroshard.") or any(codec is OWN_CODECS[each] for each in OWN_CODECS):
            raise ConfigError(f"register: codec: {codec!r} has a name already: give an object of your own that has none.")
        OWN_CODECS.check(name)
        codec.name = name  # errors say it
        return OWN_CODECS.add(name, codec)
    what, kind, found, registry = ("rest", Rest, rest, OWN_RESTS) if rest is not None else ("comm", WrappedComm, comm, OWN_COMMS)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"register: {what}: expected a subclass of zeroshard.seam.{kind.__name__}, got {found!r}.")
    if inspect.isabstract(found):
        raise ConfigError(f"register: {what}: {found.__name__} lacks {', '.join(sorted(found.__abstractmethods__))}.")
    return registry.add(name, found)
