"""Small reference models, used by `zeroshard train`, the benchmarks and the tests; the shapes of published ones."""

from .gpt import GPT, Block, GPTConfig
from .presets import CASE_STUDIES, CaseStudy

__all__ = ["CASE_STUDIES", "GPT", "Block", "CaseStudy", "GPTConfig"]
