"""The command `zeroshard inspect`: show the content of a run, a checkpoint, or a folder of either; verify checksums.

zeroshard inspect runs                                   a line for each run
zeroshard inspect runs/7
zeroshard inspect runs/7/checkpoints
zeroshard inspect runs/7/checkpoints --name step-00000100 --json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zeroshard as zs

from ..utils.sheets import Sheet
from .arguments import ExitCode, Parser, verbose
from .artefacts import CHECKPOINTS, CONFIG, METRICS, MODEL, REPORT, RunFolder
from .sheets import megabytes, print_json, show

MOST = 90  # checkpoints, or runs, that --json lists at most: the newest
_SCORED, _LOOKED = "held-out bits per byte before and after", "bits per byte of part of the held-out text, first and last"


def main(argv: Sequence[str]) -> int:
    """Inspect and print; return the exit code, `ExitCode.NO` if a checksum differs."""
    parser = Parser(
        prog="zeroshard inspect", usage="%(prog)s [options] DIR",
        description="Show what is in a run or a checkpoint, and verify its checksums; exit code 1 if one does not hold.",
    )  # fmt: skip
    parser.add_argument("folder", help="a run of `zeroshard train`, a checkpoint, or a folder of either", metavar="DIR")
    parser.add_argument("--name", help="one checkpoint in a folder of checkpoints (default: all)")
    told = "print JSON: a list of checkpoints; for a run an object with run and checkpoints, for several with runs"
    parser.add_argument("--json", action="store_true", help=told)
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums")
    options = parser.parse(argv)
    where, run, found = Path(options.folder), None, []
    if options.name is None and (where / METRICS).is_file():
        run = run_facts(where)
        where = where / CHECKPOINTS
    try:
        if run is None or where.is_dir():
            found = zs.inspect_checkpoint(where, name=options.name, verify=not options.no_verify)
    except zs.CheckpointNotFound:
        runs = list(where.glob(f"*/{METRICS}")) if run is None and options.name is None else []
        if runs:
            return _list(runs, options.json)
        if run is None:
            raise
    if options.json:
        several = []
        for one in found[-MOST:]:
            facts = {key: one.facts.get(key) for key in ("world_size", "stage", "precision", "time")}
            several.append({"path": one.path, "step": one.step, **facts, "numel": one.numel, "nbytes": one.nbytes,
                            "checksums": one.checksums, "damage": one.damage})  # fmt: skip
        listed = several if len(found) > 1 else [one.to_dict() for one in found]
        print_json(listed if run is None else {"run": run, "checkpoints": several})
    else:
        _show(run, found)
    damaged = [one for one in found if one.damage]
    for one in damaged:
        print(f"zeroshard: error: {one.damage}", file=sys.stderr)
    return ExitCode.NO if damaged else ExitCode.DONE


def _list(runs: list[Path], as_json: bool) -> int:
    """Print a line for each of the newest runs, of which these are the files of measurements."""
    newest = sorted(sorted(runs, key=lambda each: each.stat().st_mtime)[-MOST:])
    found = [run_facts(each.parent) for each in newest]
    rows = [{name: each.get(name) for name in ("folder", "finished", "steps", "ranks", "stage", "model")}
            | {"bits per byte": (each.get(_SCORED) or each.get(_LOOKED) or [None])[-1]} for each in found]  # fmt: skip
    if as_json:
        print_json({"runs": rows})
        return ExitCode.DONE
    shown = [["" if value is None else str(value) for value in (row | {"folder": each.parent.name}).values()]
             for row, each in zip(rows, newest, strict=True)]  # fmt: skip
    show(Sheet(header=tuple(rows[0]), rows=shown))
    count = f"{len(rows)} run{'s' * (len(rows) > 1)}" if len(rows) == len(runs) else f"the newest {len(rows)} of {len(runs)} runs"
    print(f"{count}; `zeroshard inspect` of one shows more")
    return ExitCode.DONE


def run_facts(folder: Path) -> dict[str, Any]:
    """Return facts of a run from its files: fewer for a run that was not finished."""
    records = RunFolder.recorded(folder, sys.maxsize)
    steps = [row for row in records if {"loss", "step", "seconds", "memory_nbytes"} <= row.keys()]
    looks = [row for row in records if "held_out_bits_per_byte" in row]
    config, report = _read(folder / CONFIG), _read(folder / REPORT)
    training, model = config.get("training", {}), config.get("model")
    facts = {
        "folder": str(folder), "finished": bool(report), "steps": steps[-1]["step"] if steps else 0,
        "steps asked for": training.get("steps"), "seconds of training": round(steps[-1]["seconds"], 1) if steps else 0,
        "ranks": report.get("world_size") or (len(steps[-1]["memory_nbytes"]) if steps else None),
        "stage": report.get("stage"), "mesh": training.get("mesh"), "precision": training.get("precision"),
        "model": f"GPT: {model['layers']} layers, dim {model['dim']}, {model['heads']} heads" if model else None,
        "model states of a rank, bytes": sum(report.get("at_rest", {}).values()) or None,
    }  # fmt: skip
    if scores := report.get("held_out_bits_per_byte"):
        facts[_SCORED] = [round(scores["before_training"], 3), round(scores["after_training"], 3)]
    elif looks:
        facts[_LOOKED] = [round(looks[place]["held_out_bits_per_byte"], 3) for place in (0, -1)]
    if (folder / MODEL).is_file():
        facts[MODEL] = megabytes((folder / MODEL).stat().st_size)
    return {name: value for name, value in facts.items() if value is not None}


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # missing if the run was not finished
        return {}


def _show(run: dict[str, object] | None, found: list[zs.Inspection]) -> None:
    if run is not None:
        told = [(name, " -> ".join(map(str, value)) if isinstance(value, list) else str(value)) for name, value in run.items()]
        show(Sheet(f"the run {run['folder']}", rows=told))
        if not found:
            print("no checkpoint: train with --save-every to have some")
    if len(found) > 1 or (run is not None and found):
        header = ("checkpoint", "step", "ranks", "stage", "precision", "parameters", "size", "saved", "checksums")
        listed = []
        for one in found:
            facts = [str(one.facts.get(key, "?")) for key in ("world_size", "stage", "precision")]
            size, saved = megabytes(one.nbytes), str(one.facts.get("time", "?"))
            listed.append((Path(one.path).name, f"{one.step}", *facts, f"{one.numel:,}", size, saved, one.checksums))
        show(Sheet(header=header, rows=listed))
    for one in found if (len(found) == 1 and run is None) or verbose() else ():
        rows: dict[str, Any] = {"format": one.kind, "step": one.step, "checksums": one.checksums}
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
        show(Sheet(one.path, rows=[(key, str(value)) for key, value in rows.items()]))
        show(Sheet(header=("file", "size"), rows=[(name, megabytes(nbytes)) for name, nbytes in one.files.items()]))
    if found:
        number, newest = f"{len(found)} checkpoint{'s' * (len(found) > 1)}", found[-1]
        print(f"{number}, the newest of step {newest.step}: checksums {newest.checksums}")
