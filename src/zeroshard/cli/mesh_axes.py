"""The option `--mesh`: the numbers of ranks along the axes of a mesh, as text on one line.

    dp=2,pp=2,tp=2      8 ranks; rank = (pp index x dp + dp index) x tp + tp index
    dp=2,ep=2           4 ranks; rank = dp index x ep + ep index
    dp=2,sp=2           4 ranks; rank = dp index x sp + sp index

In whatever order the axes are given, ranks along tp, which send most, are neighbours, and ranks along pp, which send
least, are farthest apart, so that tp stays inside of a node where possible. Ranks along ep and sp stand between those of dp and tp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..planner.presets import GPTConfig
from .arguments import UsageError, closest

AXES = ("pp", "dp", "ep", "sp", "tp")  # outermost first


@dataclass(frozen=True)
class MeshAxes:
    """The numbers of ranks along the axes of a mesh."""

    pp: int = 1  # pipeline stages
    dp: int = 1  # data parallelism with ZeRO: parts of the batch
    tp: int = 1  # tensor parallelism: parts of each weight
    ep: int = 1  # expert parallelism: some of the experts; ranks along it read other parts of the batch
    sp: int = 1  # sequence parallelism: parts of each sequence

    @classmethod
    def parse(cls, text: str) -> MeshAxes:
        """Parse a text such as `dp=2,pp=2`; axes that are not named are 1. Raises UsageError."""
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
        text = f"dp={self.dp},pp={self.pp},tp={self.tp}" if self.cuts_model or self.sp == 1 else f"dp={self.dp}"
        return text + "".join(f",{name}={getattr(self, name)}" for name in ("ep", "sp") if getattr(self, name) > 1)

    @property
    def planned(self) -> dict[str, int]:
        """The axes that plans have, by name; ep and sp only where there are several ranks along them."""
        sizes = {name: getattr(self, name) for name in AXES}
        return {name: size for name, size in sizes.items() if size > 1 or name not in ("ep", "sp")}

    @property
    def ranks(self) -> int:
        return self.pp * self.readers * self.tp * self.sp

    @property
    def readers(self) -> int:
        """Number of parts of a batch, each of which another rank along dp and ep reads."""
        return self.dp * self.ep

    @property
    def cuts_model(self) -> bool:
        """True if a rank has only a part of the model: with tensor, pipeline or expert parallelism."""
        return self.pp * self.tp * self.ep > 1

    def data_place(self, rank: int) -> int:
        """Return a rank's index along dp and ep: that of the part of the batch that it reads."""
        return rank // (self.tp * self.sp) % self.readers

    def check_ranks(self, ranks: int) -> None:
        """Raise UsageError, which suggests a mesh or number of ranks, unless the mesh has as many ranks."""
        if ranks == self.ranks:
            return
        model, got = self.ranks // self.dp, f"--mesh: expected axes that multiply to the {ranks} ranks, got {self} = {self.ranks}"
        if ranks % model == 0:
            raise UsageError(f"{got}; try --mesh {replace(self, dp=ranks // model)}")
        below = ranks // model * model
        near = " or ".join(str(count) for count in (below, below + model) if count)
        word = " x ".join(name for name in AXES if name != "dp" and getattr(self, name) > 1)
        raise UsageError(f"{got}; {word} = {model} needs a multiple of it: try {near} ranks")

    def check_model(self, shape: GPTConfig) -> None:
        """Raise UsageError unless tp divides the heads, sp divides a sequence, and each stage of pp gets a block."""
        if shape.heads % self.tp:
            divisors = [count for count in range(1, shape.heads + 1) if shape.heads % count == 0]
            near = {max(d for d in divisors if d <= self.tp), min((d for d in divisors if d > self.tp), default=shape.heads)}
            raise UsageError(
                f"--mesh: expected tp to divide the model's {shape.heads} heads, got tp={self.tp}; "
                f"the nearest: {' or '.join(f'tp={d}' for d in sorted(near))}"
            )
        if self.sp > 1 and shape.positions == "alibi":
            raise UsageError(
                "--mesh: expected no sp for a model with ALiBi, whose bias is made for the tokens of a rank; leave out sp"
            )
        if shape.seq_len % self.sp:
            raise UsageError(f"--mesh: expected sp to divide the {shape.seq_len} tokens of a sequence (--seq), got sp={self.sp}")
        if self.ep > 1 and (not shape.experts or shape.experts % self.ep):
            count = max(shape.experts, self.ep)
            raise UsageError(
                f"--mesh: expected ep to divide the model's {shape.experts} experts, got ep={self.ep}; "
                f"try --experts {-(-count // self.ep) * self.ep}"
            )
        if self.pp > shape.layers:
            raise UsageError(
                f"--mesh: expected at most as many stages as the model has layers, {shape.layers}, got pp={self.pp}; "
                f"the nearest: pp={shape.layers}"
            )
