"""The documentation site builds without a warning, names all that is public, and shows numbers that were computed."""

import dataclasses
import html
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zeroshard as zs
from zeroshard import public
from zeroshard.planner.dry_run import plan
from zeroshard.planner.model_source import source_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "scripts"))
import make_pictures  # noqa: E402

STATES = ("parameters", "gradients", "master weights", "optimizer states")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    pytest.importorskip("mkdocstrings", reason="mkdocs needs Python 3.11.5")
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stdout + built.stderr
    return folder


@pytest.mark.night  # 15 s to build the site; of each push: the job `form` of test.yml
def test_the_site_builds_without_a_warning(site):
    assert (site / "examples" / "plain_loop.py").exists()
    options = (site / "reference" / "options" / "index.html").read_text()
    missing = [field.name for field in dataclasses.fields(zs.Config) if f"<code>{field.name}</code>" not in options]
    assert not missing, f"options.md has no row of {missing}"
    assert "<small>bool = True</small>" in options  # the type and the default, below a name


def signatures(path: Path) -> list[str]:
    """The signatures on a page of the site, without colours."""
    found = re.findall(r'doc-signature highlight">(.*?)</div>', path.read_text(), re.S)
    return [html.unescape(re.sub("<[^>]+>", "", each)).strip() for each in found]


@pytest.mark.night  # 15 s to build the site; of each push: the job `form` of test.yml
def test_shard_has_one_signature_with_the_type_and_default_of_each_option(site):
    [signature] = [each for each in signatures(site / "reference" / "sharding" / "index.html") if each.startswith("shard(")]
    lines = signature.splitlines()
    for field in dataclasses.fields(zs.Config):
        [line] = [line for line in lines if line.startswith(f"    {field.name}: ")]  # formatted: one line for each
        if field.default not in (None, dataclasses.MISSING) and isinstance(field.default, (int, str)):
            assert line.endswith(f" = {json.dumps(field.default) if isinstance(field.default, str) else field.default},"), line
    assert max(map(len, lines)) <= 120
    assert not [path for path in (site / "reference").rglob("*.html") if "Unpack" in "".join(signatures(path))]


@pytest.mark.night  # 15 s to build the site; of each push: the job `form` of test.yml
def test_a_search_for_gradient_accumulation_leads_to_its_verb(site):
    """The site's search weighs words of titles a thousand times those of texts."""
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    [entry] = [each for each in entries if each["title"].lower().startswith("gradient accumulation")]
    assert "reference/loop/#zeroshard.accumulate" in (site / "how-to" / "recipes" / "index.html").read_text()
    assert "zs.accumulate" in entry["text"]


def test_code_of_documents_fits_a_screen_of_1400_pixels():
    """tests/test_documents.py holds lines to 120 columns; a character of common monospaced fonts is up to 0.602 em wide."""
    style = (DOCS / "site.css").read_text()
    rem = {name: 20 * float(re.search(pattern, style)[1]) for name, pattern in {
        "font": r"pre > code \{ font-size: (\S+)rem", "left": r"\.md-sidebar \{ width: (\S+)rem", "page": r"md-grid \{ max-width: (\S+)rem",
        "right": r"--secondary \{ width: (\S+)rem",
    }.items()}  # fmt: skip  # a rem is 20 pixels on such a screen
    margins = 100  # of the content and its code, and the scroll bar
    assert 120 * 0.602 * rem["font"] + margins + rem["left"] + rem["right"] <= min(1400, rem["page"])


def test_code_of_the_first_page_fits_a_telephone():
    """390 pixels, of which the margins take 32; a character takes 6.5, as it is 10.8 high."""
    blocks = re.findall(r"```\w*\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    assert blocks and max(len(line) for block in blocks for line in block.splitlines()) <= 54


def test_pictures_of_the_first_page_show_the_numbers_of_their_sources():
    race, stages = ((DOCS / path).read_text() for path in ("race.svg", "learn/stages.svg"))
    for milliseconds, mebibytes in make_pictures.race().values():
        assert f">{milliseconds:.0f}<" in race and f">{mebibytes:.0f}<" in race, "run scripts/make_pictures.py --draw"
    peaks = json.loads((DOCS / "learn" / "memory.json").read_text())["peak"]
    for name in make_pictures.STAGES:
        assert f">{make_pictures.gib(sum(peaks[name]['device'].values())):.1f}<" in stages, "run scripts/make_pictures.py --draw"


def test_the_page_of_the_fine_tuning_shows_its_losses():
    page, found = ((DOCS / "how-to" / name).read_text() for name in ("fine-tune.md", "fine-tune.json"))
    losses, held_out = json.loads(found).values()
    shown = dict(re.findall(r"^step +(\d+): loss (\S+),", page, re.M))
    assert shown == {str(step): f"{losses[step - 1]:.3f}" for step in (1, 20, 40, 60, 80, 100)}
    assert f"held-out text: {held_out[0]:.3f} nats a token before, {held_out[1]:.3f} after" in page


def test_numbers_of_the_two_commands_are_those_of_the_pages_that_explain_them():
    told = (ROOT / "README.md").read_text() + (DOCS / "planning.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    numbers = [number for block in blocks for number in re.findall(r"\d[\d,.]*\d", block)]
    assert len(numbers) > 9 and not [number for number in numbers if number not in told]


def test_every_public_name_is_in_the_reference_once():
    """Those of `zeroshard` itself; models.md has names of modules beside it."""
    pages = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")) if path.name != "models.md")
    shown = re.findall(r"^::: zeroshard\.(?:\w+\.)*(\w+)$", pages, re.M) + re.findall(r"<!-- options: (\w+) -->", pages)
    assert len(shown) == len(set(shown)), sorted(name for name in set(shown) if shown.count(name) > 1)
    names = {*zs.__all__, *public._LATER} - {"__version__"}
    assert set(shown) == names, f"missing: {sorted(names - set(shown))}; not public: {sorted(set(shown) - names)}"


@pytest.mark.parametrize("cls", [zs.Config, zs.Offload, zs.Compression, zs.StateFormat], ids=lambda cls: cls.__name__)
def test_docstrings_of_options_name_each_field_once(cls):
    site_hooks = pytest.importorskip("site_hooks", reason="mkdocs needs Python 3.11.5")
    named = [name for names in site_hooks.entries(inspect.getdoc(cls)) for name in names]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(cls))


def test_tables_of_memory_are_those_of_the_plans():
    page, found = (DOCS / "learn" / "zero.md").read_text(), json.loads((DOCS / "learn" / "memory.json").read_text())
    assert page == make_pictures.with_tables(page, found), "run scripts/make_pictures.py --draw"


def test_memory_of_the_stages_is_that_of_the_formulas():
    """At rest: 2, 4, 4 and 8 bytes a parameter, in N parts what the stage shards; padding of shards is within a thousandth."""
    found = json.loads((DOCS / "learn" / "memory.json").read_text())
    psi, ranks = found["parameters"], found["ranks"]
    for stage, sharded in enumerate(((), STATES[2:], STATES[1:], STATES)):
        held = found["peak"][f"stage {stage}"]["device"]
        for state, nbytes in zip(STATES, (2, 4, 4, 8), strict=True):
            assert held[state] == pytest.approx(nbytes * psi / (ranks if state in sharded else 1), rel=1e-3)


@pytest.mark.slow  # fifteen seconds
def test_memory_is_what_a_plan_finds_now():
    found = json.loads((DOCS / "learn" / "memory.json").read_text())
    now = plan(source_of(make_pictures.MODEL).make, ranks=8, batch=(1, make_pictures.SEQUENCE), precision="bf16", stage=3)
    assert sum(found["peak"]["stage 3"]["device"].values()) == max(
        sum(phase.held[zs.config.Tier.DEVICE].values()) for phase in now.phases if phase.name in ("forward", "backward", "step")
    )


def test_the_largest_models_of_each_stage():
    """which-stage.md: billions of parameters of which 70 GiB hold the states in bf16 with Adam."""
    text = (DOCS / "which-stage.md").read_text().partition("<!-- made by tests/test_site.py: capacity -->\n\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.partition("\n\n")[0].splitlines()[2:]]

    def nbytes(stage: int, ranks: int) -> float:
        kept = (2, 4, 12)
        return sum(each / (ranks if stage >= needs else 1) for each, needs in zip(kept, (3, 2, 1), strict=True))

    expected = [
        [str(stage), f"{nbytes(stage, 8):.2f}", *(f"{70 * 2**30 / nbytes(stage, ranks) / 1e9:.1f}" for ranks in (1, 8, 64))]
        for stage in range(4)
    ]
    assert rows == expected
