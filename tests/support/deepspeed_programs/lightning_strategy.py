"""Lightning's Trainer with its DeepSpeedStrategy: optimizer, scheduler, validation and checkpoints of a LightningModule."""

import lightning as L
import torch
from common import RESUMED_AT, STEPS, Net, adamw, tokens, whole_weights, zero_section
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader


class OnCPU(DeepSpeedStrategy):
    """Without the refusal of CPUs, and with numbers for devices, which they lack."""

    def setup_environment(self) -> None:
        self.parallel_devices = [torch.device("cpu", number) for number in range(len(self.parallel_devices))]
        super(DeepSpeedStrategy, self).setup_environment()


class Module(L.LightningModule):
    def __init__(self, offload: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.offload = Net(), offload
        self.told = {"losses": [], "norms": [], "rates": [], "evaluations": []}

    def configure_optimizers(self):
        optimizer = adamw(self.net, self.offload, lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch, index):
        loss = self.net(batch)
        self.told["losses"].append(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        engine = self.trainer.model
        if engine.was_step_applied():
            self.told["norms"].append(float(engine.get_global_grad_norm()))
            self.told["rates"].append(engine.optimizer.param_groups[0]["lr"])

    def validation_step(self, batch, index):
        self.told["evaluations"].append(self.net(batch).item())


def fit(stage: int, accumulation: int, offload: str, epochs: int, folder: str, resume: bool = False):
    """Epochs are of RESUMED_AT steps: in the middle of one Lightning would begin its data again."""
    module = Module(offload)
    trainer = L.Trainer(
        strategy=OnCPU(config={"zero_optimization": zero_section(stage, offload)}), accelerator="cpu", devices=2,
        max_epochs=epochs, accumulate_grad_batches=accumulation, gradient_clip_val=0.5, logger=False, enable_checkpointing=False,
        num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    loader = DataLoader(tokens(2 * 3 * accumulation * RESUMED_AT), batch_size=3)
    trainer.fit(module, loader, DataLoader(tokens(6, seed=7), batch_size=3), ckpt_path=folder if resume else None)
    return trainer, module


def run(stage: int, accumulation: int, offload: str, folder: str) -> dict:
    trainer, _ = fit(stage, accumulation, offload, 1, folder)
    trainer.save_checkpoint(folder)
    trainer.model.destroy()
    told = {}
    for name in ("whole", "resumed"):
        trainer, module = fit(stage, accumulation, offload, STEPS // RESUMED_AT, folder, name == "resumed")
        told[name] = module.told | {"weights": whole_weights(module.net)}
        trainer.model.destroy()
    return told
