"""Every program of examples/ runs, as the documents say, on one CPU process in seconds."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNS = {  # program: (what has to be installed, how it is started, what its last line says)
    "plain_loop.py": ((), (), "parameters trained"),
    "offload_to_disk.py": ((), (), ""),
    "export_to_hugging_face.py": (("transformers",), (), "parameters read from"),
    "lora.py": (("peft",), (), "tensors saved"),
    "deepspeed_script.py": ((), ("-m", "zeroshard.deepspeed"), "15 steps"),
    "transformers_trainer.py": (("transformers", "accelerate"), ("-m", "zeroshard.deepspeed"), "model.safetensors"),
    "accelerate_loop.py": (("accelerate",), ("-m", "zeroshard.deepspeed"), "whole tensors, by DeepSpeedEngine"),
    "trl_sft.py": (("trl", "datasets"), ("-m", "zeroshard.deepspeed"), "model.safetensors"),
    "trl_dpo.py": (("trl", "datasets"), ("-m", "zeroshard.deepspeed"), "rewards/accuracies 1.00"),
    "three_axes.py": (("transformers",), ("-m", "torch.distributed.run", "--nproc-per-node", "1"), "sent by this rank"),
    "lightning_strategy.py": (("lightning",), None, ""),  # in tests/integrations/test_lightning.py: it starts two ranks
}
INTO_A_FOLDER = {
    "offload_to_disk.py",
    "export_to_hugging_face.py",
    "lora.py",
    "transformers_trainer.py",
    "trl_sft.py",
    "trl_dpo.py",
}


# what they do is done in tests/integrations, tests/offload, tests/checkpoint and tests/parallel as well
SLOW = {
    "transformers_trainer.py",
    "accelerate_loop.py",
    "lora.py",
    "offload_to_disk.py",
    "three_axes.py",
    "export_to_hugging_face.py",
}


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in sorted(path.name for path in (ROOT / "examples").glob("*.py"))
    ],
)
@pytest.mark.limit(120)
def test_example(program, tmp_path):
    needed, start, says = RUNS[program]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")  # ./test installs all but trl, which test_trl explains
    if start is None:
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folder = (
        [str(tmp_path)] if program in INTO_A_FOLDER else ["--mesh", "1,1,1", "--steps", "5"] if program == "three_axes.py" else []
    )
    command = [sys.executable, *start, str(ROOT / "examples" / program), *folder]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert says in done.stdout.strip().split("\n")[-1] or not says, done.stdout


def test_every_example_is_in_the_documents():
    shown = (ROOT / "docs" / "ecosystem.md").read_text()
    for program in RUNS:
        assert program in shown, program
