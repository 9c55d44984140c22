"""The command `zeroshard check`: show how zeroshard treats each key of a DeepSpeed configuration.

    zeroshard check ds_config.json
    zeroshard check ds_config.json --ranks 64 --json

served       zeroshard does what the key says
translated   it does so by the option of zs.shard that is shown
ignored      the key has no effect, for the reason that is shown
off, open    the value asks for nothing (off), or is "auto", which the program that reads the file fills in (open)
refused      `deepspeed.initialize` would raise an error with the remedy that is shown; the exit code is 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

from ..utils.sheets import Sheet
from .arguments import ExitCode, Parser, UsageError
from .sheets import print_json, show

if TYPE_CHECKING:  # what follows the options is imported in functions, with torch: --help and a mistake do not wait for it
    from ..integrations.deepspeed.ds_config import DeepSpeedConfig
    from ..integrations.deepspeed.sections import Judgement

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def main(argv: Sequence[str]) -> int:
    """Judge a configuration file and print the result; return the exit code."""
    parser = Parser(
        prog="zeroshard check", usage="%(prog)s [options] FILE",
        description="Tell what becomes of each key of a DeepSpeed configuration; exit code 1 if one is refused.",
    )  # fmt: skip
    parser.add_argument("config", metavar="FILE", help="a DeepSpeed configuration (JSON), as deepspeed.initialize takes it")
    parser.add_argument("--ranks", type=int, help="ranks of the run (default: as the three batch sizes say, else 1)")
    parser.add_argument("--json", action="store_true", help="print JSON: an object with file, refused, counts and keys")
    options = parser.parse(argv)
    from ..integrations.deepspeed.ds_config import read_config
    from ..integrations.deepspeed.sections import KEYS_BELOW

    try:
        given = read_config(options.config)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    found = [each for each in judged(given, options.ranks) if each.text != KEYS_BELOW]
    refused = [each for each in found if each.treatment == "refused"]
    counts = Counter(each.treatment for each in found)
    summary = f"{options.config}: {len(found)} keys: " + ", ".join(f"{n} {what}" for what, n in counts.items())
    if options.json:
        keys = [{"key": each.written, "value": each.value, "treatment": each.treatment, "text": each.text} for each in found]
        print_json({"file": options.config, "refused": bool(refused), "counts": dict(counts), "keys": keys})
    else:
        rows = []
        for each in found:
            shown = f"{{{len(each.value)} keys}}" if isinstance(each.value, dict) else repr(each.value)
            rows.append((each.written, shown, each.treatment, each.text))
        show(Sheet(header=("key", "value", "treatment", "what that means"), rows=rows))
        for each in refused:
            print(f"refused: {each.written}: {each.text}")
        print(summary)
    return ExitCode.NO if refused else ExitCode.DONE


def judged(given: dict[str, Any], ranks: int | None) -> list[Judgement]:
    """Return each key with its treatment; an error that is due to several keys has a row of its own, "(together)"."""
    from ..integrations.deepspeed.sections import KEYS_BELOW, Judgement, judge
    from ..integrations.deepspeed.shard_options import shard_options

    found = list(judge(given))
    accepted = given
    for each in found:
        if each.treatment == "refused":
            accepted = _without(accepted, each.written)
    while (problem := _problem(accepted, ranks)) is not None:
        place = max((i for i, each in enumerate(found) if problem.startswith(each.name)),
                    key=lambda i: len(found[i].name), default=None)  # fmt: skip
        if place is None or found[place].treatment == "refused":
            found.append(Judgement("", "(together)", "", "refused", problem))
            break
        text = problem.removeprefix(found[place].name).lstrip(": ")
        found[place] = replace(found[place], treatment="refused", text=text)
        accepted = _without(accepted, found[place].written)
    else:
        options = shard_options(_config(accepted, ranks))
        for place, each in enumerate(found):
            option = each.key.option if each.key is not None else None
            if each.treatment == "served" and option in options and each.text != KEYS_BELOW:
                value = options[option]
                if is_dataclass(value):  # zs.Offload, zs.Compression
                    value = getattr(value, "device", None) or getattr(value, "codec", value)
                found[place] = replace(each, treatment="translated", text=f"zs.shard({option}={value!r}): {each.text}")
    return found


def _config(given: dict[str, Any], ranks: int | None) -> DeepSpeedConfig:
    """Return the configuration of a run of `ranks`; None: the number that follows from its three batch sizes, else 1."""
    from ..integrations.deepspeed.ds_config import DeepSpeedConfig

    auto = [name for name in _BATCH if given.get(name) == "auto"]
    given = {name: value for name, value in given.items() if name not in auto}
    if auto and not {*_BATCH[:2]} & given.keys():
        given["train_micro_batch_size_per_gpu"] = 1  # stands for the value that the program fills in
    sizes = [size for size in map(given.get, _BATCH) if isinstance(size, int) and size > 0]
    if ranks is None and len(sizes) == len(_BATCH):
        ranks = max(sizes[0] // (sizes[1] * sizes[2]), 1)
    return DeepSpeedConfig(given, world_size=ranks or 1)


def _problem(given: dict[str, Any], ranks: int | None) -> str | None:
    """Return the message of the first error that a run would raise; None without one."""
    import torch

    from ..integrations.deepspeed.lr_schedules import schedule_from_config
    from ..integrations.deepspeed.shard_options import build_optimizer, shard_options

    try:
        config = _config(given, ranks)
        shard_options(config)
        if config.optimizer_name is None:
            return None
        parameter = torch.nn.Parameter(torch.zeros(2, 2))
        parameter.__dict__["use_muon"] = True
        optimizer = build_optimizer(config, [parameter])
        if config.scheduler_name is not None:
            schedule_from_config(config.scheduler_name, config.scheduler_params, optimizer)
    except Exception as error:  # from zeroshard.deepspeed, pydantic, or the optimizer's or scheduler's class
        texts = [each["msg"] for each in error.errors()] if hasattr(error, "errors") else [str(error)]
        return " ".join(texts[0].split())
    return None


def _without(config: dict[str, Any], written: str) -> dict[str, Any]:
    """Return the configuration without one key."""
    name, _, rest = written.partition(".")
    if rest and isinstance(config.get(name), dict):
        return {**config, name: _without(config[name], rest)}
    return {key: value for key, value in config.items() if key != name}
