"""deepspeed.pipe: a model as a list of layers, of which each rank builds those of its pipeline stage.

    net = PipelineModule([LayerSpec(Embedding, ...), *blocks, LayerSpec(Head, ...)], num_stages=2, loss_fn=loss)
    engine, *_ = deepspeed.initialize(model=net, config=config)     # a PipelineEngine (pipe_engine.py)
    loss = engine.train_batch(iter(loader))

Parameters are named by the number of their layer among all layers ("7.weight"), those of a tied layer by its key
("tied_modules.embedding.weight"), so that a checkpoint loads at another number of stages. A layer is called with the output of the
layer before it: a tensor, or a tuple as one argument.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from ...parallel.stages import cut_by_cost
from . import activation, communication
from .accelerator import getter
from .ds_config import DeepSpeedConfig
from .sections import DeepSpeedConfigError
from .topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology
from .utilities import set_random_seed


class PipelineError(Exception):
    """Raised for calls of a PipelineModule, or of its engine, that a pipeline does not support."""


def check_config(config: DeepSpeedConfig) -> None:
    """Raise DeepSpeedConfigError for options that a pipeline does not support."""
    if config.gradient_allreduce_op == "sum":
        raise DeepSpeedConfigError('gradient_allreduce_op "sum" with a PipelineModule: use "mean", and scale the loss.')


class LayerSpec:
    """A layer that only the ranks of its stage build, as typename(*module_args, **module_kwargs)."""

    def __init__(self, typename: type[nn.Module], *module_args: object, **module_kwargs: object) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec only supports torch.nn.Module types, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{key}={value!r}" for key, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"

    def build(self, log: bool = False) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all layers of the same key.

    forward_fn: called as forward_fn(module, input) in the place of the module. tied_weight_attr: names of the parameters that are
    tied if the layers are of different classes; of one class, all parameters are.
    """

    def __init__(
        self, key: str, typename: type[nn.Module], *module_args: object, forward_fn: Callable | None = None,
        tied_weight_attr: str | Iterable[str] = ("weight",), **module_kwargs: object,
    ) -> None:  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class PipelineModule(nn.Module):
    """One stage of a model that is a list of layers: modules, LayerSpecs, TiedLayerSpecs and functions (collective).

    parts: layers parts[s] to parts[s + 1] - 1 are stage s.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: ProcessTopology | None = None, loss_fn: Callable | None = None,
        seed_layers: bool = False, seed_fn: Callable[[int], object] | None = None, base_seed: int = 1234, partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0, activation_checkpoint_func: Callable = activation.checkpoint,
        checkpointable_layers: list[str] | None = None, dynamic_shape: bool = False,
    ) -> None:  # fmt: skip
        """Build this rank's layers. With a topology, `num_stages` is its number of ranks along "pipe".

        Args:
            partition_method: each stage gets about equally many of: "parameters" (trained ones), "uniform" (layers), or "type:REGEX"
                (layers in the names of whose classes the expression is found, in any case).
            activation_checkpoint_interval: number of layers of a stage that are recomputed together in backward; 0: none are.
            seed_layers: call seed_fn(base_seed + number of the layer) before a layer is built, and call seed_fn before each call of the
                layer in training, with another seed for each micro-batch. seed_fn: None: seed random, numpy and torch.
            checkpointable_layers: names of the classes that may be recomputed. None: groups of layers with parameters.
            dynamic_shape: no effect: micro-batches of a step have one shape, and those of another step may have another.

        Raises:
            RuntimeError: neither num_stages nor a topology, or ranks, layers or tied layers that do not fit.
            DeepSpeedConfigError: an axis of the topology that is not served.
        """
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("must provide num_stages or topology")
        if not communication.is_initialized():
            communication.init_distributed()
        ranks = communication.get_world_size()
        if topology is None:
            if not num_stages or num_stages < 1 or ranks % num_stages:
                raise RuntimeError(f"num_stages ({num_stages}) must divide distributed world size ({ranks})")
            topology = PipeDataParallelTopology(num_stages, ranks // num_stages)
        self._grid = PipelineParallelGrid(topology)
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self.loss_fn, self.seed_layers, self.base_seed = loss_fn, seed_layers, base_seed
        self.seed_fn = seed_fn or set_random_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers, self.dynamic_shape, self.micro_offset = checkpointable_layers, dynamic_shape, 0
        # set by the engine at the first stage: function from the number of a micro-batch to its inputs
        self.load: Callable[[Any], Any] | None = None
        self._layer_specs = list(layers)
        self.parts = self._divide(partition_method.lower())
        self._local_start, self._local_stop = self.parts[self.stage_id : self.stage_id + 2]
        self.forward_funcs: list[Callable] = []
        self.tied_modules = nn.ModuleDict()
        for number in range(self._local_start, self._local_stop):
            self.forward_funcs.append(self._build(number, self._layer_specs[number]))
        # what zs.Pipeline and zs.load ask a stage: its place, the parameters that it shares with others, and all layers' names
        names = (
            f"tied_modules.{each.key}" if isinstance(each, TiedLayerSpec) else str(at)
            for at, each in enumerate(self._layer_specs)
        )
        self.pipeline_stage = SimpleNamespace(
            index=self.stage_id, count=self.num_stages, ties=tuple(self._ties()), layers=tuple(names)
        )

    # -- the layers ----------------------------------------------------------------------------------------------

    def _divide(self, method: str) -> list[int]:
        """Return the number of the first layer of each stage, and at the end the number of all layers."""
        count, stages = len(self._layer_specs), self.num_stages
        if count < stages:
            raise RuntimeError(f"{count} layers for {stages} stages: each stage needs one at least")
        if method == "uniform":
            return [stage * (count // stages) + min(stage, count % stages) for stage in range(stages + 1)]
        if method == "parameters":
            costs = [float(self._trained(layer)) for layer in self._layer_specs]
        elif method.startswith("type:"):
            wanted = re.compile(method.partition(":")[2], re.IGNORECASE)
            costs = [float(wanted.search(self._name(layer)) is not None) for layer in self._layer_specs]
            if not any(costs):
                raise RuntimeError(f"Partitioning '{wanted.pattern}' found no valid layers to partition.")
        else:
            raise NotImplementedError(f"Partitioning method {method} not implemented: parameters, uniform or type:REGEX.")
        return [each.start for each in cut_by_cost(costs, stages)] + [count]

    @staticmethod
    def _trained(layer: object) -> int:
        """Return the number of trained parameters of a layer. A LayerSpec is built for it, which draws random numbers as in DeepSpeed."""
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        return sum(p.numel() for p in module.parameters() if p.requires_grad) if isinstance(module, nn.Module) else 0

    @staticmethod
    def _name(layer: Any) -> str:
        cls = layer.typename if isinstance(layer, LayerSpec) else type(layer) if isinstance(layer, nn.Module) else layer
        return getattr(cls, "__name__", "")

    def _build(self, number: int, layer: Any) -> Callable:
        """Build a layer of this stage, register its module, and return what is called in forward."""
        if isinstance(layer, PipelineModule):
            raise NotImplementedError("a PipelineModule among the layers of another: give its layers instead")
        if self.seed_layers:
            self.seed_fn(self.base_seed + number)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
            module = self.tied_modules[layer.key]
            return module if layer.forward_fn is None else partial(layer.forward_fn, module)
        built: Callable = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, nn.Module):
            self.add_module(str(number), built)
        return built

    def _ties(self) -> Iterator[dict[int, str]]:
        """Yield, for each parameter that this stage shares with others, its name in each of these stages."""
        ties = [(number, tie) for number, tie in enumerate(self._layer_specs) if isinstance(tie, TiedLayerSpec)]
        for key in sorted({tie.key for _, tie in ties}):
            alike = [(number, tie) for number, tie in ties if tie.key == key]
            stages = sorted({self.stage_owner(number) for number, _ in alike})
            if self.stage_id not in stages or len(stages) == 1:
                continue
            module = self.tied_modules[key]
            names = sorted({name for _, tie in alike for name in tie.tied_weight_attr})
            if len({tie.typename for _, tie in alike}) == 1:
                names = [name for name, _ in module.named_parameters()]
            for name in names:
                owner, _, attribute = name.rpartition(".")
                param = getattr(module.get_submodule(owner), attribute, None)
                if not isinstance(param, nn.Parameter):
                    raise RuntimeError(
                        f"TiedLayerSpec {key!r}: {type(module).__name__} has no parameter {name!r}: name one in tied_weight_attr="
                    )
                param.__dict__["unit_of_its_own"] = True  # a flat buffer shared with others would differ between stages
                yield dict.fromkeys(stages, f"tied_modules.{key}.{name}")

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any) -> Any:
        """Return the output of this stage's layers for the output of the stage before it (several tensors: a tuple)."""
        x = inputs[0] if len(inputs) == 1 else inputs
        if self.load is not None:
            x = self.load(x)
        self.micro_offset += 1
        step = self.activation_checkpoint_interval or len(self.forward_funcs)
        for first in range(0, len(self.forward_funcs), step):
            functions = self.forward_funcs[first : first + step]
            run = partial(self._run, functions, self._local_start + first, self.base_seed * (self.micro_offset + 1))
            recomputed = self.activation_checkpoint_interval > 0 and self._is_checkpointable(functions)
            x = self.activation_checkpoint_func(run, x) if recomputed else run(x)
        return x

    def _run(self, functions: list[Callable], number: int, seed: int, x: Any) -> Any:
        for at, function in enumerate(functions, number):
            if self.seed_layers:
                self.seed_fn(seed + at)
            x = function(x)
        return x

    def _is_checkpointable(self, functions: list[Callable]) -> bool:
        if self.checkpointable_layers is not None:
            return all(type(each).__name__ in self.checkpointable_layers for each in functions)
        return any(next(each.parameters(), None) is not None for each in functions if isinstance(each, nn.Module))

    def stage_owner(self, layer_idx: int) -> int:
        """Return the stage of a layer."""
        return next(stage for stage in range(self.num_stages) if layer_idx < self.parts[stage + 1])

    def set_checkpoint_interval(self, interval: int) -> None:
        assert interval >= 0
        self.activation_checkpoint_interval = interval

    def topology(self) -> ProcessTopology:
        return self._grid._topo

    mpu, partitions, num_pipeline_stages = getter("_grid"), getter("parts"), getter("num_stages")
