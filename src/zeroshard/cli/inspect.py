"""`zeroshard inspect`: what a checkpoint, or every checkpoint of a folder, holds, and whether its checksums hold.

zeroshard inspect runs/7/checkpoints
zeroshard inspect runs/7/checkpoints --name step-00000100 --json
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import zeroshard as zs

from . import report_error
from .arguments import Parser
from .sheets import Sheet, megabytes, show

DAMAGED = 1


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
        for sheet in [_overview(found)] if len(found) > 1 else [_details(found[0]), _files(found[0])]:
            show(sheet)
    for one in found:
        if one.damage:
            print(f"zeroshard: error: {one.damage}", file=sys.stderr)
    return DAMAGED if any(one.damage for one in found) else 0


def _overview(found: list[zs.Inspection]) -> Sheet:
    """Of a folder of checkpoints, one a row."""
    header = ("checkpoint", "step", "ranks", "stage", "precision", "parameters", "size", "saved", "checksums")
    rows = []
    for one in found:
        facts = [str(one.facts.get(key, "?")) for key in ("world_size", "stage", "precision")]
        size, saved = megabytes(one.nbytes), str(one.facts.get("time", "?"))
        rows.append((Path(one.path).name, f"{one.step}", *facts, f"{one.numel:,}", size, saved, one.checksums))
    return Sheet(rows, header)


def _details(one: zs.Inspection) -> Sheet:
    """Of one checkpoint, one fact a row."""
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
    return Sheet([(key, str(value)) for key, value in rows.items()], title=one.path)


def _files(one: zs.Inspection) -> Sheet:
    return Sheet([(name, megabytes(nbytes)) for name, nbytes in one.files.items()], ("file", "size"))


def _parser() -> Parser:
    parser = Parser(prog="zeroshard inspect", description="Show what is in a checkpoint, and verify its checksums.")
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of checkpoints", metavar="DIR")
    parser.add_argument("--name", help="of one checkpoint in a folder of them (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON: a list of objects")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums")
    return parser
