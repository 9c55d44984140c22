"""Tensor parallelism for models of the Transformer family, by PyTorch's own styles."""
