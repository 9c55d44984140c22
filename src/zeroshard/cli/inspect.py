"""`zeroshard inspect`: what a checkpoint, or every checkpoint of a folder, holds, and whether its checksums hold.

    zeroshard inspect runs/7/checkpoints
    zeroshard inspect runs/7/checkpoints --name step-00000100 --json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import zeroshard as zs

from . import report_error
from .arguments import Parser
from .summary import megabytes

DAMAGED = 1
WIDTH = 160  # characters, in a file or a pipe


def main(argv: Sequence[str]) -> int:
    """Print; returns the exit code, `DAMAGED` if a checksum does not hold."""
    options = _parser().parse(argv)
    try:
        found = zs.inspect_checkpoint(options.checkpoint, name=options.name, verify=not options.no_verify)
    except zs.ZeroshardError as error:
        return report_error(str(error))
    if options.json:
        print(json.dumps([one.to_dict() for one in found], indent=2))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
        console.print(_overview(found) if len(found) > 1 else _details(found[0]))
        if len(found) == 1:
            console.print(_files(found[0]))
    for one in found:
        if one.damage:
            print(f"zeroshard: error: {one.damage}", file=sys.stderr)
    return DAMAGED if any(one.damage for one in found) else 0


def _overview(found: list[zs.Inspection]) -> Table:
    """Of a folder of checkpoints, one a row."""
    table = Table("checkpoint", "step", "ranks", "stage", "precision", "parameters", "size", "saved", "checksums")
    for one in found:
        facts = [str(one.facts.get(key, "?")) for key in ("world_size", "stage", "precision")]
        size, saved = megabytes(one.nbytes), str(one.facts.get("time", "?"))
        table.add_row(Path(one.path).name, f"{one.step}", *facts, f"{one.numel:,}", size, saved, one.checksums)
    return table


def _details(one: zs.Inspection) -> Table:
    """Of one checkpoint, one fact a row."""
    table = Table(show_header=False, title=one.path, title_justify="left")
    rows = {"format": one.kind, "step": one.step, "checksums": one.checksums}
    rows |= {key.replace("_", " "): value for key, value in one.facts.items() if value is not None}
    rows["parameters"] = f"{one.numel:,} in {one.tensors} tensors"
    rows["optimizer states"] = f"{one.optimizer_tensors} tensors" if one.optimizer_tensors else "none"
    rows |= {f"bytes: {kind}": megabytes(nbytes) for kind, nbytes in one.kinds.items()}
    if one.ties:
        rows["tied"] = ", ".join(f"{alias} = {name}" for alias, name in one.ties.items())
    if one.extras:
        rows["extras"] = ", ".join(one.extras)
    if one.trained_only:
        rows["trained parameters alone"] = f"yes: {one.left_out} were left out"
    for key, value in rows.items():
        table.add_row(key, str(value))
    return table


def _files(one: zs.Inspection) -> Table:
    table = Table("file", "size")
    for name, nbytes in one.files.items():
        table.add_row(name, megabytes(nbytes))
    return table


def _parser() -> Parser:
    parser = Parser(prog="zeroshard inspect", description="Show what is in a checkpoint, and verify its checksums.")
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of checkpoints", metavar="DIR")
    parser.add_argument("--name", help="of one checkpoint in a folder of them (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums")
    return parser
