"""Formats in which optimizer states rest: int8, fp8, bf16 and others, with scales for blocks."""

from .state_codecs import FloatCodec, coded_column, labelled_column

__all__ = ["FloatCodec", "coded_column", "labelled_column"]
