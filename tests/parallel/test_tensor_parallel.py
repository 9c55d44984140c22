"""Models that PyTorch's tensor parallelism has cut, under zs.shard: equal to one process at every stage; verbs, tiers, bad input.

Four processes, dp 2 x tp 2, do everything in one world; each test looks at what its cell found.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import seeding
from sample import asked
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import zeroshard as zs
from zeroshard.comm.launch import run_processes

WORLD, STEPS, TOKENS, DIM = 4, 3, 12, 8
TOLERANCE = 5e-6  # tp adds in another order


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def model_of(tied: bool) -> Net:
    with seeding(0):
        return Net(tied)


def cut(model: Net, mesh, sequence: bool, tied: bool) -> Net:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    along = Shard(1) if sequence else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(input_layouts=along),
        "blocks.*.down": RowwiseParallel(output_layouts=along),
    }
    if sequence:
        plan |= {"norm": SequenceParallel(), "blocks.*.norm": SequenceParallel()}
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embedding.weight
    return model


def batch(step: int, micro: int, place: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + place)
    return tuple(torch.randint(0, TOKENS, (2, 6), generator=generator) for _ in range(2))


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def one_process(model: Net, micros: int, clip: float | None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    optimizer, losses, norms = torch.optim.AdamW(model.parameters(), lr=1e-2), [], []
    for step in range(STEPS):
        for micro in range(micros):
            for place in range(2):
                loss = model(*batch(step, micro, place)) / 2
                loss.backward()
                losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.clone() for name, value in model.state_dict().items()}


class Cells:
    """What a rank does; every method ending in _cell gives (name, a function that asserts)."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.place = self.mesh["dp"].get_local_rank()

    def fresh(self, sequence: bool = False, tied: bool = False) -> tuple[Net, Net, torch.optim.Optimizer]:
        plain = model_of(tied)
        model = cut(copy.deepcopy(plain), self.mesh["tp"], sequence, tied)
        return plain, model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def backward(self, model: nn.Module, step: int, micro: int = 0) -> float:
        loss = whole(model(*batch(step, micro, self.place)))
        loss.backward()
        return loss.item()

    def equal(self, stage: int, sequence: bool, tied: bool, micros: int = 1, clip: float | None = None, **options) -> None:
        plain, model, optimizer = self.fresh(sequence, tied)
        losses, norms, weights = one_process(plain, micros, clip)
        options = {"mesh": self.mesh, **options}
        model, optimizer = zs.shard(model, optimizer, stage=stage, max_grad_norm=clip, **options)
        for step in range(STEPS):
            for micro in range(micros):
                mine = self.backward(model, step, micro)
                assert abs(mine / 2 - losses[2 * (step * micros + micro) + self.place]) < TOLERANCE
            optimizer.step()
            assert abs(optimizer.last_step.grad_norm - norms[step]) < 10 * TOLERANCE
            optimizer.zero_grad()
        found = zs.full_state_dict(model)
        for name, value in weights.items():
            assert (found[name] - value).abs().max() < TOLERANCE, name
        self.replicas_are_equal_bits(model)
        zs.close(model)
        assert torch.equal(model.blocks[0].up.weight.full_tensor(), found["blocks.0.up.weight"])
        assert not tied or model.head.weight is model.embedding.weight

    def replicas_are_equal_bits(self, model: nn.Module) -> None:
        """Norms are alike along tp."""
        mine = model.norm.weight.full_tensor() if hasattr(model.norm.weight, "full_tensor") else model.norm.weight.detach()
        everyone = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(everyone, mine.contiguous(), group=self.mesh["tp"].get_group())
        assert torch.equal(*everyone)

    def bf16(self, stage: int) -> None:
        """As the same model without tp, rounding apart: masters move by the same steps."""
        found = []
        for distributed in (True, False):
            plain, model, optimizer = self.fresh(sequence=True)
            if not distributed:
                model, optimizer = plain, torch.optim.AdamW(plain.parameters(), lr=1e-2)
            where = {"mesh": self.mesh} if distributed else {"comm": self.mesh["dp"]}
            model, optimizer = zs.shard(model, optimizer, stage=stage, precision="bf16", **where)
            for step in range(STEPS):
                self.backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
            found.append((optimizer.last_step.grad_norm, zs.full_state_dict(model, masters=True)))
            zs.close(model)
        (norm, mine), (wanted_norm, wanted) = found
        assert abs(norm - wanted_norm) < 0.02 * wanted_norm
        assert all(value.dtype == torch.float32 for value in mine.values())
        moved = torch.cat([(wanted[name] - value).flatten() for name, value in model_of(False).state_dict().items()])
        apart = torch.cat([(wanted[name] - mine[name]).flatten() for name in wanted])
        assert apart.norm() < 0.1 * moved.norm()

    def torch_clips(self, stage: int) -> None:
        plain, model, optimizer = self.fresh(sequence=True)
        _, norms, weights = one_process(plain, 1, 0.3)
        model, optimizer = zs.shard(model, optimizer, mesh=self.mesh, stage=stage)
        for step in range(STEPS):
            self.backward(model, step)
            params = [p for name, p in model.named_parameters() if stage or "down.bias" not in name]
            norm = whole(torch.nn.utils.clip_grad_norm_(params, 0.3))
            assert stage == 0 or abs(norm.item() - norms[step]) < 10 * TOLERANCE
            optimizer.step()
            optimizer.zero_grad()
        found = zs.full_state_dict(model)
        assert all((found[name] - value).abs().max() < (TOLERANCE if stage else 1e-2) for name, value in weights.items())
        zs.close(model)

    def verbs(self, stage: int) -> None:
        plain, model, optimizer = self.fresh()
        model, optimizer = zs.shard(model, optimizer, mesh=self.mesh, stage=stage)
        self.backward(model, 0)
        gradients = zs.full_gradients(model)
        for place in range(2):
            (plain(*batch(0, 0, place)) / 2).backward()
        optimizer.step()
        states = zs.full_optimizer_state(model)
        for name, param in plain.named_parameters():
            assert (gradients[name] - param.grad).abs().max() < TOLERANCE
            assert (states[name]["exp_avg"] - 0.1 * param.grad).abs().max() < TOLERANCE
        assert model.blocks[0].up.weight.shape == (3 * DIM // 2, DIM), "at rest: this rank's shard of tp"
        with torch.no_grad():
            before = whole(model(*batch(5, 0, 0)))
            with zs.gathered(model):
                assert torch.equal(whole(model(*batch(5, 0, 0))), before)
            for param in model.parameters():
                param.mul_(0.5)
            assert not torch.equal(whole(model(*batch(5, 0, 0))), before)
        zs.close(model)

    def nonfinite(self, stage: int) -> None:
        """Of one shard on one rank: all skip, and all know whose it was."""
        _, model, optimizer = self.fresh()
        model, optimizer = zs.shard(model, optimizer, mesh=self.mesh, stage=stage)
        if dist.get_rank() == 3:
            model.blocks[1].up.weight.register_hook(lambda gradient: gradient * math.inf)
        self.backward(model, 0)
        optimizer.step()
        record = optimizer.last_step
        assert record.skipped and len(record.nonfinite) == 1 and "blocks.1.up.weight" in record.nonfinite[0]
        zs.close(model)

    def checkpointed(self, stage: int, **options) -> None:
        plain, model, optimizer = self.fresh()
        _, _, weights = one_process(plain, 1, None)
        zs.checkpoint_activations(model, min_numel=1, **options)
        model, optimizer = zs.shard(model, optimizer, mesh=self.mesh, stage=stage)
        for step in range(STEPS):
            self.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        assert zs.activation_report(model).packed == 2 * STEPS
        found = zs.full_state_dict(model)
        assert all((found[name] - value).abs().max() < TOLERANCE for name, value in weights.items())
        zs.close(model)

    def bad_input(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        _, model, optimizer = self.fresh()
        kept = model.blocks[0].up.weight
        for words, options in (
            ("embedding.weight is a DTensor, so zs.shard\\(\\) must be told which ranks", {}),
            ("embedding.weight is a DTensor, so zs.shard\\(\\) must be told which ranks", {"comm": dist.group.WORLD}),
            (
                "embedding.weight is a DTensor over the axes \\['tp'\\]: expected an axis named",
                {"mesh": init_device_mesh("cpu", (2, 2))},
            ),
            ("give one of them", {"mesh": self.mesh, "comm": self.mesh["dp"]}),
            ("shard_size=3 does not divide the 2 ranks", {"mesh": self.mesh, "shard_size": 3}),
        ):
            with pytest.raises(zs.ConfigError, match=words):
                zs.shard(model, optimizer, **options)
            assert model.blocks[0].up.weight is kept and any(p is kept for p in optimizer.param_groups[0]["params"])
        with pytest.raises(zs.ConfigError, match="0.up.weight is a DTensor .* Muon steps whole"):
            muon = torch.optim.Muon([p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name])
            zs.shard(model.blocks, muon, mesh=self.mesh)
        other = self.fresh()[1]
        with torch.no_grad():
            other.norm.bias += self.mesh["tp"].get_local_rank()
        with pytest.raises(zs.ModelMismatch, match="1 parameters, first norm.bias, are no DTensors and differ"):
            zs.shard(other, None, mesh=self.mesh)
        sliced, _ = zs.shard(self.fresh()[1], None, mesh=self.mesh, stage=3)
        with pytest.raises(zs.CheckpointError, match="blocks.0.up.weight.*zs.save"):
            sliced.state_dict()["blocks.0.up.weight"].__create_chunk_list__()
        zs.close(sliced)
        with pytest.raises(zs.ConfigError, match="fully_shard"):
            zs.shard(fully_shard(model_of(False), mesh=self.mesh["dp"]), None, mesh=self.mesh)
        zs.close(zs.shard(model, optimizer, mesh=self.mesh)[0])

    def state_dicts(self, stage: int) -> None:
        """They show what is a part as a DTensor, and take whole tensors and DTensors."""
        _, model, _ = self.fresh()
        _, other, _ = self.fresh()
        with torch.no_grad():
            for param in other.parameters():
                param.mul_(2)
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # whose hooks take it out of names
        model, _ = zs.shard(model, None, mesh=self.mesh, stage=stage)
        model.load_state_dict(other.state_dict())
        found = zs.full_state_dict(model)
        assert all(torch.equal(found[name], whole(value)) for name, value in other.state_dict().items())
        model.load_state_dict({name: value / 2 for name, value in found.items()})
        assert all(torch.equal(2 * value, found[name]) for name, value in zs.full_state_dict(model).items())
        if stage < 3:
            shown = model.state_dict()
            assert all(torch.equal(2 * whole(value), found[name]) for name, value in shown.items()), "as torch shows it"
        zs.close(model)

    def hidden(self) -> None:
        """A loss that each block keeps: backward comes to released DTensors past the blocks' outputs."""
        plain, model, _ = self.fresh()
        model, _ = zs.shard(model, None, mesh=self.mesh, stage=3, map_shared=False)

        def backward(net: Net, place: int) -> None:
            for block in net.blocks:
                block.register_forward_hook(
                    lambda block, args, out: setattr(block, "kept", whole(block.down(F.gelu(block.up(out)))).square().mean())
                )
            (whole(net(*batch(0, 0, place))) + sum(block.kept for block in net.blocks)).backward()

        backward(model, self.place)
        gradients = zs.full_gradients(model)
        for place in range(2):
            backward(plain, place)
        for name, param in plain.named_parameters():
            assert (gradients[name] - param.grad / 2).abs().max() < TOLERANCE, name
        zs.close(model)

    def begun(self) -> None:
        """An optimizer that has stepped before keeps its states; every rank has taken the same step (others are refused)."""
        plain, model, optimizer = self.fresh()
        whole(model(*batch(0, 0, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
        model, optimizer = zs.shard(model, optimizer, mesh=self.mesh, stage=2)
        self.backward(model, 1)
        optimizer.step()
        assert {state["step"].item() for state in zs.full_optimizer_state(model).values()} == {2}
        told, mine = zs.full_optimizer_state_dict(model), zs.full_optimizer_state_dict(model, every_rank=True)["state"]
        assert bool(told) is (dist.get_rank() == 0)  # of all ranks of the mesh
        for number, param in enumerate(plain.parameters()):
            assert mine[number]["exp_avg"].shape == param.shape and (
                not told or torch.equal(told["state"][number]["exp_avg"], mine[number]["exp_avg"])
            )
        zs.close(model)


OFF = dict.fromkeys(("offload_param", "offload_gradient", "offload_optimizer"), "cpu")
SLOW = os.environ.get("ZEROSHARD_SLOW") == "1"  # all cells; else each value meets most others in some cell
FEW = ((0, False, False), (1, True, True), (2, False, True), (3, True, False), (3, False, True))
CASES: dict[str, Callable[[Cells], None]] = {
    f"equal-{stage}-{'sequence' if sequence else 'plain'}-{'tied' if tied else 'untied'}": (
        lambda c, a=(stage, sequence, tied): c.equal(*a, micros=1 + a[2], clip=0.3 if a[1] else None)
    )
    for stage, sequence, tied in (itertools.product(range(4), (False, True), (False, True)) if SLOW else FEW)
}  # fmt: skip
CASES |= {
    f"axis-{stage}": lambda c, s=stage: c.equal(s, False, False, mesh=None, comm=c.mesh["dp"])
    for stage in ((1, 3) if SLOW else (1,))
}
CASES |= {"host": lambda c: c.equal(3, False, True, clip=0.3, **OFF)}
CASES |= {"leaves": lambda c: c.equal(3, True, False, units="leaf")} if SLOW else {}
CASES |= {f"bf16-{stage}": lambda c, s=stage: c.bf16(s) for stage in ((0, 2, 3) if SLOW else (3,))}
CASES |= {f"clip-{stage}": lambda c, s=stage: c.torch_clips(s) for stage in (range(4) if SLOW else (0, 2))}
CASES |= {f"verbs-{stage}": lambda c, s=stage: c.verbs(s) for stage in (range(4) if SLOW else (0, 3))}
CASES |= {f"nonfinite-{stage}": lambda c, s=stage: c.nonfinite(s) for stage in ((0, 2, 3) if SLOW else (2,))}
CASES |= {f"checkpointed-{stage}": lambda c, s=stage: c.checkpointed(s) for stage in ((1, 3) if SLOW else (1,))}
CASES |= {"partitioned": lambda c: c.checkpointed(3, partition=c.mesh["tp"], offload="cpu")}
CASES |= {f"state-dicts-{stage}": lambda c, s=stage: c.state_dicts(s) for stage in (1, 3)}
CASES |= {"bad-input": Cells.bad_input, "begun": Cells.begun, "hidden": Cells.hidden}


def _all(rank: int, ranks: int, names: list[str]) -> dict[str, str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cells, found = Cells(), {}
    for name in names:
        try:
            CASES[name](cells)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            break  # ranks may stand in different places now
    return found


@pytest.fixture(scope="module")
def results(request) -> list[dict[str, str]]:
    return run_processes(_all, WORLD, asked(request, "name"), check=False)


@pytest.mark.processes
@pytest.mark.limit(1200 if SLOW else 240)  # the first runs all cases
@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel(results, name):
    for result in results:
        assert result.value is not None, result.error
        assert name in result.value, f"another case failed before: {list(result.value)[-1]}"
        assert not result.value[name], result.value[name]
