"""The order of the layers, written down once: a module imports from its own layer or those above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = [
    {"errors", "columns"},
    {
        *("schema", "durations", "windowing", "aggregation", "projection"),
        *("model", "operators", "grouping"),
    },
    {"core"},
    {"contracts", "storage", "jars", "launch", "session"},
    {"audit", "testing", "testing_kafka", "testing_state", "testing_store"},
    {"types", "resource", "metadata", "pictures", "checks", "io_manager", "ops", "sensors", "factory"},
    {"conformance", "components", "ci", "cli", "kafka", ""},
    {"resources"},
    {"assets"},
]
"""Of ``vt_dagster`` (``""`` is the package itself), then the code location's own packages."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
DAGSTER = LEVEL["ops"]

DEMO = {("cli", "assets")}
"""`vt-dagster demo` runs the worked example, where it is there."""


def modules() -> list[Path]:
    folders = ("vt_dagster", "resources", "assets")
    return sorted(p.relative_to(ROOT) for f in folders for p in (ROOT / f).rglob("*.py"))


def layer_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    if parts[0] == "vt_dagster":
        name = parts[1] if len(parts) > 1 else ""
        return name if name in LEVEL else ""
    return parts[0] if parts[0] in ("resources", "assets") else None


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_layer(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    layer = layer_of(".".join(parts))
    assert layer is not None
    if parts[0] == "vt_dagster" and len(parts) > 1:
        assert layer == parts[1], f"{path}: give the new module {parts[1]!r} a layer in LAYERS"
    return layer


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_point_upwards(path: Path) -> None:
    layer = own_layer(path)
    for name in imports(path):
        other = layer_of(name)
        if other is not None and (layer, other) not in DEMO:
            assert LEVEL[other] <= LEVEL[layer], f"{path} imports {name}, from a layer below its own"
        package = name.split(".")[0]
        if LEVEL[layer] < DAGSTER:
            assert not package.startswith("dagster"), f"{path} imports {name}"
        if layer == "core":
            assert package not in {"delta", "fsspec", "os", "pathlib", "time", "pandera"}, name


@pytest.mark.parametrize("path", [p for p in modules() if p.parts[1] == "core"], ids=str)
def test_core_has_no_session_no_action_no_clock(path: Path) -> None:
    forbidden = {
        *(
            "collect",
            "count_rows",
            "toPandas",
            "toLocalIterator",
            "foreach",
            "foreachPartition",
            "show",
        ),
        *("write", "writeTo", "persist", "cache", "checkpoint", "localCheckpoint", "take", "head"),
        *("sparkSession", "sparkContext", "rdd", "_jvm", "_jdf", "isEmpty", "tail"),
        *("current_timestamp", "now", "current_date", "rand", "uuid"),
    }
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if path.name in ("emit_early.py", "sessions.py", "sliding.py", "suppress.py"):
        used.discard("take")  # of Arrow arrays, in a kernel
    assert used & forbidden == set()


@pytest.mark.parametrize("path", modules(), ids=str)
def test_size(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert text.count("\n") <= 450, "look for the missing concept"


@pytest.mark.parametrize("path", [p for p in modules() if p.parts[0] == "vt_dagster"], ids=str)
def test_only_stable_dagster(path: Path) -> None:
    for name in imports(path):
        assert not name.startswith("dagster._"), f"{path} imports the private {name}"
