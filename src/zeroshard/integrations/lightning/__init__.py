"""A strategy for Lightning's Trainer and one for Fabric, registered by name when this module is imported.

    import zeroshard.integrations.lightning
    trainer = Trainer(strategy="zeroshard_stage_3", accelerator="cpu", devices=2)
    fabric = Fabric(strategy=FabricZeroshardStrategy(stage=2, max_live_parameters=0))

Names: zeroshard (stage 3), zeroshard_stage_1, _2, _3, zeroshard_stage_2_offload, zeroshard_stage_3_offload (host memory).
They are registered in `lightning` (if that is not installed, in `pytorch_lightning`), and also in `pytorch_lightning` if that was
imported before. Lightning does not search other packages for strategies, so programs must import this module.
"""

import sys
from importlib import import_module

from .fabric import FabricSharding
from .sharding import precision_class
from .trainer import TrainerSharding

STRATEGIES: dict[str, dict[str, int | str]] = {
    "zeroshard": {"stage": 3},
    **{f"zeroshard_stage_{stage}": {"stage": stage} for stage in (1, 2, 3)},
    "zeroshard_stage_2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zeroshard_stage_3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
}
_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))


def _register(trainer: str, fabric: str) -> tuple[type, type]:
    """Derive both strategy classes from a package's DDPStrategy, and register them. trainer, fabric: names of its modules."""
    made = []
    for name, ours, package in (
        ("ZeroshardStrategy", TrainerSharding, trainer),
        ("FabricZeroshardStrategy", FabricSharding, fabric),
    ):
        strategies, plugins = import_module(f"{package}.strategies"), import_module(f"{package}.plugins")
        fields = {"__module__": __name__, "__doc__": ours.__doc__, "_precision_class": precision_class(plugins.Precision)}
        made.append(type(name, (ours, strategies.DDPStrategy), fields))
        registry = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
        for registered, options in STRATEGIES.items():
            registry.register(registered, made[-1], description=f"ZeRO by zeroshard, {options}", override=True, **options)
    return made[0], made[1]


def _serve() -> tuple[type, type]:
    """Register the strategies in the installed packages. Return the first one's classes. Raises ModuleNotFoundError."""
    made: list[tuple[type, type]] = []
    for names in _PACKAGES:
        try:
            if not made or names[0] in sys.modules:
                made.append(_register(*names))
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", "pytorch_lightning"):
                raise
    if not made:
        raise ModuleNotFoundError(f"{__name__} needs Lightning: pip install 'lightning>=2.6'", name="lightning")
    return made[0]


ZeroshardStrategy, FabricZeroshardStrategy = _serve()
