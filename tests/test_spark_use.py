"""Rules for code that must run in a new process and on Spark Connect, checked in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tests.syntax_trees import files, nodes, tree

FUNCTIONS = {"F", "W"}
"""``pyspark.sql.functions`` and ``Window``: neither works before there is a session."""
WITH_A_SESSION = {"DataFrame", "Column", "SparkSession"}
"""A function that has an argument of one of these types runs after the session has started."""
STARTS = {
    "spark",
    "sparkSession",
    "spark_session",
    "read",
    "log",
    "view_at",
    "current_at",
    "_read_staged",
}
"""The attributes, and the methods that read, which start the session if there is none."""
LACKING = {
    *("rdd", "toJSON", "sparkContext", "newSession", "sql_ctx", "_jvm", "_jdf", "_jc", "_jsc", "_sc"),
    *("_jsparkSession", "mapInPandasRDD", "foreachPartition", "foreach"),
}
"""Names that Spark Connect does not have."""
ALLOWED = {
    "spark/session.py": {"sparkContext", "_jvm"},  # of a session in this process
    "orchestration/resources.py": {"sparkContext"},  # if the session is not remote
    "spark/settings.py": {"sparkContext"},  # if the session is not remote
}
SURE = {"core/arrival_order.py", "storage/schema_evolution.py"}
"""Modules that call ``withColumns`` always with at least one column."""
LATER = {
    "runs/erase.py: _literal",
    "runs/erase.py: _of_other_types",
    "runs/erase.py: _conditions_by_column",
    "contracts.py: _with_value",
    "runs/audit.py: _of_log",
    "runs/audit.py: _sample",
    "runs/audit.py: _count_recorded",
    "runs/audit.py: _check_recorded",
    "runs/audit.py: _count",
    "runs/audit.py: counts",
    "runs/gate.py: rule_of",
    "runs/gate.py: contract_of",
    "runs/gate.py: add",
    "runs/record_times.py: _at",
    "runs/replay.py: compare",
    "runs/record_times.py: watermark_columns",
    "runs/run.py: _context",
    "runs/training_set_run.py: _quoted",
    "runs/what_if.py: _compared",
    "sources/frame_sources.py: digest",
    "sources/frame_sources.py: frame_of",
    "sources/text_formats.py: one_record",
    "runs/gate.py: _following",
    "runs/gate.py: _of_key",
    "sources/avro.py: _default",
    "sources/files_source.py: _is_below",
    "sources/text_formats.py: _decoded",
    "sources/text_formats.py: text_udf",
    "sources/text_formats.py: file_name",
    "sources/text_formats.py: file_path",
    "sources/text_formats.py: _odd_lines",
    "sources/text_formats.py: _around",
    "sources/text_formats.py: _is_within",
    "runs/erase.py: condition",
    "storage/spark_reader.py: at_or_after",
    "storage/spark_reader.py: before",
    "storage/view.py: segment_of",
    "testing/driver.py: get_each",
}
"""Functions that build expressions and are called only after a read. Before you add a function here,
check that this is true of it."""

PLACES = {path.relative_to("vt_dagster").as_posix(): path for path in files("vt_dagster")}
"""Each file of the library, by its path in the package."""
SITES = {f"vt_dagster.{place.removesuffix('.py').replace('/', '.')}": place for place in PLACES}


def names_of(node: ast.AST | None) -> set[str]:
    if node is None:
        return set()
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def given(function: ast.FunctionDef) -> bool:
    told = function.args
    every = [*told.posonlyargs, *told.args, *told.kwonlyargs]
    return any(names_of(one.annotation) & WITH_A_SESSION for one in every)


@cache
def builders(place: str) -> set[str]:
    """Functions of a module that return a column and have no argument that needs a session."""
    functions = [one for one in tree(PLACES[place]).body if isinstance(one, ast.FunctionDef)]
    return {f.name for f in functions if "Column" in names_of(f.returns) and not given(f)}


def built_by(place: str) -> set[str]:
    """The names of a module's functions that build a column: its own, and those that it imports."""
    found = {*builders(place)}
    for one in tree(PLACES[place]).body:
        if isinstance(one, ast.ImportFrom) and one.module in SITES:
            found |= {name.name for name in one.names} & builders(SITES[one.module])
    return found


def expressions(node: ast.AST, names: set[str]) -> Iterator[int]:
    """The lines that build an expression. The body of a lambda is left out: it runs at the call."""
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Call):
        of = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        if isinstance(of, ast.Name) and of.id in (names if of is node.func else FUNCTIONS):
            yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from expressions(child, names)


def when_imported(node: ast.AST, names: set[str]) -> Iterator[int]:
    """Yields the lines that build an expression on import, also in decorators and defaults."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for one in (*child.decorator_list, *child.args.defaults, *child.args.kw_defaults):
                if one is not None:
                    yield from expressions(one, names)
        elif isinstance(child, ast.ClassDef):
            yield from when_imported(child, names)
        else:
            yield from expressions(child, names)


def too_early(node: ast.AST, names: set[str], after: bool = False) -> Iterator[str]:
    """Functions that build an expression before a session exists: no argument needs one, and no line
    above starts one."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield from too_early(child, names, after)
            continue
        behind = after or given(child)
        starts = [n for n in ast.walk(child) if isinstance(n, ast.Attribute) and n.attr in STARTS]
        first = min((one.lineno for one in starts), default=1 << 30)
        if not behind and any(line < first for line in expressions(child, names)):
            yield child.name
        yield from too_early(child, names, behind)


def test_no_spark_expression_on_import() -> None:
    found = {p: [*when_imported(tree(path), built_by(p))] for p, path in PLACES.items()}
    assert {p: lines for p, lines in found.items() if lines} == {}


def test_no_spark_expression_before_session() -> None:
    """``core`` is left out: its callers have rows already, so a session exists."""
    found = {
        f"{place}: {name}"
        for place, path in PLACES.items()
        if not place.startswith("core/")
        for name in too_early(tree(path), built_by(place))
    }
    assert found == LATER, "read first, or take the rows or the session as an argument"


def test_no_api_missing_in_spark_connect() -> None:
    for place, path in PLACES.items():
        used = {one.attr for one in nodes(path) if isinstance(one, ast.Attribute)}
        assert used & LACKING <= ALLOWED.get(place, set()), place


def test_with_columns_is_never_empty() -> None:
    """Spark Connect refuses ``withColumns({})``; ``core.arrival_order.with_columns`` accepts it."""
    for place, path in PLACES.items():
        for one in nodes(path):
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute):
                if one.func.attr != "withColumns" or place in SURE:
                    continue
                told = one.args[0]
                sure = isinstance(told, ast.Dict) and any(key is not None for key in told.keys)
                assert sure, f"{place}, line {one.lineno}: use with_columns"


def test_no_slow_first_call_functions() -> None:
    """No code uses ``str_to_map``: it loads a Spark class that computes all letters' title case."""
    for place, path in PLACES.items():
        told = [str(one.value) for one in nodes(path) if isinstance(one, ast.Constant)]
        assert not [text for text in told if "str_to_map(" in text], place
        called = {one.attr for one in nodes(path) if isinstance(one, ast.Attribute)}
        assert "str_to_map" not in called, place
