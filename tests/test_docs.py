"""Tests of every block of code in the documentation, and of the pictures of the recorded scenarios."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import dagster as dg
import pytest
import typer
import yaml
from click import Command, Context
from pyspark.sql import SparkSession

import vt_dagster
from tests.test_components import project
from vt_dagster import SparkResource, Stream, Table, build_definitions
from vt_dagster.cli import app
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.options import OPTIONS, Consumer

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINE = 93
"""The longest line of a block of code, in characters."""
WORDS = (ROOT / "tests" / "docs_namespace.py").read_text(encoding="utf-8")
LANGUAGES = {"python", "yaml", "bash", "text", ""}
OF_DEPLOYMENTS = ("cp", "chmod", "mkdir", "openssl", "docker", "kubectl", "helm")
"""Programs that a deployment uses; ``test_deploy.py`` tests their arguments."""
PRICES = "product,price,at\napple,1.0,2026-01-31T10:00:00Z\napple,1.4,2026-01-31T14:00:00Z\n"
ORDERS = "order_id,product,ordered_at\n1,apple,2026-01-31T11:00:00Z\n2,apple,2026-01-31T15:00:00Z\n"

sys.path.insert(0, str(DOCS / "_made"))
import drawings  # noqa: E402  # pyright: ignore[reportMissingImports]
import hook  # noqa: E402  # pyright: ignore[reportMissingImports]
import scenarios  # noqa: E402  # pyright: ignore[reportMissingImports]
import tables  # noqa: E402  # pyright: ignore[reportMissingImports]


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [Block(*one) for one in found]


def code_of(page: Path) -> list[str]:
    """Returns the lines of all blocks of code, also of those that are only indented."""
    found = [line for block in blocks(page) for line in block.text.splitlines()]
    text = page.read_text(encoding="utf-8")
    indented = re.findall(r"(?:^|\n)\n((?: {4}[^\n]*\n)+)", text)
    return [*found, *(line[4:] for part in indented for line in part.splitlines())]


def pages_with(language: str) -> list[Any]:
    found = [page for page in PAGES if any(b.language == language for b in blocks(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


@pytest.fixture(scope="module")
def shop(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's directory: landing files, and a warehouse that a run wrote from them."""
    home = tmp_path_factory.mktemp("shop")
    for name, text in (("prices", PRICES), ("orders", ORDERS)):
        (home / "landing" / name).mkdir(parents=True)
        (home / "landing" / name / "1.csv").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        words: dict[str, Any] = {}
        exec(compile(WORDS, "docs_namespace.py", "exec", dont_inherit=True), words)
        defs = build_definitions(
            words["priced"], warehouse="warehouse", spark=SparkResource(master="local[2]")
        )
        assert defs.resolve_implicit_global_asset_job_def().execute_in_process().success
    return home


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks(
    page: Path, shop: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page run one after the other. Their definitions load, and their tests pass."""
    monkeypatch.chdir(shop)
    names: dict[str, Any] = {}
    exec(compile(WORDS, "docs_namespace.py", "exec", dont_inherit=True), names)
    for block in blocks(page):
        if block.language != "python":
            continue
        before = names.get("defs")
        exec(compile(block.text, str(page), "exec", dont_inherit=True), names)
        if names.get("defs") is not before:
            names["defs"].resolve_asset_graph()
        for name in re.findall(r"^def (test_\w+)\(topology\)", block.text, re.MULTILINE):
            names[name](lambda *nodes: TopologyTestDriver(*nodes, spark=spark))


@pytest.mark.parametrize("page", pages_with("python"))
def test_module_has_one_definitions_object(page: Path) -> None:
    """Dagster refuses a module with two ``Definitions`` objects, under any names."""
    code = "".join(block.text for block in blocks(page) if block.language == "python")
    made = r"^(\w+) = (?:(?:dg\.)?Definitions\b|build_(?:alerts|definitions|maintenance)\()"
    assert {*re.findall(made, code, re.MULTILINE)} <= {"defs"}


@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")
@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.PreviewWarning")
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
@pytest.mark.parametrize("page", pages_with("yaml"))
def test_yaml_blocks(page: Path) -> None:
    for block in (b for b in blocks(page) if b.language == "yaml"):
        with project(block.text.replace("my_project.schemas", ".schemas")) as defs:
            dg.Definitions.validate_loadable(defs)
            assert defs.resolve_asset_graph().get_all_asset_keys()


def commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


def check_command(words: list[str]) -> None:
    """Requires that a command, its sub-command and its options exist."""
    group: Any = typer.main.get_command(app)
    command: Command = group.get_command(Context(group), words[1])
    assert command is not None, words
    rest = words[2:]
    if getattr(command, "commands", None):
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for one in command.params for option in one.opts}
    given = {word for word in rest if word.startswith("-")}
    assert given <= known, f"{' '.join(words)}: {given - known}"


@pytest.mark.parametrize("page", pages_with("bash"))
def test_bash_blocks(page: Path) -> None:
    makefiles = [ROOT / "Makefile", ROOT / "vt_dagster" / "cli" / "project" / "any" / "Makefile.txt"]
    targets = {t for m in makefiles for t in re.findall(r"^([a-z-]+):", m.read_text(), re.MULTILINE)}
    for block in (b for b in blocks(page) if b.language == "bash"):
        for words in commands(block.text):
            if words[0] == "vt-dagster":
                check_command(words)
            elif words[0] == "make":
                assert set(words[1:]) <= targets
            else:
                assert words[0] in ("dg", "cd", "printf", "pip", *OF_DEPLOYMENTS), words


def test_code_lines_fit_site() -> None:
    """No line of code is longer than ``LINE`` characters. A window of 1280 pixels shows that many, in a
    block that is not in a list."""
    long = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in (*PAGES, *ROOT.glob("examples/*/*.md"), *ROOT.glob("bench/*.md"))
        for line in code_of(page)
        if len(line) > LINE
    ]
    assert long == []


def test_every_block_language_is_tested() -> None:
    found = {(b.language, page.name) for page in PAGES for b in blocks(page)}
    assert {name for language, name in found if language not in LANGUAGES} == set()


def test_named_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text() + (
        ROOT / "vt_dagster" / "cli" / "project" / "any" / "Makefile.txt"
    ).read_text()
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_pre_commit_runs_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"].replace(" --force-exclude", "") for hook in hooks] == [
        line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()
    ]


def test_named_commands_exist() -> None:
    for page in PAGES:
        for line in re.findall(r"`(vt-dagster [a-z][^`]*)`", page.read_text(encoding="utf-8")):
            check_command(shlex.split(line.replace("\n", " ").replace("…", ""), comments=True))


def test_each_worked_scenario_is_on_one_page() -> None:
    made = re.compile(r"<!-- made: scenarios (\S+) ?(.*?) -->")
    found = {m.group(1): m for p in PAGES if (m := made.search(p.read_text(encoding="utf-8")))}
    assert {scenarios.page_of(one) for one in scenarios.worked().values()} == set(found)
    assert len(scenarios.worked()) > 180
    for page, marker in found.items():
        text = scenarios.scenarios(page, marker.group(2).split())
        names = re.findall(r'^\?\?\?\+? example "(.+)"$', text, re.MULTILINE)
        of_page = [n for n, one in scenarios.worked().items() if scenarios.page_of(one) == page]
        assert sorted(names) == sorted(of_page)


def test_picture_shows_each_record_and_result() -> None:
    one = scenarios.worked()["kip923-small-example-table-late"]
    drawn = ElementTree.fromstring(scenarios.picture(one))
    told = [e.text for e in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "table 2: x @ 2" in told
    assert [t for t in told if t and re.match(r"\d: \(", t)] == [
        *("2: (e,b) @ 1", "2: (g,x) @ 2", "3: (f,c) @ 2", "3: (h,y) @ 3", "1: (d,a) @ 4")
    ]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == len(one["records"])


@pytest.mark.parametrize("name", sorted(drawings.DRAWINGS))
def test_drawings_have_aria_label(name: str) -> None:
    drawn = ElementTree.fromstring(drawings.DRAWINGS[name]())
    assert drawn.attrib["aria-label"]
    assert any(f"made: drawing {name} " in page.read_text(encoding="utf-8") for page in PAGES)


def test_reference_lists_each_public_name() -> None:
    reference = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    homes = vt_dagster._HOMES
    listed = re.findall(r"^::: (\S+\.)(\w+)$", reference, re.MULTILINE)
    assert {name: home.rstrip(".") for home, name in listed} == homes


def test_options_page_lists_each_option_and_refusal() -> None:
    page, matrix = tables.options(), tables.option_matrix().splitlines()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [
        *(o.name for o in OPTIONS if o.name != "freshness" and o.name in Stream.__dataclass_fields__),
        *("freshness", "broadcast", "deleted_when", "deleted_at"),
        *(o.name for o in OPTIONS if o.name not in Table.__dataclass_fields__),
    ]
    columns = re.findall(r"`(\w+)`", matrix[0])
    rows = {cells[1]: cells[2:] for cells in (re.split(r" ?\| ?", line) for line in matrix[2:])}
    assert list(rows) == [consumer.value for consumer in Consumer]
    for option in OPTIONS:
        for consumer, refusal in option.refused.items():
            cell = rows[consumer.value][columns.index(option.name)]
            assert cell == f"**no**: {refusal.why}; {refusal.instead}"


class _Page:
    class file:
        src_uri = "a.md"


@pytest.mark.parametrize(
    "loads",
    [
        '<script src="https://cdn.example/x.js">',
        '<img alt="a" src=//cdn.example/x.png>',
        '<link href="https://fonts.example/css" rel="stylesheet">',
        '<link rel=preconnect href="https://fonts.example">',
    ],
)
def test_page_with_external_resources_is_refused(loads: str) -> None:
    assert hook.on_post_page('<a href="https://a.example">to read</a>', _Page) is not None
    with pytest.raises(hook.PluginError, match="loads from another site"):
        hook.on_post_page(loads, _Page)


def test_links_to_files_outside_docs() -> None:
    text = "[a](docs/start/files.md#a-test) [b](tests/README.md) [c](Makefile) [d](https://e.example)"
    assert hook.linked(text, "README.md", "index.md") == (
        "[a](start/files.md#a-test) [b](faults.md) `Makefile` [d](https://e.example)"
    )
    assert hook.linked("[r](README.md#a-run)", "bench/large_site.md", "benchmarks/large_site.md") == (
        "[r](../benchmarks/index.md#a-run)"
    )
