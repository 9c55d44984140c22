"""The trainings of pipeline.py on four ranks."""

from pipeline import run  # noqa: F401  # which run.py calls
