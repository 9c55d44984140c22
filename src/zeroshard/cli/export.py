"""The command `zeroshard export`: write a checkpoint's model as safetensors for `from_pretrained`, or with torch.save.

zeroshard export runs/7/checkpoints model --dtype bf16 --hf-config config.json
zeroshard export runs/7/checkpoints served --dtype bf16 --hf-config config.json --quantize int8
"""

import math
from collections.abc import Sequence

import zeroshard as zs

from .arguments import ExitCode, Parser, UsageError
from .options import PRECISIONS
from .sheets import megabytes, say


def main(argv: Sequence[str]) -> int:
    """Export a checkpoint; return the exit code."""
    what = "Write a checkpoint's model as files that other libraries read."
    parser = Parser(prog="zeroshard export", usage="%(prog)s [options] DIR OUT", description=what)
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of checkpoints", metavar="DIR")
    parser.add_argument("out", help="folder (safetensors) or file (torch) to make", metavar="OUT")
    parser.add_argument("--name", help="checkpoint in a folder of checkpoints (default: the newest complete one)")
    parser.add_argument("--dtype", choices=PRECISIONS, help="dtype of the files (default: as stored; fp32 from masters)")
    parser.add_argument("--format", choices=("safetensors", "torch"), default="safetensors", help="what to write")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of a safetensors file, in GB (1e9 bytes)")
    parser.add_argument("--hf-config", help="a Hugging Face config.json to put beside the files", metavar="FILE")
    parser.add_argument("--prefix", default="", help="export only names that begin so, and remove it (default: all names)")
    parser.add_argument(
        "--quantize", choices=("int8", "fp8"), help="write the weights of nn.Linear modules in 8 bits, with scales"
    )
    parser.add_argument("--model", help="whose nn.Linear modules to quantize, if not --hf-config's", metavar="MODULE:FUNCTION")
    parser.add_argument("--ignore", help="nn.Linear modules not to quantize, as lm_head,mlp.gate", metavar="NAME,...")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums first")
    options = parser.parse(argv)
    if not 0 < options.max_shard_gb < math.inf:
        raise UsageError(f"--max-shard-gb: expected a positive number, got {options.max_shard_gb}")
    import torch  # a mistake in the words of the call has been told without it

    from ..config import PRECISIONS as DTYPES
    from ..planner.model_source import source_of

    with torch.device("meta"):
        model = None if options.model is None else source_of(options.model).build()
    done = zs.export(
        options.checkpoint,
        options.out,
        name=options.name,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        format=options.format,
        max_shard_nbytes=max(int(options.max_shard_gb * 1e9), 1),
        config=options.hf_config,
        prefix=options.prefix,
        verify=not options.no_verify,
        quantize=options.quantize,
        model=model,
        ignore=None if options.ignore is None else [each for each in options.ignore.split(",") if each],
    )
    quantized = f" ({done.quantized} of them in {options.quantize})" if done.quantized else ""
    print(f"{done.path}: {done.tensors} tensors{quantized}, {done.numel:,} parameters, {megabytes(done.nbytes)}")
    for file in done.files:
        say(f"  {file}")
    return ExitCode.DONE
