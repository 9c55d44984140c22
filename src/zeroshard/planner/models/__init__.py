"""Small reference models for `zeroshard train`, the benchmarks and the tests, and the shapes of published models."""

from ..presets import CASE_STUDIES, CaseStudy, GPTConfig
from .gpt import GPT, Block

__all__ = ["CASE_STUDIES", "GPT", "Block", "CaseStudy", "GPTConfig"]
