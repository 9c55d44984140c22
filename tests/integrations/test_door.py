"""How `import deepspeed` finds zeroshard, and what the interface says of what it lacks."""

import importlib
import importlib.util
import os
import subprocess
import sys

import pytest

import zeroshard.deepspeed as deepspeed
from zeroshard.integrations.deepspeed import door
from zeroshard.integrations.deepspeed.door import _PATHS, SITE
from zeroshard.integrations.deepspeed.surface import SURFACE


def test_every_name_of_the_table_is_there(subtests):
    for path in sorted(SURFACE):
        with subtests.test(path=path):
            module = importlib.import_module(f"zeroshard.deepspeed.{path}" if path else "zeroshard.deepspeed")
            for name in SURFACE[path]:
                getattr(module, name)
            assert set(SURFACE[path]) <= set(dir(module))


def test_submodules_are_attributes():
    assert deepspeed.runtime.engine.DeepSpeedEngine is deepspeed.DeepSpeedEngine
    for path in _PATHS:
        assert path.partition(".")[0] in dir(deepspeed)


def test_a_missing_name_says_what_to_use():
    with pytest.raises(AttributeError, match="zeroshard.deepspeed has no compression.init_compression. Quantize"):
        deepspeed.compression.init_compression  # noqa: B018
    with pytest.raises(ImportError, match="zeroshard.deepspeed has no elasticity. Checkpoints"):
        from zeroshard.deepspeed import elasticity  # noqa: F401
    with pytest.raises(AttributeError, match="zeroshard.deepspeed has no runtime.engine.NoSuch"):
        deepspeed.runtime.engine.NoSuch  # noqa: B018
    assert not hasattr(deepspeed, "no_such_thing")
    with pytest.raises(ModuleNotFoundError, match="zeroshard.deepspeed has no no_such_module. See docs"):
        importlib.import_module("zeroshard.deepspeed.no_such_module")
    with pytest.raises(ModuleNotFoundError, match="zeroshard.deepspeed has no compression.compress. Quantize"):
        import zeroshard.deepspeed.compression.compress  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="zeroshard.deepspeed has no inference.v2. It trains"):
        from zeroshard.deepspeed.inference.v2 import Engine  # noqa: F401
    assert importlib.util.find_spec("zeroshard.deepspeed.no_such_module") is None


def test_names_can_be_assigned():
    module = importlib.import_module("zeroshard.deepspeed.runtime.engine")
    module.SOMETHING = 3
    assert deepspeed.runtime.engine.SOMETHING == 3
    del module.SOMETHING


def _run(code, *arguments, installed=False, **environment):
    prefix = "import zeroshard.deepspeed; zeroshard.deepspeed.install()\n" if installed else ""
    environment = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *(arguments or ("-c", prefix + code))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ASK = """
import importlib.metadata, importlib.util, sys
print(importlib.util.find_spec("deepspeed").origin is not None, importlib.metadata.version("deepspeed"))
import deepspeed, deepspeed.runtime.engine as engine
from deepspeed.runtime.engine import DeepSpeedEngine
import zeroshard.deepspeed
print(deepspeed is zeroshard.deepspeed, engine is zeroshard.deepspeed.runtime.engine, importlib.util.find_spec("deepspeed") is not None)
"""


def test_installed_in_this_process_and_its_children():
    child = f"{ASK}\nimport subprocess\nprint(subprocess.run([sys.executable, '-c', {ASK!r}], capture_output=True, text=True, check=False).stdout)"
    assert _run(child, installed=True) == ["True", "0.19.8+zeroshard", "True", "True", "True"] * 2


def test_install_comes_first():
    code = """
import sys, types
import zeroshard.deepspeed
for name in ("transformers", "accelerate", "deepspeed"):
    sys.modules[name] = types.ModuleType(name)
    try:
        zeroshard.deepspeed.install()
    except Exception as error:
        print(type(error).__name__, name in str(error))
    del sys.modules[name]
zeroshard.deepspeed.install()
import deepspeed
sys.modules["accelerate"] = sys
zeroshard.deepspeed.install()
print("again")
"""
    assert _run(code) == ["ConfigError", "True"] * 3 + ["again"]


def test_a_folder_of_configurations_is_no_deepspeed(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    assert door._is_first([str(tmp_path), str(SITE)])
    (tmp_path / "deepspeed" / "__init__.py").touch()
    assert not door._is_first([str(tmp_path), str(SITE)])


def test_a_script_unchanged(tmp_path):
    script = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script.write_text("import sys, deepspeed, beside\nprint(deepspeed.__version__, sys.argv[1:], beside.VALUE, __name__)\n")
    expected = ["0.19.8+zeroshard", "['--local_rank=0']", "7", "__main__"]
    assert _run("", "-m", "zeroshard.deepspeed", str(script), "--local_rank=0") == expected
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    assert _run("", "-m", "zeroshard.deepspeed", "-m", "train", "--local_rank=0", PYTHONPATH=path) == expected


def test_options_of_the_launcher_are_given_to_it():
    """As the installed command takes them; what it starts: test_deepspeed_launcher.py."""
    command = [sys.executable, "-m", "zeroshard.deepspeed", "--num_nodes", "1", "--num_gpus", "1", "none.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there is no script 'none.py' (--module runs a module)" in done.stderr


def test_the_folder_is_complete():
    assert (SITE / "deepspeed" / "__init__.py").exists()
    assert "Version: 0.19.8+zeroshard" in next(SITE.glob("deepspeed-*.dist-info/METADATA")).read_text()
