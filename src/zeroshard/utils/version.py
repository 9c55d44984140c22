"""The version, as pyproject.toml has it, and the releases of torch on which the tests have been run."""

__version__ = "0.1.0"
# release of torch -> the day on which every test last passed on it, or passed when run again alone; the README names them, too.
# CI has the one of requirements/torch.txt. 2.11.0 and 2.14.1: builds for CUDA, on machines without a GPU.
TESTED_TORCH = {"2.11.0": "2026-11-21", "2.13.0": "2026-11-26", "2.14.1": "2026-11-25"}
