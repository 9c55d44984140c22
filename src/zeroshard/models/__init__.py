"""Small reference models for `zeroshard train`, the benchmarks and the tests, and the shapes of published models."""

from .gpt import GPT, Block, GPTConfig
from .presets import CASE_STUDIES, CaseStudy

__all__ = ["CASE_STUDIES", "GPT", "Block", "CaseStudy", "GPTConfig"]
