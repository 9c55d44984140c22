"""The option `--mesh`: how many ranks stand along each axis of a mesh, and how that is said on one line.

    dp=2,pp=2,tp=2      8 ranks; rank = (pp place x dp + dp place) x tp + tp place

Whatever the order in which they are given, ranks of tp are neighbours, which send most, and those of pp are farthest
apart, which send least: so that tp stays inside of a node where it can.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..planner.models import GPTConfig
from .arguments import UsageError, closest

AXES = ("pp", "dp", "tp")  # outermost first


@dataclass(frozen=True)
class MeshAxes:
    """Ranks along each axis."""

    pp: int = 1  # stages of blocks
    dp: int = 1  # groups that share the batch, and the model states by ZeRO
    tp: int = 1  # parts of each weight

    @classmethod
    def parse(cls, text: str) -> MeshAxes:
        """The axes that `dp=2,pp=2` names; others are 1. Raises UsageError."""
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, count = (word.strip() for word in part.partition("="))
            if name not in AXES:
                raise UsageError(f"--mesh: expected axes like dp=2,pp=2,tp=2, got {part.strip() or text!r}{closest(name, AXES)}")
            if name in found:
                raise UsageError(f"--mesh: expected each axis once, got {name} twice in {text!r}")
            if not (count.isascii() and count.isdigit() and int(count)):
                raise UsageError(f"--mesh: expected a positive integer for {name}, got {count!r}; write {name}=2")
            found[name] = int(count)
        return cls(**found)

    def __str__(self) -> str:
        return f"dp={self.dp},pp={self.pp},tp={self.tp}"

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def cuts_model(self) -> bool:
        """Whether a rank has only a part of the model: more than data parallelism."""
        return self.pp * self.tp > 1

    def data_place(self, rank: int) -> int:
        """Which part of the batch a rank reads: its place along dp."""
        return rank // self.tp % self.dp

    def check_ranks(self, ranks: int) -> None:
        """Raise UsageError unless these are the ranks of the mesh; says the nearest mesh that they would be."""
        if ranks == self.ranks:
            return
        model, got = self.pp * self.tp, f"--mesh: expected axes that multiply to the {ranks} ranks, got {self} = {self.ranks}"
        if ranks % model == 0:
            raise UsageError(f"{got}; try --mesh dp={ranks // model},pp={self.pp},tp={self.tp}")
        below = ranks // model * model
        near = " or ".join(str(count) for count in (below, below + model) if count)
        raise UsageError(f"{got}; pp x tp = {model} needs a multiple of it: try {near} ranks")

    def check_model(self, shape: GPTConfig) -> None:
        """Raise UsageError unless heads divide over tp, and each stage of pp gets a block."""
        if shape.heads % self.tp:
            divisors = [count for count in range(1, shape.heads + 1) if shape.heads % count == 0]
            near = {max(d for d in divisors if d <= self.tp), min((d for d in divisors if d > self.tp), default=shape.heads)}
            raise UsageError(
                f"--mesh: expected tp to divide the model's {shape.heads} heads, got tp={self.tp}; "
                f"the nearest: {' or '.join(f'tp={d}' for d in sorted(near))}"
            )
        if self.pp > shape.layers:
            raise UsageError(
                f"--mesh: expected at most as many stages as the model has layers, {shape.layers}, got pp={self.pp}; "
                f"the nearest: pp={shape.layers}"
            )
