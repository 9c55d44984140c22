"""Compiles the native part into build/_standin.so, unless it is of these sources already: `python tests/gpu/cuda_standin/build.py`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = sorted((HERE / "native").glob("*.cpp"))
HEADERS = sorted((HERE / "native").glob("*.h"))
BUILD = HERE / "build"
LIBRARY = BUILD / "_standin.so"
TORCH = "2.13"  #: the version whose internals (hooks, guards, backends, private names of torch.cuda) this was written for


def torch_root() -> Path:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("cuda_standin: expected torch in this Python, found none; run ./test once, it makes .venv")
    version = importlib.metadata.version("torch")
    if not version.startswith(TORCH + "."):
        sys.exit(
            f"cuda_standin: expected torch {TORCH}, found {version}; it stands in for internals of torch that change "
            f"between versions (adapt it, then set TORCH in {Path(__file__).name})"
        )
    if "+cpu" not in version:
        print(f"cuda_standin: written for torch without CUDA, found {version}; its registrations may clash", file=sys.stderr)
    return Path(spec.origin).parent


def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        sys.exit("cuda_standin: expected g++ in PATH, found none; install it (Debian, Ubuntu: apt install g++)")
    return found


def digest(*facts: object) -> str:
    """Of the sources and of what else decides the result."""
    content = hashlib.sha256(repr(facts).encode())
    for source in [*SOURCES, *HEADERS]:
        content.update(source.name.encode() + source.read_bytes())
    return content.hexdigest()


def build() -> Path:
    """The library, compiled if need be: all sources at once, about a minute on two cores."""
    torch = torch_root()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    options = [
        "-O1", "-fPIC", "-std=c++20", "-w",  # torch's headers warn
        *(f"-I{path}" for path in includes),
        "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED", "-DTORCH_EXTENSION_NAME=_standin",
    ]  # fmt: skip
    wanted = digest(options, importlib.metadata.version("torch"), sys.version_info[:2])
    stamp = BUILD / "stamp"
    if LIBRARY.exists() and stamp.exists() and stamp.read_text() == wanted:
        return LIBRARY
    cxx = compiler()
    BUILD.mkdir(exist_ok=True)
    print(f"cuda_standin: compiling {len(SOURCES)} files", file=sys.stderr)
    objects = {source: BUILD / f"{source.stem}.o" for source in SOURCES}
    running = {source: subprocess.Popen([cxx, *options, "-c", source, "-o", made]) for source, made in objects.items()}
    failed = [source.name for source, process in running.items() if process.wait() != 0]
    if failed:
        sys.exit(f"cuda_standin: {', '.join(failed)} did not compile (messages above)")
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    fresh = BUILD / "_standin.new"
    link = [cxx, "-shared", *objects.values(), f"-L{torch}/lib", *libraries, f"-Wl,-rpath,{torch}/lib", "-o", fresh]
    if subprocess.run(link, check=False).returncode:
        sys.exit("cuda_standin: the library could not be linked (messages above)")
    fresh.replace(LIBRARY)
    stamp.write_text(wanted)
    return LIBRARY


if __name__ == "__main__":
    build()
