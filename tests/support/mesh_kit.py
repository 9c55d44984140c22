"""Groups of ranks in every way that a test can make them: threads that read each other's memory, and such that can not.

kind      plain     no groups
          groups    shard_size=k: HSDP, MiCS
          states    shard_size=k, replicate_optimizer=False: parameters in groups, states over all ranks
          hpz       zero_hpz_partition_size=k
          hosts     the ranks are on hosts of k: found
"""

from collections.abc import Callable
from typing import Any

from helpers import Outcome, Rounding, Task, reference, train
from private_ranks import PostOffice, PrivateComm

from zeroshard.testing import run_threads

KINDS = ("groups", "states", "hpz", "hosts")
NETWORKS = ("shared", "tagged", "ordered")


def options_of(kind: str, size: int) -> dict[str, Any]:
    """Options of zs.shard."""
    return {
        "plain": {},
        "groups": {"shard_size": size},
        "states": {"shard_size": size, "replicate_optimizer": False},
        "hpz": {"zero_hpz_partition_size": size},
        "hosts": {},
    }[kind]


def on_ranks(world_size: int, network: str, body: Callable[[int, dict], Any], node_size: int | None = None) -> list:
    """body(rank, options) on threads; options: comm, where ranks can not read each other's memory. Nothing stays unread."""
    office = PostOffice()

    def rank_run(rank: int) -> Any:
        if network == "shared":
            return body(rank, {})
        comm = PrivateComm(office, rank, world_size, network == "ordered")
        comm.nodes = [rank // (node_size or world_size) for rank in range(world_size)]
        return body(rank, {"comm": comm})

    results = run_threads(world_size, rank_run)
    assert not office.letters, "sent, but not received"
    return results


def trained(world_size: int, network: str, task: Task, cells: list[dict], node_size: int | None = None) -> list[list[Outcome]]:
    """outcomes[rank][cell]."""

    def on_rank(rank: int, options: dict) -> list[Outcome]:
        return [train(rank, task, **options, **cell) for cell in cells]

    return on_ranks(world_size, network, on_rank, node_size)


def in_order_of(kind: str, size: int, world_size: int, **rounding: Any) -> Rounding:
    """Where a reference rounds, and in which order it adds, so that it has the bits of `kind`."""
    two_hops = kind != "plain" and world_size // size > 1 and (kind == "groups" or size > 1)
    return Rounding(node=size if two_hops else 0, alike=two_hops and kind == "groups", **rounding)


def expected(task: Task, world_size: int, kind: str, size: int, precision: str, coefficients: list, scale: float) -> Outcome:
    """The bits that a run of `kind` has."""
    return reference(task, world_size, precision, coefficients, scale, in_order_of(kind, size, world_size))
