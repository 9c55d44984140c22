"""Which tests `./test` runs (support/sample.py): all of the engine and the seam, of everything else a part, chosen once for all."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from sample import CASES, ENGINE, PART, SEAM, WHOLE, sampled

TESTS = Path(__file__).parent


def items(file: str, tests: int, cases: int, *marks: str) -> list[SimpleNamespace]:
    """So many cases of each of so many tests of a file, as pytest would have collected them."""
    return [
        SimpleNamespace(nodeid=f"tests/{file}.py::test_{test}[{case}]", get_closest_marker=dict.fromkeys(marks, True).get)
        for test in range(tests)
        for case in range(cases)
    ]


def names(found: list[SimpleNamespace]) -> list[str]:
    return [item.nodeid for item in found]


@pytest.mark.parametrize("file", ["zero/test_freezing", "comm/mesh/test_new", "checkpoint/test_save", "test_documents"])
@pytest.mark.parametrize("cases", [1, 3, 40])
def test_each_test_of_the_engine_and_of_the_seam_has_some_of_its_cases(file, cases):
    found, left = sampled(items(file, 7, cases))
    counts = Counter(name.partition("[")[0] for name in names(found))
    assert len(counts) == 7 and set(counts.values()) == {min(cases, max(CASES, cases // PART))}
    assert len(found) + len(left) == 7 * cases


@pytest.mark.parametrize("file", ["checkpoint/test_save_beside", "planner/search/test_search", "zeroes/test_freezing"])
def test_others_have_one_case_of_each_third_test(file):
    counts = Counter(name.partition("[")[0] for name in names(sampled(items(file, 7, 9))[0]))
    assert len(counts) == 3 and set(counts.values()) == {1}
    assert len(sampled(items(file, 1, 9))[0]) == 1


def test_what_takes_long_is_left_out_and_the_matrix_of_equality_is_whole():
    assert sampled(items("zero/test_freezing", 2, 2, "night"))[0] == []
    slow = items("zero/test_freezing", 2, 2, "slow")
    assert sampled(slow)[0] == [] and sampled(slow, slow=True)[0] == slow
    whole = items("end_to_end/test_equivalence", 2, 9)
    assert sampled(whole) == (whole, [])


def test_the_choice_does_not_depend_on_what_else_is_collected_nor_on_the_order():
    one, other = items("zero/test_freezing", 3, 30), items("cli/test_doctor", 9, 3)
    chosen = set(names(sampled(one)[0] + sampled(other)[0]))
    mixed = one + other
    random.Random(0).shuffle(mixed)
    found = names(sampled(mixed)[0])
    assert set(found) == chosen and found == [name for name in names(mixed) if name in chosen]


def test_folders_and_files_of_the_sample_exist():
    assert all((TESTS / folder).is_dir() for folder in ENGINE)
    assert all((TESTS / folder / f"test_{stem}.py").exists() for folder, stems in SEAM.items() for stem in stems)
    assert all((TESTS / "end_to_end" / f"test_{stem}.py").exists() for stem in WHOLE)
