"""The layers of packages: a package imports only from layers above its own, and without cycles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.syntax_trees import ROOT, files, nodes
from vt_dagster.conformance.scenario import read_scenarios
from vt_dagster.topology import operators
from vt_dagster.topology.node import Operator

CONFORMANCE = ROOT / "tests" / "conformance"

LAYERS = [
    {"errors", "columns", "rules", "drawing"},
    {"topology"},
    {"core"},
    {"spark"},
    {"storage"},
    {"sources", "provenance"},
    {"runs"},
    {"orchestration", "testing", "explore", "contracts"},
    {"conformance", "components"},
    {"cli"},
    {"kafka", "ops", "testing_kafka", ""},
    {"resources"},
    {"assets"},
]
"""Packages and modules of ``vt_dagster`` (``""`` is the package itself), then those of the code
location. Packages of one layer do not import each other."""

DEMO = {("cli", "assets")}
"""`vt-dagster demo` runs the worked example, if it is installed."""

LATE_IMPORTS = {
    "vt_dagster.storage.arrow_reader": {"pyarrow": "its datasets take pandas with them, half a second"},
    "vt_dagster.storage.iceberg": {"pyiceberg": "an extra"},
    "vt_dagster.runs.gate": {"pandera": "half a second, of no use to who has no contract"},
    "vt_dagster.orchestration.resources": {
        "dagster_pyspark": "0.2 s, of no use to a run without news",
    },
    "vt_dagster.cli.tables": {"assets": "see DEMO"},
    "vt_dagster.sources.kafka_cluster": {"confluent_kafka": "an extra"},
    "vt_dagster.sources.avro": {"pyspark": "needs the JVM's Avro package, of an extra"},
    "vt_dagster.sources.protobuf": {"google": "an extra, which Spark's workers have too"},
    "vt_dagster.sources.text_formats": {
        "pandas": "a function that Spark's workers run by itself; half a second, of no use for UTF-8",
    },
    "vt_dagster.spark.settings": {"pyspark": "the client of Spark Connect, with an extra's packages"},
    "vt_dagster.sources.kafka_sink": {
        "collections": "a function that Spark's workers run by itself",
        "pyarrow": "the same",
        "confluent_kafka": "the same, and an extra",
    },
    "vt_dagster.spark.jars": {
        "concurrent": "only where jars are downloaded",
        "filelock": "the same",
        "jgo": "the same",
    },
    "vt_dagster.spark.server": {
        "filelock": "only where a server is started",
    },
    "vt_dagster.spark.session": {
        "pyspark": "it starts a JVM, and the wrong PySpark is to be an error that says so",
        "grpc": "of Spark Connect, an extra of PySpark",
        "py4j": "of PySpark, for a JVM in this process only",
    },
}
"""Imports inside functions: by module, the package and the reason. None is of ``vt_dagster``."""

KERNELS = {"partial_updates.py", "suppress.py", "windowed_aggregate.py"}
"""Modules of ``core`` with a kernel on Arrow arrays."""

BY_NAME = {
    "vt_dagster.components.topology_component",
}
"""Modules that still distinguish operators by their class names: remove from this list, never add."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
DAGSTER = {"orchestration", "components", "cli", "ops", "", "resources", "assets"}


@cache
def modules() -> list[Path]:
    return files("vt_dagster", "resources", "assets")


@cache
def ours() -> list[Path]:
    return [p for p in modules() if p.parts[0] == "vt_dagster"]


def dotted(path: Path) -> str:
    parts = list(path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "vt_dagster":
        layer = parts[1] if len(parts) > 1 else ""
        return layer if layer in LEVEL else ""
    return parts[0] if parts[0] in ("resources", "assets") else None


def imports_in(code: Iterable[ast.AST]) -> Iterator[str]:
    for node in code:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import of {node.module}"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_by_name(code: Iterable[ast.AST]) -> Iterator[str]:
    """The modules of ``import_module("...")``."""
    for node in code:
        if isinstance(node, ast.Call) and name_of(node.func).endswith("import_module"):
            for one in node.args[:1]:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value


def name_of(node: ast.AST) -> str:
    """The name of a called function or method, without its object."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def imports(path: Path) -> list[str]:
    return [*imports_in(nodes(path)), *imports_by_name(nodes(path))]


@cache
def names_of_ours() -> set[str]:
    return {dotted(p) for p in ours()}


def imported_modules(path: Path) -> set[str]:
    """The modules of ``vt_dagster`` that a module imports."""
    known = names_of_ours()
    found = {name if name in known else name.rpartition(".")[0] for name in imports(path)}
    return found & known


def own_layer(path: Path) -> str:
    layer = layer_of(dotted(path))
    assert layer is not None
    if path.parts[0] == "vt_dagster" and dotted(path) != "vt_dagster":
        assert layer, f"{path}: give the new module or package a layer in LAYERS"
    return layer


def test_packages_import_only_from_layers_above() -> None:
    found: list[str] = []
    for path in modules():
        layer = own_layer(path)
        for name in imports(path):
            other = layer_of(name)
            if other in (None, layer) or (layer, other) in DEMO:
                continue
            if LEVEL[other] >= LEVEL[layer]:
                found.append(f"{path} imports {name}")
    assert found == [], "which is not above it"


def test_documented_layers_match() -> None:
    """In the page, ``vt_dagster`` stands for the package itself."""
    page = (ROOT / "docs" / "how" / "index.md").read_text(encoding="utf-8")
    told: dict[int, set[str]] = {}
    for layer, names in re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.MULTILINE):
        told.setdefault(int(layer), set()).update(re.findall(r"`(\w+)`", names))
    assert [told[layer] for layer in sorted(told)] == [
        {name or "vt_dagster" for name in names} for names in LAYERS
    ]


def test_no_import_cycle() -> None:
    graph = {dotted(p): imported_modules(p) - {dotted(p)} for p in ours()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_import_in_a_function() -> None:
    found: dict[str, set[str]] = {}
    for path in ours():
        inside: set[str] = set()
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inside.update(imports_in(ast.walk(node)))
        packages = {name.split(".")[0] for name in inside}
        assert "vt_dagster" not in packages, f"{path}: an import that hides a circle"
        if packages:
            found[dotted(path)] = packages
    assert found == {name: {*packages} for name, packages in LATE_IMPORTS.items()}


def test_no_type_checking_imports() -> None:
    """The package itself is an exception: it imports its names on first access."""
    for path in ours():
        if dotted(path) == "vt_dagster":
            continue
        for node in nodes(path):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                found = [n for n in imports_in(ast.walk(node)) if n.startswith("vt_dagster")]
                assert found == [], f"{path}: an import that hides a circle"


def test_only_dagster_layers_import_dagster() -> None:
    for path in modules():
        layer = own_layer(path)
        for name in imports(path):
            package = name.split(".")[0]
            assert layer in DAGSTER or not package.startswith("dagster"), f"{path} imports {name}"
            assert not name.startswith("dagster._"), f"{path} imports the private {name}"


@cache
def operator_classes() -> dict[str, str]:
    """Returns each operator class and the name of the module that defines it."""

    def below(cls: type[Any]) -> Iterator[type[Any]]:
        for one in cls.__subclasses__():
            yield one
            yield from below(one)

    found = {cls.__name__: cls.__module__ for cls in below(Operator)}
    own = {n: m.rpartition(".")[2] for n, m in found.items() if m.startswith("vt_dagster.topology.")}
    assert set(operators.__all__) & set(own) >= {"Filter", "Suppress", "ForeignKeyJoin"}
    return own


def asked_classes(code: Iterable[ast.AST]) -> Iterator[str]:
    """The names of the classes that code compares an object's type with."""
    for node in code:
        asked: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass"):
                asked = [*node.args[1:]]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Compare) and any(
            isinstance(call, ast.Call) and name_of(call.func) == "type" for call in ast.walk(node.left)
        ):
            asked = [*node.comparators]
        for part in (p for one in asked for p in ast.walk(one)):
            if isinstance(part, ast.Name):
                yield part.id
            elif isinstance(part, ast.Attribute):
                yield part.attr


def named_classes(code: Iterable[ast.AST]) -> Iterator[str]:
    """The strings in code; some may be names of classes."""
    for node in code:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_operator_class_name_in_string() -> None:
    found: dict[str, set[str]] = {}
    for path in modules():
        name = dotted(path)
        if name == "vt_dagster" or name.startswith("vt_dagster.topology.operators"):
            continue
        if told := set(named_classes(nodes(path))) & set(operator_classes()):
            found[name] = told
    assert set(found) == BY_NAME, f"modules that tell operators by their names: {found}"


def test_no_isinstance_on_operators() -> None:
    homes = operator_classes()
    found: list[str] = []
    for path in modules():
        name = dotted(path)
        if name.startswith("vt_dagster.topology.operators"):
            continue
        for cls in asked_classes(nodes(path)):
            if cls in homes and name != f"vt_dagster.core.{homes[cls]}":
                found.append(f"{path}: {cls}")
    assert found == [], "what differs belongs to the operator or its Processor"


def test_core_uses_no_session_action_or_clock() -> None:
    forbidden = {
        *("collect", "count_rows", "toPandas", "toLocalIterator", "foreach", "foreachPartition"),
        *("show", "write", "writeTo", "persist", "cache", "checkpoint", "localCheckpoint", "take"),
        *("head", "sparkSession", "sparkContext", "rdd", "_jvm", "_jdf", "isEmpty", "tail"),
        *("current_timestamp", "now", "current_date", "rand", "uuid"),
    }
    of_a_process = {"contextvars", "delta", "fsspec", "os", "pathlib", "pandera", "time"}
    for path in (p for p in ours() if p.parts[1] == "core"):
        used = {node.attr for node in nodes(path) if isinstance(node, ast.Attribute)}
        if path.name in KERNELS:
            used.discard("take")  # of Arrow arrays, in a kernel
        assert used & forbidden == set(), path
        packages = {name.split(".")[0] for name in imports(path)}
        assert not packages & of_a_process, path


@pytest.mark.parametrize("name", [n for n in operators.__all__ if n in operator_classes()])
def test_operator_docstrings_cover_late_null_and_tombstone(name: str) -> None:
    text = " ".join(str(getattr(operators, name).__doc__).split())
    assert re.search(r"Late: .+ Null key: .+ Tombstone: ", text), name


def test_named_scenarios_exist() -> None:
    scenarios = {s.name for s in read_scenarios([CONFORMANCE])}
    for path in ours():
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"\bkip\d+-[a-z0-9][a-z0-9-]*[a-z0-9]", text):
            assert name in scenarios, f"{path}: {name}"
