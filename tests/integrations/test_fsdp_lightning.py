"""Lightning's ModelParallelStrategy and zeroshard.fsdp: Trainer and Fabric save, load and go on, beside torch's FSDP2 and from its files."""

import warnings

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.utils.data import DataLoader

from zeroshard import fsdp
from zeroshard.comm.launch import run_processes

# ./test installs it (requirements/test.txt); absent where the suite runs in an environment of other tools, as on a GPU machine
pytest.importorskip("lightning", reason="needs lightning")
warnings.filterwarnings("ignore", module="lightning")
import lightning.pytorch as pl  # noqa: E402
from lightning.fabric import Fabric  # noqa: E402
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import ModelParallelStrategy  # noqa: E402

DOORS = {"torch": torch_fsdp, "zeroshard": fsdp}
QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"), False)


class Net(nn.Module):
    """A parameter and a buffer of its own, and blocks; sizes that two ranks do not divide."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 9)
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))
        self.head = nn.Linear(9, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(9))
        self.register_buffer("shift", torch.ones(1))

    def forward(self, words):
        hidden = self.embedding(words) * self.scale + self.shift
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head(hidden)


def loss_of(net, words):
    return nn.functional.cross_entropy(net(words).flatten(0, 1), ((words + 1) % 11).flatten())


def sharded(door, net, mesh):
    for block in net.blocks:
        door.fully_shard(block, mesh=mesh["data_parallel"])
    return door.fully_shard(net, mesh=mesh["data_parallel"])


def words(rank):
    given = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(rank))
    return DataLoader(given, batch_size=2)


class Module(pl.LightningModule):
    def __init__(self, door):
        super().__init__()
        self.net, self.losses, self.door = Net(), [], door

    def configure_model(self):
        if not isinstance(self.net, torch_fsdp.FSDPModule):
            sharded(self.door, self.net, self.device_mesh)

    def training_step(self, words, _):
        loss = loss_of(self.net, words)
        self.losses.append(loss.item())
        return loss

    def test_step(self, words, _):
        self.log("checked", loss_of(self.net, words), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.03)


def fit(door, rank, root, spread, epochs, path=None):
    """Train, from a checkpoint if one is given; return the losses and the path of what was saved."""
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=spread)
    kept = ModelCheckpoint(root)
    run = pl.Trainer(
        default_root_dir=root, accelerator="cpu", devices=2, max_epochs=epochs, strategy=strategy, callbacks=[kept], **QUIET
    )
    module = Module(door)
    run.fit(module, words(rank), ckpt_path=path)
    return module.losses, kept.best_model_path


def checked(door, rank, root, path):
    """Test a model without an optimizer, with the weights of a checkpoint."""
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = pl.Trainer(default_root_dir=root, accelerator="cpu", devices=2, strategy=strategy, **QUIET)
    return run.test(Module(door), words(5), ckpt_path=path, verbose=False)[0]["checked"]


def _trainer(rank, world, root):
    found = {}
    for spread in (True, False):
        saved = {}
        for name, door in DOORS.items():
            losses, saved[name] = fit(door, rank, f"{root}/{name}-{spread}", spread, 1)
            found[spread, name, "whole"], _ = fit(door, rank, f"{root}/{name}-{spread}-whole", spread, 2)
            assert found[spread, name, "whole"][: len(losses)] == losses
        for name, door in DOORS.items():
            for writer, path in saved.items():
                resumed, _ = fit(door, rank, f"{root}/{name}-{writer}-{spread}", spread, 2, path)
                found[spread, name, writer] = losses + resumed
            found[spread, name, "checked"] = [checked(door, rank, root, saved["zeroshard"])]
    return found


def _fabric(rank, world, root):
    found = {}

    def made(door, spread):
        def parallelize(net, mesh):
            return sharded(door, net, mesh)

        strategy = FabricStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=spread)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        net = fabric.setup(Net())
        return fabric, net, fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=0.03))

    def loop(fabric, net, optimizer, batches):
        losses = []
        for batch in batches:
            loss = loss_of(net, batch)
            fabric.backward(loss)
            fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    batches = list(words(rank))
    for spread in (True, False):
        for name, door in DOORS.items():
            fabric, net, optimizer = made(door, spread)
            first = loop(fabric, net, optimizer, batches[:2])
            fabric.save(f"{root}/{name}-{spread}", {"model": net, "optimizer": optimizer, "seen": 2})
            found[spread, name, "whole"] = first + loop(fabric, net, optimizer, batches[2:])
        for name, door in DOORS.items():
            for writer in DOORS:
                fabric, net, optimizer = made(door, spread)
                state = {"model": net, "optimizer": optimizer, "seen": 0}
                assert fabric.load(f"{root}/{writer}-{spread}", state) == {} and state["seen"] == 2
                found[spread, name, writer] = first + loop(fabric, net, optimizer, batches[2:])
    if rank == 0:
        torch.save(torch.load(f"{root}/torch-False")["model"], f"{root}/raw")
    fabric.barrier()
    fabric, net, _ = made(fsdp, False)
    fabric.load_raw(f"{root}/raw", net)
    raw = torch.load(f"{root}/raw")
    assert all(torch.equal(param.full_tensor(), raw[key]) for key, param in net.module.named_parameters())
    return found


def _both(rank, world, root):
    torch.set_num_threads(1)
    return _trainer(rank, world, f"{root}/trainer"), _fabric(rank, world, f"{root}/fabric")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("lightning")
    (root / "fabric").mkdir()
    return run_processes(_both, 2, str(root))


@pytest.mark.processes
@pytest.mark.parametrize("program", ["trainer", "fabric"])
def test_what_was_saved_is_gone_on_from_whoever_has_saved_it(found, program):
    for trainer, fabric in found:
        losses = {"trainer": trainer, "fabric": fabric}[program]
        for (spread, door, what), got in losses.items():
            expected = losses[spread, "torch", "checked" if what == "checked" else "whole"]
            assert got == pytest.approx(expected, abs=2e-6), (spread, door, what)
        for spread in (True, False):
            assert losses[spread, "zeroshard", "zeroshard"][-2:] == losses[spread, "zeroshard", "whole"][-2:]
