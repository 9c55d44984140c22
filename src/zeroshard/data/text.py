"""Text as bytes: reading a folder, splitting it, and batches that do not depend on the number of ranks.

Words: a *corpus* is the text of many files, joined with one zero byte after each; *held-out* files are never
trained on; a *window* is `seq` inputs and the `seq` targets one byte further on.

Invariants
- The split is by file and depends on names only, so that it is the same on every machine; a single file is split near its end.
- Row `i` of step `s` is a function of (seed, s, i), and ranks take consecutive rows of the same global batch.

      global batch of step s     | row 0 | row 1 | row 2 | row 3 |
      2 ranks                    |---- rank 0 ---|---- rank 1 ---|
      1 rank, 2 micro-batches    |--- micro 0 ---|--- micro 1 ---|

- An epoch reads each window once, in an order drawn from (seed, epoch), from a starting byte drawn likewise.
"""

import hashlib
import lzma
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR = b"\0"
MAX_CORPUS_NBYTES = 2**30
SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})
# Skipped in the standard library: tests repeat themselves, encodings and pydoc_data are tables.
SKIPPED_IN_STDLIB = frozenset({"test", "tests", "idlelib", "idle_test", "lib2to3", "encodings", "pydoc_data", "turtledemo"})


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text as bytes."""

    name: str
    train: Tensor  # (train_nbytes,) uint8
    held_out: Tensor  # (held_out_nbytes,) uint8
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of both parts, to compare between ranks."""
        both = hashlib.sha256(self.train.numpy().tobytes())
        both.update(b"|" + self.held_out.numpy().tobytes())
        return both.hexdigest()


def read_corpus(folder: str | Path | None = None, *, held_out_nbytes: int = 2**17) -> Corpus:
    """Read all text below `folder` (or one file; None: the Python standard library) and split it.

    The held-out part gets whole files, in an order drawn from their names, until it has `held_out_nbytes` bytes or a
    tenth of the corpus, whichever is less.
    """
    root = Path(sysconfig.get_path("stdlib")) if folder is None else Path(folder)
    if not root.exists():
        raise ValueError(f"data: expected a folder or a file with text, got {str(root)!r}, which does not exist")
    documents = dict(_read_documents(root, stdlib=folder is None))
    if not documents:
        raise ValueError(f"data: expected text files below {str(root)!r}, found none (files with zero bytes are skipped)")
    name = "Python standard library" if folder is None else root.name or str(root)
    target_nbytes = min(held_out_nbytes, sum(map(len, documents.values())) // 10)
    if len(documents) == 1:  # hold out the end of the file
        file, content = next(iter(documents.items()))
        cut = len(content) - max(1, target_nbytes)
        return Corpus(name, _as_tensor(content[:cut]), _as_tensor(content[cut:]), (file,), (f"{file} (tail)",))
    # hold out whole files, the ones whose hashed names come first: at least one, and train on at least one
    order = sorted(documents, key=lambda file: hashlib.sha256(file.encode(errors="surrogateescape")).digest())
    count, nbytes = 0, 0
    while count == 0 or (nbytes < target_nbytes and count < len(order) - 1):
        nbytes += len(documents[order[count]]) + len(SEPARATOR)
        count += 1
    held_out_files, train_files = tuple(order[:count]), tuple(order[count:])
    parts = [b"".join(documents[file] + SEPARATOR for file in files) for files in (train_files, held_out_files)]
    return Corpus(name, _as_tensor(parts[0]), _as_tensor(parts[1]), train_files, held_out_files)


def _read_documents(root: Path, stdlib: bool) -> Iterator[tuple[str, bytes]]:
    """Yield (relative name, content) of each text file, in the order of names."""
    total_nbytes = 0
    for path in [root] if root.is_file() else _walk(root, SKIPPED_IN_STDLIB if stdlib else frozenset()):
        if stdlib and path.suffix != ".py":
            continue
        content = path.read_bytes()
        if not content or SEPARATOR in content:
            continue
        total_nbytes += len(content)
        if total_nbytes > MAX_CORPUS_NBYTES:
            raise ValueError(
                f"data: expected at most {MAX_CORPUS_NBYTES} bytes of text below {str(root)!r}; choose a smaller folder"
            )
        yield (path.name if path == root else path.relative_to(root).as_posix()), content


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield regular files below `root` in the order of names, without hidden ones, links and skipped folders."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS | skipped)
        for file in sorted(files):
            path = Path(folder) / file
            if not file.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    """The global batches of a run, of which each rank asks for its rows.

    `batch`: sequences of all ranks and micro-batches together, so that the text of a step depends on neither number.
    """

    text: Tensor  # (nbytes,) uint8
    seq: int
    batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.text.numel() < 2 * self.seq + 1:
            raise ValueError(
                f"data: expected at least 2 * seq + 1 = {2 * self.seq + 1} bytes of training text, "
                f"got {self.text.numel()}; give more text or a smaller seq"
            )

    @property
    def windows(self) -> int:
        """Number of windows in one epoch, whichever byte it starts from."""
        return (self.text.numel() - self.seq) // self.seq

    def offsets(self, step: int) -> list[int]:
        """Return the first byte of each row of the global batch of `step`: (batch,)."""
        found = []
        for i in range(step * self.batch, (step + 1) * self.batch):
            epoch, place = divmod(i, self.windows)
            start, order = _epoch(self.seed, epoch, self.windows, self.seq)
            found.append(start + self.seq * int(order[place]))
        return found

    def rows(self, step: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets (count, seq) int64 of rows `first` .. `first + count` of the global batch of `step`."""
        if first < 0 or count < 1 or first + count > self.batch:
            raise ValueError(f"rows: expected a part of 0..{self.batch}, got {first}..{first + count}")
        starts = self.offsets(step)[first : first + count]
        window = torch.stack([self.text[start : start + self.seq + 1] for start in starts]).long()  # (count, seq + 1)
        return window[:, :-1], window[:, 1:]

    def part(self, step: int, rank: int, world_size: int, micro: int = 0, accumulate: int = 1) -> tuple[Tensor, Tensor]:
        """Return micro-batch `micro` of `rank`: inputs and targets, each (batch / world_size / accumulate, seq)."""
        count, rest = divmod(self.batch, world_size * accumulate)
        if rest or not count:
            raise ValueError(f"batch: expected a multiple of ranks x accumulate = {world_size} x {accumulate}, got {self.batch}")
        return self.rows(step, (rank * accumulate + micro) * count, count)


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, windows: int, seq: int) -> tuple[int, Tensor]:
    """Return an epoch's starting byte, in 0..seq-1, and its order of windows (windows,)."""
    digest = hashlib.sha256(f"zeroshard {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # a seed is a signed 64-bit number
    start = int(torch.randint(seq, (1,), generator=generator, device="cpu"))
    return start, torch.randperm(windows, generator=generator, device="cpu")


def held_out_windows(text: Tensor, seq: int, stride: int) -> tuple[Tensor, Tensor]:
    """Cut `text` into overlapping windows, (count, seq + 1) int64, with a mask (count, seq) of the targets to score.

    Each byte but the first is scored once. Windows start every `stride` bytes, and score only targets that no earlier
    window has scored, so a byte has at least `seq - stride` bytes of context where the text has them.
    Short text is padded with zeros that are not scored.
    """
    if not 1 <= stride <= seq:
        raise ValueError(f"stride: expected 1 <= stride <= seq = {seq}, got {stride}")
    starts = range(0, max(1, text.numel() - 1 - (seq - stride)), stride)
    windows = torch.zeros(len(starts), seq + 1, dtype=torch.long, device="cpu")
    scored = torch.zeros(len(starts), seq, dtype=torch.bool, device="cpu")
    for row, start in enumerate(starts):
        piece = text[start : start + seq + 1]
        windows[row, : piece.numel()] = piece.long()
        scored[row, (0 if row == 0 else seq - stride) : piece.numel() - 1] = True
    return windows, scored


def compressed_bits_per_byte(text: Tensor) -> dict[str, float]:
    """Return bits per byte of `text` under zlib and lzma at their strongest levels, without a dictionary."""
    content = text.numpy().tobytes()
    sizes = {"zlib -9 (gzip)": zlib.compress(content, 9), "lzma -9 (xz)": lzma.compress(content, preset=9)}
    return {name: 8 * len(packed) / len(content) for name, packed in sizes.items()}
