"""Expressions of operators that explanations evaluate without Spark."""

from __future__ import annotations

import pyarrow as pa

from vt_dagster.provenance.expressions import evaluate


def test_expressions_are_evaluated_without_spark() -> None:
    rows = pa.table({"n": [1, None], "Of a": ["x", "y"]})
    assert evaluate(rows, "N") == rows.column("n")
    # An unknown function, invalid syntax, a type that does not fit, a value that does not fit.
    for sql in ("no_such_function(n)", "n +", "`Of a` + 1", "cast(`Of a` as int)"):
        assert evaluate(rows, sql) is None, sql
    # Some functions that Spark and DuckDB have in common mean something else in DuckDB.
    for sql in (
        *("cast(n / 2.0 as int)", "concat(`Of a`, null)", "substring(`Of a`, 0, 1)", "log(n)"),
        *('coalesce("Of a")', "'a\\\\n' || `Of a`", "upper(`Of a` || 'ß')"),
    ):
        assert evaluate(rows, sql) is None, sql
    assert evaluate(rows, "`Of a` || 'ß'") is not None
    found = evaluate(rows, "case when n % 2 = 1 and n is not null then 'odd' else 'other' end")
    assert found is not None
    assert found.to_pylist() == ["odd", "other"]
    found = [evaluate(rows, sql) for sql in ("coalesce(n, 0) + 1", "upper(`Of a`)")]
    assert [one.to_pylist() for one in found if one is not None] == [[2, 1], ["X", "Y"]]
