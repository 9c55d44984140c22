"""Slices: partition activations over ranks that hold the same activations, and gather them (Pa; ZeRO, arXiv 1910.02054, 6.1).

    batch x seq x hidden = numel      | rank 0 | rank 1 | rank 2 |pad|      each (shard_numel,)
    backward: one all-gather of a block's input before it is recomputed

Ranks of a model-parallel group compute with the same activations, so each keeps 1/N. They pack and unpack in the same
order. Once for each forward, when its first checkpoint is unpacked, they exchange a short message with the shapes of all its
checkpoints: ranks whose shapes differ raise before the first gather, in which one would wait for data that no peer has.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ..errors import CollectiveMismatch
from ..seam import Collective, DirectComm, Ledger, StagingPool
from ..tiers.io import bytes_of

GATHERS = "gather activations"  # kind of traffic in the ledger
_ALIGN_NUMEL = 32  # slices start at multiples of this, as shards of parameters do
_STAGING, _STAGING_LIMIT, _STAGING_ALIGN = 2, 3, 64  # staging buffers: number, most, alignment of a rank's part in bytes


class Slices:
    """Partitioning of activations over the ranks of `comm`. comm None: this rank keeps everything."""

    def __init__(self, comm: DirectComm | None, ledger: Ledger, check_equal: bool) -> None:
        self.comm = comm if comm is not None and comm.world_size > 1 else None
        self.ledger, self.check_equal = ledger, check_equal
        self.world_size = 1 if self.comm is None else self.comm.world_size
        self.rank = 0 if self.comm is None else self.comm.rank
        self.gathers = 0
        self._tag = 0 if self.comm is None else self.comm.new_serial() << 20
        self._staging: StagingPool | None = None
        self._works: list[Collective] = []
        self._forwards: dict[int, list[str]] = {}  # forward -> its packed tensors, until ranks have compared them

    def cut(self, flat: Tensor) -> tuple[Tensor, int]:
        """Return this rank's slice of a flat activation (numel,), and shard_numel: the slices of the last ranks may have fewer."""
        if self.comm is None:
            return flat, flat.numel()
        shard_numel = -(-flat.numel() // (self.world_size * _ALIGN_NUMEL)) * _ALIGN_NUMEL
        return flat[self.rank * shard_numel : (self.rank + 1) * shard_numel], shard_numel

    def gather(self, mine: Tensor, name: str) -> Tensor:
        """All-gather slices (shard_numel,) into new memory (world * shard_numel,) (collective).

        The caller may reuse the memory of `mine` when this returns.
        """
        if self.comm is None:
            return mine.clone()
        whole = torch.empty(self.world_size * mine.numel(), dtype=mine.dtype, device=mine.device)
        self.gathers += 1
        label = f"activation checkpoint {name}"
        if self.comm.shares_memory:
            if self._staging is None or self._staging.nbytes < mine.nbytes:
                # collective: all ranks pack equal sizes, so all replace the pool in the same call
                self.close(drain=True)
                nbytes = -(-mine.nbytes // (self.world_size * _STAGING_ALIGN)) * self.world_size * _STAGING_ALIGN
                self._staging = StagingPool(self.comm, self.ledger, nbytes, _STAGING, _STAGING_LIMIT)
            pool = self._staging
            number, region = pool.take(mine.numel(), mine.dtype, whole=False)
            region.tensor.copy_(mine)
            work = self.comm.gather(whole, region, label, tag=self._tag)
            pool.give(number, work)
            self._works = [*(w for w in self._works if not w.drained()), work]  # peers may still read this rank's region
            work.wait()
        else:
            work = self.comm.gather(whole, self.comm.private(mine, whole=False), label, tag=self._tag)
            work.wait()
            work.drain()
        self.ledger.sent(GATHERS, work.sent, name)
        return whole

    def close(self, drain: bool = False) -> None:
        """Free the staging buffers; `gather` makes new ones. drain: after all collectives that use them are over."""
        for work in self._works if drain else ():
            work.drain()
        self._works = []
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    # -- agreement -------------------------------------------------------------------------------------------

    def record(self, forward: int, name: str, tensor: Tensor) -> None:
        """Note a packed tensor of a forward, for `agree`."""
        if self.comm is None:
            return
        text = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        if self.check_equal:
            content = bytes_of(tensor.detach().cpu().contiguous())
            text += f" with the content {hashlib.blake2b(content, digest_size=8).hexdigest()}"
        self._forwards.setdefault(forward, []).append(f"{name}: {text}")

    def forget(self) -> None:
        """Drop the notes of all forwards, since no checkpoint is left."""
        self._forwards.clear()

    def agree(self, forward: int) -> bool:
        """Check, once for each forward, that all ranks packed the same tensors (collective). Return whether this call checked.

        Raise CollectiveMismatch on every rank, with the first difference.
        """
        mine = self._forwards.pop(forward, None)
        if self.comm is None or mine is None:
            return False
        payload = "\n".join([str(self.gathers), *mine])  # equal counts show that all ranks have done the same gathers
        everyone = self.comm.exchange(payload.encode(), "activation checkpoints of a forward")
        parts = [part.decode().split("\n") for part in everyone]
        counts = [int(part[0]) for part in parts]
        if len(set(counts)) > 1:
            # an exception ended an earlier backward at different points: a new tag keeps its messages from being received
            self.gathers = max(counts)
            self._tag += 1
            self.close()
        packed = [part[1:] for part in parts]
        for index in range(max(map(len, packed))):
            found = [tensors[index] if index < len(tensors) else "none" for tensors in packed]
            if len(set(found)) > 1:
                places = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))
                raise CollectiveMismatch(
                    f"activation checkpoint {index + 1} of a forward differs between the ranks of its partition group "
                    f"({places}). These ranks must compute with the same activations: give them the same batch, or leave "
                    "out partition= if this is a data-parallel group."
                )
        return True
