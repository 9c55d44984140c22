"""Names of other projects that are no interface of theirs, in a file of Python: where a later release may take them away.

module        a module of a project that its documentation does not tell programs to import (imported, or named by a string)
private       an attribute that begins with an underscore, of the objects with which the library deals; also as a string
undocumented  any other name in the NAMES of the project's file: an attribute, or a whole string
"""

import ast
import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from private_names import ATTRIBUTES as TORCHS
from private_names import _own, private

import zeroshard
from zeroshard.utils import bitsandbytes_compat, lightning_compat, torchao_compat, transformers_compat

ROOT = Path(zeroshard.__file__).parent
# project -> the one file that may have its names
FILES = {
    "transformers": "utils.transformers_compat", "lightning": "utils.lightning_compat", "bitsandbytes": "utils.bitsandbytes_compat",
    "torchao": "utils.torchao_compat", "deepspeed's files": "checkpoint.importers.deepspeed",
}  # fmt: skip
# packages, and the modules of them that their documentation tells programs to import from
PUBLIC = {
    "transformers": (), "peft": (), "accelerate": (), "trl": (), "bitsandbytes": ("optim",), "torchao": ("optim",),
    "lightning": ("pytorch", "pytorch.strategies", "pytorch.plugins", "fabric", "fabric.strategies", "fabric.plugins"),
    "pytorch_lightning": ("strategies", "plugins"), "lightning_fabric": ("strategies", "plugins"), "huggingface_hub": (),
    "rich": ("progress", "console", "table", "text"), "matplotlib": ("figure", "patches"), "wandb": (), "shtab": (), "safetensors": (),
}  # fmt: skip
# of the files that DeepSpeed's engines write; its interface to programs, which integrations/deepspeed has, is another one
ENTRIES = {
    "param_slice_mappings", "fp32_flat_groups", "single_partition_of_fp32_groups", "base_optimizer_state", "frozen_param_shapes",
    "frozen_param_fragments", "shared_params", "param_shapes", "buffer_names", "partition_count", "cur_scale", "last_overflow_iter",
    "cur_hysteresis", "scale_window",
}  # fmt: skip
INTERFACE = "integrations.deepspeed"  # DeepSpeed's names for programs, and the defaults of its configuration
ARGUMENTS = {"block_size", "bf16_stochastic_round"}  # also of constructors, which are documented


def _objects() -> dict[str, list[Any]]:
    """Objects with which the library deals, of the projects that are installed."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_local_experts=2
    )
    model = transformers.MixtralForCausalLM(config)
    found: dict[str, list[Any]] = {"transformers": [config, *model.modules(), transformers.AutoModelForCausalLM]}
    for project, names in {
        "lightning": ("pytorch.strategies.DDPStrategy", "fabric.strategies.DDPStrategy"), "bitsandbytes": ("optim.AdamW8bit",),
        "torchao": ("optim.AdamW8bit",), "peft": ("LoraConfig", "PeftModel"),
    }.items():  # fmt: skip
        for name in names:
            try:
                module, _, cls = f"{project}.{name}".rpartition(".")
                made = getattr(importlib.import_module(module), cls)
            except ImportError:
                continue
            found.setdefault(project, []).append(made() if "Strategy" in cls else made)
    return found


def attributes() -> dict[str, set[str]]:
    """Project -> private attributes of its objects, without torch's; and undocumented names of its file."""
    import torch

    plain = TORCHS | set(dir(torch.nn.Embedding(1, 1))) | set(dir(torch.optim.AdamW)) | set(dir(object))
    found = {
        project: {name for each in objects for name in dir(each) if private(name)} - plain
        for project, objects in _objects().items()
    }
    for module in (transformers_compat, lightning_compat, bitsandbytes_compat, torchao_compat):
        project = module.__name__.rpartition(".")[2].removesuffix("_compat")
        found[project] = found.get(project, set()) | {name for name in module.NAMES if "." not in name} - ARGUMENTS
    return found | {"deepspeed's files": ENTRIES}


class Use(NamedTuple):
    line: int
    project: str
    name: str


def foreign_uses(path: Path, names: dict[str, set[str]]) -> list[Use]:
    """All of a file, in order. names: those of `attributes`."""
    tree, uses = ast.parse(path.read_text()), set()

    def look(line: int, text: str, whole: bool) -> None:
        package, _, inside = text.partition(".")
        if whole and package in PUBLIC and inside and re.fullmatch(r"[\w.]+", inside):
            module = inside if inside.islower() else inside.rpartition(".")[0]
            if module and module not in PUBLIC[package]:
                uses.add(Use(line, package, text))
        uses.update(Use(line, project, text) for project, known in names.items() if text in known)

    def visit(node: ast.AST, own: frozenset[str]) -> None:
        if isinstance(node, ast.ClassDef):
            own |= _own(node)
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                look(node.lineno, node.module or "", True)
                look(node.lineno, alias.name, False)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                look(node.lineno, alias.name, True)
        elif isinstance(node, ast.Attribute):
            mine = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and node.attr in own
            if not mine:
                look(node.lineno, node.attr, False)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            look(node.lineno, node.value, True)
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):  # a docstring
                visit(child, own)

    visit(tree, frozenset())
    return sorted(uses)
