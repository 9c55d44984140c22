"""Small reference models, used by `zeroshard train`, the benchmarks and the tests."""

from .gpt import GPT, Block, GPTConfig

__all__ = ["GPT", "Block", "GPTConfig"]
