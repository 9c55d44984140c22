"""Which tests `./test` runs: the engine by its contract, what satellites ask of it, and a sample of the rest. `./test --all` has all.

    the engine (ENGINE), and tests of a satellite's seam (SEAM)   every test; of its cases an eighth, and two at least
    all others                                                    of a file's tests a third, and one at least; one case of each
    files in WHOLE                                                all: their cases are a choice already
    tests marked `night`, and `slow` (ZEROSHARD_SLOW=1)            none

Tests and cases are chosen by a checksum of their names, so that the choice stays the same. docs/testing.md says what only
`./test --all` proves.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

# folders of rings 0 and 1; "" has the files of tests itself
ENGINE = {"zero", "tensor", "comm", "memory", "offload", "optim", "utils", ""}
SEAM = {  # folder -> files in which a satellite trains, saves or measures by the engine, and compares with one process or with ranks
    "checkpoint": {"checkpoint", "checkpoint_format", "checkpoint_loading", "checkpoint_refusals", "checkpoint_use", "save"},
    "data": {"uneven_data"},
    "activations": {"activations", "activation_inputs", "tiling"},
    "parallel": {"axes_together", "parallelize", "styles", "tensor_parallel"},
    "planner": {"against_ranks", "predictions", "plan_sequence"},
    "integrations": {"door", "engine", "engine_checkpoints", "lightning"},
    "cli": {"cli", "launch"},
    "benchmarks": {"bench"},
    "end_to_end": {"models", "processes", "training_loops"},
}
WHOLE = {"equivalence", "equivalence_wide"}  # each pair of values occurs
CASES, PART = 2, 8  # of a test of the engine or the seam: an eighth of its cases, but so many at least
TESTS = 3  # of another file: a third


def _first(names: Iterable[str], count: int) -> list[str]:
    """Return so many of the names, those with the smallest checksums."""
    return sorted(names, key=lambda name: zlib.crc32(name.encode()))[:count]


def asked(request: Any, argument: str) -> list[Any]:
    """Return the values that an argument of a file's tests has in the cases that run, for a world of processes that serves all of them."""
    cases = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return list(dict.fromkeys(case.params[argument] for case in cases if case and argument in case.params))


def sampled(items: Sequence[Any], slow: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the items to run, in their order, and the others. slow: those marked `slow` may be among the first."""
    left_out = ("night",) if slow else ("night", "slow")
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # file -> test -> cases, by their names
    for item in items:
        if not any(map(item.get_closest_marker, left_out)):
            test = item.nodeid.partition("[")[0]
            files[test.partition("::")[0]][test].append(item.nodeid)
    chosen: set[str] = set()
    for name, tests in files.items():
        parts = name.split("/")  # tests/comm/mesh/test_nodes.py: the folder "comm", the stem "nodes"
        folder, stem = parts[1] if len(parts) > 2 else "", parts[-1].removeprefix("test_").removesuffix(".py")
        if stem in WHOLE:
            chosen.update(*tests.values())
        elif folder in ENGINE or stem in SEAM.get(folder, ()):
            chosen.update(*(_first(cases, max(CASES, -(-len(cases) // PART))) for cases in tests.values()))
        else:
            chosen.update(*(_first(tests[test], 1) for test in _first(tests, -(-len(tests) // TESTS))))
    return [item for item in items if item.nodeid in chosen], [item for item in items if item.nodeid not in chosen]
