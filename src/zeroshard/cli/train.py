"""The command `zeroshard train`: train a byte-level GPT on a folder of text, on local ranks or under torchrun.

    zeroshard train --ranks 2                 starts two processes (see comm/launch.py), each a rank
    torchrun --nproc-per-node 2 -m zeroshard train
    zeroshard train --ranks 1                 one process, no process group
    zeroshard train --preset bloom --mesh dp=2,pp=2,tp=2      a published architecture in small, on a mesh of eight ranks

Rank 0 prints and writes files. A mistake in the call prints one line, and all ranks end with a non-zero exit code.
"""

import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs

from ..checkpoint.directory import LATEST
from ..comm import backend_select
from ..comm.launch import GRACE_S, spawn
from ..data.text import Corpus, compressed_bits_per_byte, read_corpus
from . import report_error, summary
from .arguments import ExitCode, UsageError
from .artefacts import BITS_PER_NAT, CHECKPOINTS, CONFIG, MODEL, REPORT, RunFolder
from .options import TrainOptions
from .progress import TrainingProgress
from .ranks import Ranks, check_gpus, join, launched
from .sheets import say
from .trainer import StepResult, Trainer


def main(options: TrainOptions, argv: Sequence[str]) -> int:
    """Run as a rank if a launcher started this process, else start the ranks; return the exit code."""
    if launched():
        return _join_and_run(options)
    on_mesh = options.axes.ranks if options.mesh is not None else None
    world_size = options.ranks or on_mesh or torch.cuda.device_count() or 2
    options.check_batch(world_size)
    check_gpus(options.device, world_size)  # here, since each rank would say so
    if world_size == 1:
        return _join_and_run(options)
    return spawn(["train", *argv], world_size)


def _join_and_run(options: TrainOptions) -> int:
    """Run as a rank; an error on one rank ends all ranks. Return the exit code.

    One of several ranks that fails prints the error, announces it to its peers, and ends at once: they may be in a collective.
    """
    ranks = join(options.device, options.threads)
    try:
        _run(options, ranks)
    except (UsageError, zs.ConfigError) as error:  # the same on all ranks: one prints it
        ranks.leave()
        return report_error(str(error)) if ranks.first else ExitCode.USAGE
    except BaseException as error:
        if ranks.world_size == 1:
            raise
        text = "".join(traceback.format_exception(error)).rstrip()
        if isinstance(error, zs.PeerFailed):  # the rank that failed prints the traceback
            text = f"stopped: {str(error).splitlines()[0]}"
        elif isinstance(error, KeyboardInterrupt):
            text = "interrupted" if ranks.first else ""  # once: the signal usually comes to all ranks
        backend_select.announce(error)
        sys.stdout.flush()
        print("".join(f"[rank {ranks.rank}] {line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)
        os._exit(ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED)
    ranks.leave()
    return 0


def _run(options: TrainOptions, ranks: Ranks) -> None:
    """Train, evaluate, sample, save and print the summary."""
    corpus = _prepare(options, ranks)
    if ranks.first and (otherwise := options.planned_otherwise(ranks.world_size)):
        print(f"zeroshard: {otherwise}", file=sys.stderr, flush=True)
    folder, path = _open_folder(options, ranks)
    trainer = Trainer(options, ranks, corpus)
    if options.resume is not None:
        folder = _resume(trainer, path)
    if folder is not None and options.log is not None:
        folder.write_events()
    if ranks.first:
        summary.opening(options, ranks, corpus)
        for note in zs.report(trainer.model).deviations if options.sums == "backend" else ():
            say(note)
    forecast = trainer.forecast() if options.uses_tiers else None
    if forecast is not None and ranks.first:
        say(f"forecast: {forecast}")
    try:
        before, steps = _train(trainer, folder, path / CHECKPOINTS)
    except BaseException:
        if trainer.saving is not None:  # several ranks end at once (above), and the launcher ends them after its grace
            trainer.saving.wait_part(None if ranks.world_size == 1 else 0.7 * GRACE_S)
        if ranks.first:
            print(f"zeroshard: stopped after {trainer.step:,} steps; {_goes_on(path)}", file=sys.stderr, flush=True)
        raise
    report = zs.report(trainer.model)
    activations = zs.activation_report(trainer.model) if options.checkpoints else None
    after = trainer.held_out_loss(overlap=True)
    prompt = options.prompt or ("def " if options.data is None else "\n")
    text = trainer.sample(prompt)
    zs.save_safetensors(trainer.model, path / MODEL)
    uneven = zs.expert_imbalance(trainer.model)
    trainer.close()
    if folder is None:
        return
    steps = steps or _steps_of(folder.records)
    baselines = compressed_bits_per_byte(trainer.held_out)
    folder.write_json(CONFIG, {"model": options.model_config().to_dict(), "training": asdict(options)})
    scores = {"before_training": before, "compressors": baselines, "after_training": after}
    # the first two steps allocate states
    median_s = statistics.median(step.step_seconds for step in steps[2:] or steps)
    outcome = summary.Outcome(
        scores, steps[-1], trainer.step_traffic, trainer.step_moved, forecast, median_s, activations, options, text, uneven
    )
    folder.write_text("sample.txt", text + "\n")
    folder.write_plot(baselines)
    folder.write_json(REPORT, {**report.to_dict(), **outcome.facts(report)})  # last: see `RunFolder.finished`
    folder.close()
    summary.closing(folder, report, outcome)


def _prepare(options: TrainOptions, ranks: Ranks) -> Corpus:
    """Check the options and read the text; if that fails on any rank, all ranks raise the same error (collective)."""
    corpus, error = None, None
    try:
        options.check_batch(ranks.world_size)
        if options.ranks not in (None, ranks.world_size):
            raise UsageError(
                f"--ranks: expected {ranks.world_size}, which the launcher started, got {options.ranks}; leave it out"
            )
        corpus = read_corpus(options.data, held_out_nbytes=options.eval_bytes)
        needed = 2 * options.seq + 1
        if corpus.train.numel() < needed:
            raise UsageError(
                f"--data: expected at least {needed} bytes to train on, got {corpus.train.numel()}; "
                "give more text or a smaller --seq"
            )
    except UsageError as found:
        error = str(found)
    except (ValueError, OSError) as found:  # from read_corpus
        error = f"--{found}" if isinstance(found, ValueError) else f"--data: {found}"
    ranks.agree("text of --data", corpus.digest if corpus is not None else None, error)
    assert corpus is not None, "else there is an error, which all raise"
    return corpus


def _open_folder(options: TrainOptions, ranks: Ranks) -> tuple[RunFolder | None, Path]:
    """Make or find the run's folder (collective); return rank 0's RunFolder (None on resume or other ranks), and the path."""
    folder, path, error = None, None, None
    try:
        if ranks.first and options.resume is not None:
            path = RunFolder.with_checkpoints(options.out, options.resume)
        elif ranks.first:
            folder = RunFolder.create(options.out)
            path = folder.path
    except UsageError as found:
        error = str(found)
    ranks.agree("--out", None, error)
    return folder, Path(ranks.of_first(str(path.absolute()) if path is not None else None))


def _resume(trainer: Trainer, path: Path) -> RunFolder | None:
    """Load a run's newest checkpoint, if it has one; return rank 0's folder, None on other ranks (collective).

    If all steps were taken but the results were not written, no error is raised, and the caller writes them. Raises UsageError.
    """
    found, folder, error = trainer.resume(path / CHECKPOINTS), None, None
    if trainer.ranks.first:
        try:
            if found is None and not RunFolder.unfinished(path):
                raise UsageError(f"--resume: expected an unfinished run or a complete checkpoint in {path}, which holds none")
            records = RunFolder.recorded(path, trainer.step)
            if trainer.complete and (RunFolder.finished(path, trainer.step) or not _steps_of(records)):
                told = f"{trainer.step} steps, {trainer.seconds:.0f} s"
                raise UsageError(f"--resume: the run is complete ({told}); give it more --steps or a longer --time-limit")
            folder = RunFolder(path, records)
        except OSError as problem:
            error = f"--resume: cannot write in {path}: {problem.strerror}"
        except UsageError as problem:
            error = str(problem)
    trainer.ranks.agree("--resume", None, error)
    if not trainer.ranks.first:
        return folder
    if found is None:
        say(f"nothing to resume from in {path} yet: from the beginning")
        return folder
    say(f"resumed from step {trainer.step:,}, after {trainer.seconds:.0f} s of training ({found})")
    if trainer.complete:
        say("all steps have been taken: the results are written")
    return folder


def _train(trainer: Trainer, folder: RunFolder | None, checkpoints: Path) -> tuple[float, list[StepResult]]:
    """Train; return the bits per byte of the held-out text before training, and the results of all steps."""
    options, results = trainer.options, []
    recorded = folder.records[0].get("held_out_bits_per_byte") if folder is not None and folder.records else None
    before = float(trainer.ranks.gather(-1.0 if recorded is None else recorded)[0, 0])
    if before < 0:  # else that of the run that is resumed
        before = trainer.held_out_loss()
        if folder is not None:
            folder.record(step=trainer.step, seconds=trainer.seconds, held_out_bits_per_byte=before)
    tokens_per_step = options.global_batch * options.seq
    with TrainingProgress(trainer.ranks.first) as progress:
        progress.note(f"held-out text before training: {before:.3f} bits per byte")
        for result in trainer.steps():
            results.append(result)
            rate = result.step * tokens_per_step / result.seconds
            progress.update(result.fraction, result.step, result.loss * BITS_PER_NAT, rate)
            if folder is not None:
                folder.record(**asdict(result))
            if result.step % options.eval_every == 0 or result.fraction == 1.0:
                bits = trainer.held_out_loss()
                progress.note(f"part of the held-out text after {result.step} steps: {bits:.3f} bits per byte")
                if folder is not None:
                    folder.record(step=result.step, seconds=result.seconds, held_out_bits_per_byte=bits)
            if options.save_every and (result.step % options.save_every == 0 or result.fraction == 1.0):
                trainer.save(checkpoints)  # after all rows of the step, since a resume keeps rows up to this step
    if trainer.saving is not None:
        trainer.saving.wait()
    return before, results


def _goes_on(path: Path) -> str:
    """Return the part of a sentence that says how a run that was stopped can be resumed, and from where."""
    again = f"the same call with --resume {os.path.relpath(path)}"
    try:
        newest = (path / CHECKPOINTS / LATEST).read_text().splitlines()[0]
    except (OSError, IndexError):  # no checkpoint yet
        return f"{again} begins anew, since there is no checkpoint (--save-every N saves some)"
    return f"{again} goes on from {newest}"


def _steps_of(records: list[dict[str, Any]]) -> list[StepResult]:
    """Return the results of steps from rows of metrics.jsonl."""
    rows = [row for row in records if "loss" in row]
    return [StepResult(**{**row, "memory_nbytes": tuple(row["memory_nbytes"])}) for row in rows]
