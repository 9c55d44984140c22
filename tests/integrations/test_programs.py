"""Programs for Accelerate, Lightning and Fabric on DeepSpeed's interface: two ranks have the numbers of one process of torch."""

import importlib.util
import warnings

import pytest
import torch
from engine_kit import install_in_child
from torch import nn

import zeroshard.deepspeed as deepspeed
from zeroshard.comm.launch import run_processes
from zeroshard.testing import run_threads

WORDS, WIDTH, STEPS, WORLD = 23, 16, 6, 2
ROWS = torch.randint(2, WORDS, (STEPS * 4, 8), generator=torch.Generator().manual_seed(3))


def needs(*packages):
    """./test installs all of them (requirements/test.txt): skipped only in environments of other tools."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def installed():
    """What a child does first; without the warnings of the libraries that it imports."""
    install_in_child()
    warnings.filterwarnings("ignore")


def net():
    torch.manual_seed(7)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))


def loss_of(model, rows):
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), (rows + 1).flatten() % WORDS)


def plain(accumulate=1, clip=None):
    """(mean loss of each micro-batch, learning rates, weights), by one process and torch alone."""
    model, losses, rates = net(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for number, rows in enumerate(ROWS.split(4)):
        loss = loss_of(model, rows)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    return losses, rates, {name: value.detach().clone() for name, value in model.state_dict().items()}


def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_hooks_are_taken_off_while_all_is_whole():
    """As trl does while it generates: forwards compute with whole parameters, and training goes on."""
    state = net().state_dict()  # threads share torch's generator

    def run(rank):
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS))
        model.load_state_dict(state)
        adamw = {"type": "AdamW", "params": {"lr": 0.03, "weight_decay": 0.01}}
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"train_batch_size": 2, "zero_optimization": zero, "optimizer": adamw}
        engine = deepspeed.initialize(model=model, config=config)[0]
        shown, losses = engine.optimizer.parameter_offload, []
        count = len(shown.forward_hooks)
        assert count == len(shown.backward_hooks) == 3 and shown.module is model
        for rows in ROWS.split(4)[:2]:
            with deepspeed.runtime.zero.unwrap_model_for_generation(engine), torch.no_grad():
                assert not shown.forward_hooks and all(type(param) is nn.Parameter for param in engine.parameters())
                first, second = (engine.module(rows) for _ in range(2))
            assert len(shown.forward_hooks) == count and not list(model.ds_external_parameters())
            assert all(param.ds_status.name == "NOT_AVAILABLE" for param in engine.parameters())
            loss = loss_of(engine, rows)
            losses.append(loss.item())
            torch.testing.assert_close(loss_of(lambda _: first, rows), loss.detach())
            assert torch.equal(first, second)
            engine.backward(loss)
            engine.step()
        return losses

    for losses in run_threads(WORLD, run):
        close(losses, plain(clip=1.0)[0][:2])


# -- Accelerate --------------------------------------------------------------------------------------------------------


def accelerate_loop(stage, accumulate, folder):
    """The loop of its documents, with everything that it saves; on the way a state is saved, spoiled and loaded."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader

    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "gradient_accumulation_steps": accumulate,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": f"{stage}"},
    }  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=0.2)
    accelerator = Accelerator(deepspeed_plugin=plugin, step_scheduler_with_optimizer=False)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loader = DataLoader(ROWS, batch_size=4 // WORLD)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert type(model).__name__ == "DeepSpeedEngine" and model.zero_optimization_stage() == stage
    losses, rates = [], []
    for number, rows in enumerate(loader):
        if number == 4:
            accelerator.save_state(f"{folder}/state{stage}")
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1.0)
            accelerator.load_state(f"{folder}/state{stage}")
        with accelerator.accumulate(model):
            loss = loss_of(model, rows)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        rates.append(scheduler.get_last_lr()[0])
    with torch.no_grad():
        answers = accelerator.gather_for_metrics(model(rows).sum((1, 2)))
    assert type(accelerator.unwrap_model(model)) is nn.Sequential and answers.shape == (4,)
    accelerator.save_model(model, f"{folder}/model{stage}", max_shard_size="2KB")
    state = accelerator.get_state_dict(model)
    accelerator.save(state, f"{folder}/weights{stage}.pt")
    accelerator.wait_for_everyone()
    accelerator.free_memory(model)
    return losses, rates


def accelerate_rank(rank, world, accumulate, folder):
    installed()
    from accelerate import PartialState
    from accelerate.state import AcceleratorState

    PartialState(backend="gloo")  # without a GPU Accelerate counts one process otherwise
    found = []
    for stage in (1, 2, 3):
        found.append(accelerate_loop(stage, accumulate, folder))
        AcceleratorState._reset_state()
    return found


@needs("accelerate", "safetensors")
def test_accelerate(tmp_path):
    from safetensors.torch import load_file

    accumulate = 2
    losses, rates, weights = plain(accumulate, clip=0.2)
    for found in run_processes(accelerate_rank, WORLD, accumulate, str(tmp_path)):
        for their_losses, their_rates in found:
            close(their_losses, losses)
            close(their_rates, rates)
    for stage in (1, 2, 3):
        parts = list((tmp_path / f"model{stage}").glob("*.safetensors"))
        assert len(parts) > 1
        saved = {name: value for part in parts for name, value in load_file(part).items()}
        for state in (saved, torch.load(tmp_path / f"weights{stage}.pt")):
            assert state.keys() == weights.keys()
            for name, value in weights.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
        told = {path.stem: path.read_text().split() for path in (tmp_path / str(stage)).glob("*.csv")}
        assert told.keys() == {"Train_Samples_lr", "Train_Samples_train_loss"}
        steps, values = zip(*(line.split(",") for line in told["Train_Samples_train_loss"][1:]), strict=True)
        assert steps == tuple(str(4 * accumulate * (number + 1)) for number in range(STEPS // accumulate))
        assert all(0.5 < float(value) < 4 for value in values)


# -- Lightning's own DeepSpeed strategies ------------------------------------------------------------------------------


def as_a_gpu(base):
    """An accelerator that Lightning takes for CUDA, whose devices are the CPU: its strategies ask for GPUs."""

    class OnCPU(base):
        def setup_device(self, device):
            pass

        def setup(self, trainer):
            pass

        def teardown(self):
            pass

        parse_devices = staticmethod(lambda devices: list(range(devices)))
        get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu", index) for index in devices])
        is_available = staticmethod(lambda: True)

    return OnCPU()


def rank_rows(rank):
    from torch.utils.data import DataLoader

    return DataLoader([rows.chunk(WORLD)[rank] for rows in ROWS.split(4)], batch_size=None)


def lightning_fit(rank, stage, accumulate, clip, folder):
    import lightning.pytorch as pl
    from lightning.pytorch.accelerators.cuda import CUDAAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.losses = None, []

        def configure_model(self):
            self.net = self.net or net()

        def training_step(self, rows, _):
            loss = loss_of(self.net, rows)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, rows, _):
            self.log("checked", loss_of(self.net, rows), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.03)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), "interval": "step"}]

    module, strategy = Module(), DeepSpeedStrategy(stage=stage, logging_batch_size_per_gpu=2)
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler", "enable_checkpointing"), False
    )
    trainer = pl.Trainer(
        strategy=strategy, accelerator=as_a_gpu(CUDAAccelerator), devices=WORLD, max_epochs=1, gradient_clip_val=clip,
        accumulate_grad_batches=accumulate, num_sanity_val_steps=0, default_root_dir=folder, **quiet,
    )  # fmt: skip
    trainer.fit(module, rank_rows(rank))
    assert type(trainer.strategy.model).__name__ == "DeepSpeedEngine"
    trainer.save_checkpoint(f"{folder}/{stage}.ckpt")
    (before,) = trainer.validate(module, rank_rows(rank), verbose=False)
    (loaded,) = trainer.validate(module, rank_rows(rank), ckpt_path=f"{folder}/{stage}.ckpt", verbose=False)
    assert before == loaded
    return module.losses


def fabric_loop(rank, stage, accumulate, folder):
    from lightning.fabric import Fabric
    from lightning.fabric.accelerators.cuda import CUDAAccelerator
    from lightning.fabric.strategies import DeepSpeedStrategy

    strategy = DeepSpeedStrategy(stage=stage)
    strategy.config["gradient_clipping"] = 0.0  # else DeepSpeed's default, 1.0
    fabric = Fabric(strategy=strategy, accelerator=as_a_gpu(CUDAAccelerator), devices=WORLD)
    fabric.launch()
    with fabric.init_module():
        model = net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.03))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer.optimizer, 2, gamma=0.5)
    losses = []
    for number, rows in enumerate(rank_rows(rank)):
        with fabric.no_backward_sync(model, enabled=(number + 1) % accumulate != 0):
            loss = loss_of(model, rows)
            fabric.backward(loss / accumulate)
        losses.append(loss.item())
        if (number + 1) % accumulate == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state = {"model": model, "optimizer": optimizer}
            fabric.save(f"{folder}/fabric{stage}", state)
            fabric.load(f"{folder}/fabric{stage}", state)
    return losses


FITS = ((1, 2, 0.1), (2, 1, None), (3, 1, 0.1), (3, 2, None))  # stage, accumulated micro-batches, bound of the norm
LOOPS = ((1, 2), (2, 2), (3, 1))


def lightning_rank(rank, world, folder):
    installed()
    import logging

    logging.getLogger("lightning").setLevel(logging.ERROR)
    return [lightning_fit(rank, *case, folder) for case in FITS], [fabric_loop(rank, *case, folder) for case in LOOPS]


@needs("lightning")
def test_lightning_and_fabric(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")  # it finds the ranks as those of torchrun
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(WORLD))
    fits, loops = zip(*run_processes(lightning_rank, WORLD, str(tmp_path)), strict=True)
    for cases, runs in ((FITS, fits), (LOOPS, loops)):
        for (_, *case), ranks in zip(cases, zip(*runs, strict=True), strict=True):
            close([sum(losses) / WORLD for losses in zip(*ranks, strict=True)], plain(*case)[0])
