"""PowerSGD (Vogels et al., arXiv 1905.13727, algorithms 1 and 2): gradients of matrices as products of two thin ones.

    M (n, m)  the gradient of a matrix on this rank, plus the error that remained of the last one
    P (n, r) = mean over ranks of M Q, orthogonalized         one all-reduce of all P, and of all uncompressed values
    Q (m, r) = mean over ranks of M^T P                       one all-reduce of all Q
    M is sent as P Q^T: r (n + m) values, not n m;  error = M - P (M^T P)^T, of this rank's own M

Each step begins with the last step's Q: this is one step of subspace iteration, so that P and Q follow the largest singular
vectors. Vectors, and matrices that would not become smaller, are sent uncompressed. All ranks start from the same Q and
orthogonalize the same P, with equal results on machines of one kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class _Matrix:
    """One compressed slot and its state, which lives as long as its LowRank."""

    offset: int
    shape: tuple[int, int]  # (n, m): the first dimension, and all others together
    q: Tensor  # (m, r) fp32: the mean Q of the last step
    error: Tensor  # (n, m) fp32: this rank's last M, minus its product of factors


class LowRank:
    """Mean over ranks of a flat gradient whose matrices are sent in rank `rank`.

    It replaces this rank's gradient, flat (numel,) of any floating dtype, by the mean over ranks of the sent products:
    `first`, an all-reduce, `second`, an all-reduce, `finish`. If a gradient is not finite on some rank, the result is not finite
    on any rank, and the errors of these matrices become zero.

    Args:
        slots: (offset, shape) of each parameter in the flat buffer, in elements; elements between slots are sent uncompressed.
        numel: elements of the flat buffer.
        rank: r; a higher rank sends more and loses less.
        seed: seed of the first Q, the same on every rank.
    """

    def __init__(
        self, slots: Sequence[tuple[int, Sequence[int]]], numel: int, *, rank: int = 4, seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.rank, self.numel, self._seed = rank, numel, seed
        self._matrices: list[_Matrix] = []
        self._ps: list[Tensor] = []  # from `second` to `finish`: P of each matrix, and (`_own`) this rank's own Q
        self._own: list[Tensor] = []
        self._plain: list[slice] = []  # stretches of the buffer that are sent uncompressed
        end = plain_begin = 0
        for offset, shape in sorted((offset, tuple(shape)) for offset, shape in slots):
            begin, end = end, offset + math.prod(shape)
            if offset < begin or end > numel:
                raise ValueError(f"low_rank: slot {shape} at {offset}: expected slots apart, within {numel} elements")
            n, m = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
            if rank * (n + m) < n * m:
                q = torch.empty(m, rank, device=device)
                self._matrices.append(_Matrix(offset, (n, m), q, torch.empty(n, m, device=device)))
                self._plain.append(slice(plain_begin, offset))
                plain_begin = end
        self._plain = [part for part in (*self._plain, slice(plain_begin, numel)) if part.start < part.stop]
        self.forget()

    def forget(self) -> None:
        """Start anew: errors of zero, and the first Q."""
        generator = torch.Generator("cpu").manual_seed(self._seed)
        for each in self._matrices:
            each.q = torch.randn(each.q.shape, generator=generator, device="cpu").to(each.q.device)
            each.error.zero_()

    @property
    def sent_numels(self) -> tuple[int, int]:
        """Number of values in each of the two all-reduces of one `reduce`."""
        plain = sum(part.stop - part.start for part in self._plain)
        rows, columns = (self.rank * sum(each.shape[axis] for each in self._matrices) for axis in (0, 1))
        return plain + rows, columns

    @property
    def state_numel(self) -> int:
        """Number of fp32 values kept between steps: errors and Qs."""
        return sum(each.error.numel() + each.q.numel() for each in self._matrices)

    @torch.no_grad()
    def first(self, flat: Tensor) -> Tensor:
        """Return the values of the first all-reduce, (n,) fp32: M Q of each matrix, then the uncompressed stretches."""
        for each in self._matrices:
            each.error.add_(self._of(flat, each))  # `error` is from here on the M of this step
        parts = [each.error @ each.q for each in self._matrices] + [flat[part].float() for part in self._plain]
        return torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, device=flat.device)

    @torch.no_grad()
    def second(self, flat: Tensor, mean: Tensor) -> Tensor:
        """Return the values of the second all-reduce, (m,) fp32, from the mean of the first. Fills `flat` where uncompressed."""
        thin = [each.error.new_empty(each.shape[0], self.rank) for each in self._matrices]
        means = _split(mean, thin + [flat[part] for part in self._plain])
        for part, values in zip(self._plain, means[len(thin) :], strict=True):
            flat[part].copy_(values)
        # QR, not Gram-Schmidt: its columns are orthonormal also for a gradient of zeros or of less than full rank
        self._ps = [torch.linalg.qr(values).Q for values in means[: len(thin)]]
        self._own = [each.error.T @ p for each, p in zip(self._matrices, self._ps, strict=True)]
        return torch.cat([part.reshape(-1) for part in self._own]) if self._own else torch.empty(0, device=flat.device)

    @torch.no_grad()
    def finish(self, flat: Tensor, mean: Tensor) -> None:
        """Write the mean gradient to `flat`, from the mean of the second all-reduce, and keep errors and Qs for the next step."""
        for each, p, q, values in zip(self._matrices, self._ps, self._own, _split(mean, self._own), strict=True):
            self._of(flat, each).copy_(p @ values.T)
            each.error.addmm_(p, q.T, alpha=-1).nan_to_num_(0.0, 0.0, 0.0)
            each.q = values.nan_to_num(0.0, 0.0, 0.0)
        self._ps, self._own = [], []

    @staticmethod
    def _of(flat: Tensor, matrix: _Matrix) -> Tensor:
        return flat[matrix.offset : matrix.offset + math.prod(matrix.shape)].view(matrix.shape)


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return [part.view(each.shape) for part, each in zip(flat.split([each.numel() for each in like]), like, strict=True)]
