"""What explanations make of an operator's expressions, as commits have them."""

from __future__ import annotations

from datetime import timedelta

import pyarrow as pa
import pytest

from vt_dagster.provenance.expression_parser import evaluate, length, named, split


def test_texts_of_commits() -> None:
    assert split("()") == []
    assert split("(a, coalesce(b, ', (') as c)") == ["a", "coalesce(b, ', (') as c"]
    assert named("(a, `b c`, coalesce(b, 0) as c)") == [
        ("a", "a"),
        ("b c", "`b c`"),
        ("c", "coalesce(b, 0)"),
    ]


@pytest.mark.parametrize(
    ("text", "partition", "told"),
    [
        ("1 day, 0:00:30", 0, timedelta(days=1, seconds=30)),
        ("0:00:00.000001", 0, timedelta(microseconds=1)),
        ("-1 day, 23:59:00", 0, -timedelta(minutes=1)),
        ("0: 0:01:00, 1: 2 days, 0:02:00", 1, timedelta(days=2, minutes=2)),
    ],
)
def test_lengths(text: str, partition: int, told: timedelta) -> None:
    assert length(text, partition) == told


def test_expressions_without_spark() -> None:
    rows = pa.table({"n": [1, None], "Of a": ["x", "y"]})
    assert [evaluate(rows, sql) for sql in ("N", "no_such_function(n)")] == [rows.column("n"), None]
    found = [evaluate(rows, sql) for sql in ("coalesce(n, 0) + 1", "upper(`Of a`)")]
    assert [one.to_pylist() for one in found if one is not None] == [[2, 1], ["X", "Y"]]
