"""Bytes that a rank sends, inside of its node and between nodes, on 8 x 8 and 128 x 8 imagined ranks: the closed formulas.

R nodes of S ranks, N = R S. Of one flat buffer of n elements, padding counted, a rank holds s = n / N (in groups s = n / S).
v, g: bytes an element of values and gradients. P(m): bytes of m packed elements. A rank sends, inside and between nodes:

    gather, one hop      (S-1) s v         (R-1) S s v       each rank to each
    gather, two hops     (S-1) R s v       (R-1) s v         to its place on other nodes, then R shards to its node
    secondary shard      (S-1) R s v       0
    in groups of S       (S-1) s v         0
    reduce, one hop      (S-1) s g         (R-1) S s g
    reduce, two hops     (S-1) R s g       (R-1) s g
    reduce, groups of S  (S-1) s g         2 (R-1) ceil(s / R) g     a part is summed, and gathered

Packed: P(m) in the place of m v, or m g, for each of what is sent, m being s, R s or ceil(s / R).
"""

import math
from pathlib import Path

import pytest
import torch
import volumes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.engine.runtime import runtime_of

WORLDS = pytest.mark.parametrize("nodes, place", [(8, 8), (128, 8)], ids=["8x8", "128x8"])
HALF = 2  # bytes an element of bf16, of values and of gradients


class Block(nn.Module):
    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim) if bias else nn.Identity()
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=bias), nn.Linear(2 * dim, dim, bias=bias)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


class Wire(FakeComm):
    """Counts what is handed to collectives of one hop, of the world and of its subgroups: nothing else is sent."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.total = [0, 0]

    def _count(self, work):
        self.total[:] = [sum(pair) for pair in zip(self.total, work.sent, strict=True)]
        return work

    def gather(self, *args, **options):
        return self._count(super().gather(*args, **options))

    def _collect(self, *args):  # of a reduction, or of packed messages
        return self._count(super()._collect(*args))


class Run:
    """Two blocks, sharded over imagined ranks. dim: 500 has padding everywhere, 32768 nowhere (without biases)."""

    def __init__(self, nodes: int, place: int, dim: int = 500, **options) -> None:
        self.comm = Wire(0, nodes * place, node_size=place)
        self.model = nn.Sequential(*(Block(dim, bias=dim == 500) for _ in range(2)))
        optimizer = torch.optim.AdamW(self.model.parameters())
        options = {"stage": 3, "precision": "bf16", "units": ("Block",), **options}
        self.model, self.optimizer = zs.shard(self.model, optimizer, comm=self.comm, **options)
        self.runtime, self.x = runtime_of(self.model), torch.zeros(2, dim, dtype=torch.bfloat16)

    def step(self, micro: int = 1) -> dict[str, tuple[int, int, int]]:
        """Kind -> calls, bytes inside, bytes between; the same bytes went into collectives of one hop."""
        self.runtime.tiers.ledger.traffic.clear()
        self.comm.total[:] = [0, 0]
        for _ in range(micro):
            self.model(self.x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        traffic = self.runtime.tiers.ledger.traffic
        sent = {kind: (t.count, t.nbytes - t.between, t.between) for kind, t in traffic.items()}
        assert tuple(self.comm.total) == tuple(sum(part) for part in zip(*(each[1:] for each in sent.values()), strict=True))
        return sent


# -- bytes of m packed elements, in units of 64 ------------------------------------------------------------------------


def padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def int8(m: int) -> int:  # fp8 is the same
    return padded(4 * math.ceil(m / 256) + -(-m // 4) * 4)


def int4(m: int) -> int:
    return padded(4 * math.ceil(m / 256) + -(-m // 8) * 4)


def top_k(m: int) -> int:  # 1%: a value of 4 bytes, a place of 2 or 4
    return padded(-(-math.ceil(0.01 * m) * (6 if m <= 1 << 16 else 8) // 4) * 4)


def plain(m: int) -> int:
    return m * HALF


# -- the formulas of the docstring: shard_numel s -> bytes inside, between ----------------------------------------------


def one_hop(s, nodes, place, size):
    return (place - 1) * size(s), (nodes - 1) * place * size(s)


def two_hops(s, nodes, place, size):
    return (place - 1) * size(nodes * s), (nodes - 1) * size(s)


def two_hops_of_packed(s, nodes, place, size):  # a gather packs once: R packed shards lie side by side
    return (place - 1) * nodes * size(s), (nodes - 1) * size(s)


def secondary(s, nodes, place, size):
    return (place - 1) * nodes * size(s), 0


def in_groups(s, nodes, place, size):
    return (place - 1) * size(s), 0


def over_groups(s, nodes, place, size):
    part = math.ceil(s / nodes)
    return (place - 1) * size(s), (nodes - 1) * (size(part) + plain(part))


NODES = {}  # what FakeComm tells of nodes makes two hops
FLAT, HPZ, MICS = {"hierarchical": False}, {"zero_hpz_partition_size": 8}, {"shard_size": 8}
HSDP_BOTH = {"shard_size": 8, "replicate_optimizer": False}
ONE, TWO, KEPT, GROUPS = (
    (one_hop, one_hop, one_hop),  # first gather, second gather, reduction
    (two_hops_of_packed, two_hops_of_packed, two_hops),
    (two_hops_of_packed, secondary, two_hops),
    (in_groups, in_groups, over_groups),
)
ROWS = {  # options, formulas, bytes of packed values and gradients
    "plain": (FLAT, ONE, plain, plain),
    "two hops": (NODES, TWO, plain, plain),
    "MiCS": (MICS, GROUPS, plain, plain),
    "hpZ": (HPZ, KEPT, plain, plain),
    "optimizer over both axes": (HSDP_BOTH, KEPT, plain, plain),
    "qwZ, one hop": (FLAT | {"zero_quantized_weights": "int8"}, ONE, int8, plain),
    "qwZ": ({"zero_quantized_weights": "int8"}, TWO, int8, plain),
    "qwZ fp8": ({"zero_quantized_weights": "fp8"}, TWO, int8, plain),
    "qwZ int4": ({"zero_quantized_weights": "int4"}, TWO, int4, plain),
    "qgZ, one hop": (FLAT | {"zero_quantized_gradients": "int8"}, ONE, plain, int8),
    "qgZ": ({"zero_quantized_gradients": "int8"}, TWO, plain, int8),
    "qgZ int4": ({"zero_quantized_gradients": "int4"}, TWO, plain, int4),
    "top-k, one hop": (FLAT | {"zero_quantized_gradients": "top_k"}, ONE, plain, top_k),
    "top-k": ({"zero_quantized_gradients": "top_k"}, TWO, plain, top_k),
    "MiCS, qwZ, qgZ": (MICS | {"zero_quantized_weights": "int8", "zero_quantized_gradients": "int8"}, GROUPS, int8, int8),
    "hpZ, qwZ": (HPZ | {"zero_quantized_weights": "int8"}, KEPT, int8, plain),
    "hpZ, qgZ": (HPZ | {"zero_quantized_gradients": "int8"}, KEPT, plain, int8),
    "all": (HPZ | {"zero_quantized_weights": "int8", "zero_quantized_gradients": "int4"}, KEPT, int8, int4),
}


def travels_packed(group) -> bool:
    return all(spec.name.endswith("weight") and "norm" not in spec.name for spec in group.specs)


def added(pairs) -> tuple[int, int]:
    return tuple(map(sum, zip(*pairs, strict=True)))


@WORLDS
@pytest.mark.parametrize("row", ROWS)
def test_stage_3_sends_exactly_the_bytes_of_the_formulas(row, nodes, place):
    options, formulas, values, gradients = ROWS[row]
    with FakeTensorMode():
        run = Run(nodes, place, **options)
        groups = run.runtime.groups
        assert len(groups) == (2 if values is gradients is plain else 4)  # matrices, and what is exempt
        for _ in range(2 if nodes == 8 else 1):  # the first gathers after a step are the same in all steps
            sent = run.step()
            first, again, reduce = (
                added(
                    formula(group.layout.shard_numel, nodes, place, size if travels_packed(group) else plain) for group in groups
                )
                for formula, size in zip(formulas, (values, values, gradients), strict=True)
            )
            assert sent == {"gather": (2 * len(groups), *added((first, again))), "reduce": (len(groups), *reduce)}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("row", ["plain", "two hops", "MiCS", "qwZ", "qgZ int4"])
def test_other_stages_gather_once(stage, row):
    """Stage 0 gathers gradients, in fp32 and plain; stages 1 and 2 parameters, which travel packed if they do at stage 3."""
    nodes = place = 8
    options, (first, _, reduce), values, gradients = ROWS[row]
    if stage == 0 and values is not plain:
        with FakeTensorMode(), pytest.raises(zs.ConfigError, match="stage 1, 2 or 3"):
            Run(nodes, place, stage=stage, **options)
        return
    size = (lambda m: 4 * m) if stage == 0 else values
    exempt = (lambda m: 4 * m) if stage == 0 else plain
    with FakeTensorMode():
        run = Run(nodes, place, stage=stage, **options)
        groups = run.runtime.groups
        for _ in range(2):
            sent = run.step()
            once = added(first(g.layout.shard_numel, nodes, place, size if travels_packed(g) else exempt) for g in groups)
            sums = added(reduce(g.layout.shard_numel, nodes, place, gradients if travels_packed(g) else plain) for g in groups)
            assert sent == {"gather": (len(groups), *once), "reduce": (len(groups), *sums)}


@WORLDS
@pytest.mark.parametrize("options, formulas", [(FLAT, ONE), (NODES, TWO), (MICS, GROUPS)], ids=["one hop", "two hops", "MiCS"])
def test_low_rank_sends_two_all_reduces_of_thin_factors(options, formulas, nodes, place):
    """r (rows + columns) fp32 values of a matrix, each all-reduce padded to whole shards, and a gather after each reduction."""
    gather, _, reduce = formulas
    shards, rank = (place if options == MICS else nodes * place), 4
    fp32 = lambda m: 4 * m  # noqa: E731
    with FakeTensorMode():
        run = Run(nodes, place, zero_quantized_gradients="low_rank", **options)
        sent = run.step()
        expected = []
        for group in run.runtime.groups:
            if not travels_packed(group):
                expected.append(reduce(group.layout.shard_numel, nodes, place, plain))
                continue
            shapes = [spec.shape for spec in group.specs]
            between = group.layout.numel - sum(n * m for n, m in shapes)  # padding travels with the first
            for numel in (rank * sum(n for n, _ in shapes) + between, rank * sum(m for _, m in shapes)):
                part = -(-numel // (32 * shards)) * 32
                across = reduce(part, nodes, place, fp32)
                if options == MICS:
                    across = across[0], 2 * (nodes - 1) * math.ceil(part / nodes) * 4
                expected += [across, gather(part, nodes, place, fp32)]
        assert sent["reduce"] == (len(run.runtime.groups), *added(expected))


@pytest.mark.parametrize("row", [*ROWS, "low rank"])
def test_the_report_says_in_advance_what_a_step_sends(row):
    """Theory and measurement are the same number where nothing is padded."""
    options = ROWS[row][0] if row in ROWS else {"zero_quantized_gradients": "low_rank"}
    with FakeTensorMode():
        run = Run(8, 8, dim=1 << 15, **options)
        theory = zs.report(run.model)
        run.step()
        report = zs.report(run.model)
        assert report.measured_nbytes_per_step == report.theory_nbytes_per_step == theory.theory_nbytes_per_step
        between = report.measured_between_nbytes_per_step, theory.theory_between_nbytes_per_step
        assert between[0] == between[1] == report.theory_between_nbytes_per_step


@WORLDS
def test_what_crosses_between_nodes_falls_from_3_m_to_three_quarters_of_m(nodes, place):
    """ZeRO++, arXiv 2306.10209, table 1. M: bytes of the model in 16 bits; by node, of which (R-1)/R go to others.

    One hop sends 3 M a *rank*, S times as much a node. Steps are the 4 bytes for each 256 elements that the table leaves out.
    """
    with FakeTensorMode():

        def sent(**options) -> dict[str, float]:
            run = Run(nodes, place, dim=1 << 15, **options)
            m = sum(group.layout.true_numel for group in run.runtime.groups) * HALF * (nodes - 1) / nodes
            return {kind: place * between / m for kind, (_, _, between) in run.step().items()}  # a node's

        steps = 4 / 256 / HALF
        int8, int4 = "int8", "int4"
        assert sent(**FLAT) == {"gather": 2 * place, "reduce": place}
        assert sent() == {"gather": 2, "reduce": 1}
        assert sent(**HPZ) == {"gather": 1 + 0, "reduce": 1}
        assert sent(zero_quantized_weights=int8) == {"gather": 2 * (0.5 + steps), "reduce": 1}
        assert sent(zero_quantized_gradients=int4) == {"gather": 2, "reduce": 0.25 + steps}
        together = sent(zero_quantized_weights=int8, zero_quantized_gradients=int4, **HPZ)
        assert together == {"gather": 0.5 + steps + 0, "reduce": 0.25 + steps}
        assert sent(shard_size=place) == {"gather": 0, "reduce": 2}  # a reduction and a gather of the mean, no parameters


@pytest.mark.parametrize("weights", [None, "int8"])
def test_further_micro_batches_are_served_by_secondary_shards(weights):
    """Once between nodes for each step, whatever the number of gathers; evaluation after it as well."""
    nodes = place = 8
    with FakeTensorMode():
        run = Run(nodes, place, dim=1 << 15, zero_quantized_weights=weights, **HPZ)
        numel = sum(group.layout.shard_numel for group in run.runtime.groups)
        for micro in (1, 3):
            count, _, between = run.step(micro)["gather"]
            assert count == 2 * micro * len(run.runtime.groups) and between == (nodes - 1) * (int8 if weights else plain)(numel)
        run.runtime.tiers.ledger.traffic.clear()
        with torch.no_grad():
            for expected in (1, 0, 0):  # the first after a step
                before = run.runtime.tiers.ledger.traffic["gather"].between
                run.model(run.x)
                again = run.runtime.tiers.ledger.traffic["gather"].between - before
                assert again == expected * (nodes - 1) * (int8 if weights else plain)(numel)


def test_all_travels_plain_until_the_warm_up_is_over():
    nodes = place = 8
    packs = zs.Compression("int8", warmup_steps=2)
    with FakeTensorMode():
        plainly = Run(nodes, place, dim=1 << 15, **HPZ).step()
        run = Run(nodes, place, dim=1 << 15, zero_quantized_weights=packs, zero_quantized_gradients=packs, **HPZ)
        assert [run.step() == plainly for _ in range(4)] == [True, True, False, False]
        assert run.step()["reduce"][2] == (nodes - 1) * sum(int8(group.layout.shard_numel) for group in run.runtime.groups)


KEPT_ROWS = {  # options -> bytes of secondary shards, of what packing has lost, of s elements a rank (groups: of n / S)
    "hpZ": (HPZ, lambda s, nodes, place: (nodes * plain(s), 0)),
    "hpZ, qwZ": (HPZ | {"zero_quantized_weights": "int8"}, lambda s, nodes, place: (nodes * int8(s), 0)),
    "one hop": (FLAT, lambda s, nodes, place: (0, 4 * place * nodes * s)),
    "two hops": (NODES, lambda s, nodes, place: (0, 4 * place * nodes * s + 4 * nodes * s)),
    "MiCS": (MICS, lambda s, nodes, place: (0, 4 * place * s + 4 * nodes * math.ceil(s / nodes))),
}


@pytest.mark.parametrize("row", KEPT_ROWS)
def test_secondary_shards_and_error_feedback_take_what_the_formulas_say(row):
    nodes, place = 8, 8
    options, formula = KEPT_ROWS[row]
    if "hpZ" not in row:
        options = options | {"zero_quantized_gradients": zs.Compression("int4", error_feedback=True)}
    with FakeTensorMode():
        run = Run(nodes, place, dim=1 << 15, **options)
        run.step()
        report, groups = zs.report(run.model), run.runtime.groups
        expected = added(formula(group.layout.shard_numel, nodes, place) for group in groups)
        assert (report.secondary, report.lost) == expected


def test_low_rank_keeps_errors_and_one_factor():
    with FakeTensorMode():
        run = Run(8, 8, zero_quantized_gradients="low_rank")
        run.step()
        shapes = [spec.shape for group in run.runtime.groups if travels_packed(group) for spec in group.specs]
        assert zs.report(run.model).lost == 4 * sum(n * m + 4 * m for n, m in shapes)


def test_the_document_shows_what_is_counted():
    """Made anew by `volumes.table`."""
    assert volumes.table(8, 8) in (Path(__file__).parents[3] / "docs" / "learn" / "network.md").read_text()
    for row in volumes.rows(8):
        found, theory = volumes.measure(row, 128, 8), [share(128, 8) for share in row.volumes]
        between = sum(found.between.values())
        sent = [nbytes / (2 * found.numel) for nbytes in (between, found.sent_nbytes - between)]
        assert sent == pytest.approx(theory, rel=1e-3), row.name
