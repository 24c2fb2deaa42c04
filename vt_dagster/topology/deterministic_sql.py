"""Refuses nondeterministic SQL expressions.

A row may be computed more than once: a killed run is repeated, a replay or restatement rewrites a log,
a plan reads a row twice. ``rand()`` then gives other rows, ``now()`` other times. Definitions load
without Spark, so this module tokenizes the text as Spark's lexer does: a name in a string, in a comment
or of a column is no call.

User-defined functions are unknown here; ``unknown_functions`` lists them, and a first run checks them
with Spark (``vt_dagster.runs.udf_determinism``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

from pyspark.sql import functions
from pyspark.sql.types import DataType, NullType, StructField, TimestampType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError

_RANDOM = "returns another value at each evaluation"
_CLOCK = "returns the time of the evaluation"
_PLACE = "depends on how Spark reads the rows and distributes them to tasks"
_SESSION = "depends on the session, its user or Spark's version"
_JAVA = "calls Java code, which may return anything"
_OTHERS = "reads other rows, which differ from run to run"

_HASH = "derive it from the row, for example pmod(xxhash64(id), 100) < 50"
_TIMES = "use a time of the row, for example its timestamp"
_COLUMN = "let the source deliver it as a column"
_ADVICE = {
    _RANDOM: _HASH,
    _CLOCK: _TIMES,
    _PLACE: _COLUMN,
    _SESSION: _COLUMN,
    _JAVA: _COLUMN,
    _OTHERS: "use an aggregate or a join for that",
}

_FUNCTIONS = {
    **dict.fromkeys(("rand", "random", "randn", "randstr", "uniform", "uuid", "shuffle"), _RANDOM),
    **dict.fromkeys(
        ("now", "current_timestamp", "current_date", "curdate", "current_time", "localtimestamp"),
        _CLOCK,
    ),
    **dict.fromkeys(
        (
            *("monotonically_increasing_id", "spark_partition_id"),
            *("input_file_name", "input_file_block_start", "input_file_block_length"),
        ),
        _PLACE,
    ),
    **dict.fromkeys(
        (
            *("current_user", "session_user", "user", "current_timezone", "version"),
            *("current_catalog", "current_database", "current_schema"),
        ),
        _SESSION,
    ),
    **dict.fromkeys(("reflect", "try_reflect", "java_method"), _JAVA),
}
_WITHOUT_PARENTHESES = {
    *("current_timestamp", "current_date", "current_time", "localtimestamp"),
    *("current_user", "session_user", "user"),
}
"""Spark reads these as function calls unless a column has the name."""

_OF_OPERATORS = ("predicate", "expression", "group_key", "select", "aggregates", "foreign_key")
"""Fields of operators with SQL over the columns of their inputs: a text, several, or pairs of name and
text."""
_OF_NODES = ("timestamp", "partition_by", "tombstone", "only_columns")
"""Fields of streams and tables with SQL over their own columns, or with column names."""

_SPECIAL = re.compile(r"\s*(now|today|tomorrow|yesterday)(\s.*)?", re.IGNORECASE | re.DOTALL)
"""Strings that Spark casts to a time of its clock, optionally followed by a time zone."""
_TIME_TYPES = ("date", "time", "timestamp", "timestamp_ntz", "timestamp_ltz")
_OF_TIMES = re.compile(r"date|time|day|hour|minute|second|month|year|quarter|week|trunc")
"""Matches the names of functions that take times."""

_COMMENT = re.compile(r"--(?:\\\r?\n|[^\r\n])*")
_TEXT = re.compile(
    r"r'[^']*'|r\"[^\"]*\"|'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"", re.I | re.DOTALL
)
_QUOTED = re.compile(r"`(?:[^`]|``)*`")
_NAME = re.compile(r"\w+")
_SYMBOL = re.compile(r"::|->|=>|.", re.DOTALL)

_KEYWORDS = {
    *("and", "any", "array", "between", "both", "case", "cast", "else", "end", "exists", "extract"),
    *("from", "if", "in", "interval", "leading", "like", "ilike", "rlike", "map", "not", "or", "over"),
    *("some", "struct", "then", "trailing", "try_cast", "when", "distinct", "div", "values", "where"),
    *("decimal", "dec", "numeric", "char", "varchar", "string", "int", "integer", "bigint", "smallint"),
    *("tinyint", "long", "short", "byte", "float", "real", "double", "boolean", "binary", "date"),
    *("timestamp", "void", "variant"),
}
"""Words before a parenthesis that are no call of a user-defined function."""
_OWN_NAMES = {
    *("chr", "len", "luhn_check", "mod", "space", "from_avro", "to_avro", "schema_of_avro"),
    *("from_protobuf", "to_protobuf"),
}
"""Functions of Spark that ``pyspark.sql.functions`` lacks."""


@dataclass(frozen=True)
class Token:
    """A token of an SQL expression.

    Args:
        kind: ``name``, ``quoted`` (in backticks), ``text`` (a string) or ``symbol``.
        value: without quotes; in lower case except for strings.
    """

    kind: Literal["name", "quoted", "text", "symbol"]
    value: str

    @property
    def is_name(self) -> bool:
        """Whether it may name a function or a column."""
        return self.kind in ("name", "quoted")


_NONE = Token("symbol", "")


@lru_cache(maxsize=4096)
def tokens(expression: str) -> tuple[Token, ...]:
    """Returns the tokens of an SQL expression, without whitespace and comments."""
    return tuple(_tokens(expression))


def _tokens(expression: str) -> Iterator[Token]:
    place = 0
    while place < len(expression):
        if expression[place].isspace():
            place += 1
        elif expression.startswith("/*", place):
            place = _after_comment(expression, place)
        elif found := _COMMENT.match(expression, place):
            place = found.end()
        elif found := _TEXT.match(expression, place):
            place = found.end()
            text = found[0]
            yield Token("text", text[2:-1] if text[0] in "rR" else text[1:-1])
        elif found := _QUOTED.match(expression, place):
            place = found.end()
            yield Token("quoted", found[0][1:-1].replace("``", "`").lower())
        elif found := _NAME.match(expression, place):
            place = found.end()
            yield Token("name", found[0].lower())
        else:
            found = _SYMBOL.match(expression, place)
            assert found is not None
            place = found.end()
            yield Token("symbol", found[0])


def _after_comment(expression: str, place: int) -> int:
    """Returns the end of a block comment, which may contain nested ones."""
    depth = 0
    for mark in re.finditer(r"/\*|\*/", expression[place:]):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return place + mark.end()
    return len(expression)


def unknown_functions(expression: str) -> set[str]:
    """Returns the functions called in an expression that are not built into Spark."""
    found = tokens(expression)
    called = {
        token.value
        for token, after in zip(found, (*found[1:], _NONE), strict=True)
        if token.is_name and after.value == "(" and after.kind == "symbol"
    }
    known = {*_KEYWORDS, *_OWN_NAMES, *_FUNCTIONS}
    return {name for name in called - known if not hasattr(functions, name)}


class Expression(NamedTuple):
    """An SQL expression of a definition.

    Args:
        setting: name of the setting that contains it.
        of_inputs: whether it uses the columns of the inputs instead of the node's own.
    """

    setting: str
    text: str
    of_inputs: bool


def expressions_of(node: Any) -> list[Expression]:
    """Returns the SQL expressions of a stream or table, including those of its operator."""
    own = ((name, getattr(node, name, None)) for name in _OF_NODES)
    found = [Expression(n, text, False) for n, text in own if isinstance(text, str)]
    for name in _OF_OPERATORS:
        given = getattr(node.operator, name, ())
        several = (given,) if isinstance(given, str) else given
        if isinstance(several, tuple):  # otherwise an Aggregator: Python functions
            texts = cast("tuple[Any, ...]", several)
            found += [Expression(name, t if isinstance(t, str) else t[-1], True) for t in texts]
    return found


def check_expressions(node: Any) -> None:
    """Raises TopologyError if an expression of a stream or table is nondeterministic."""
    time = StructField(TIMESTAMP, TimestampType())
    own = [*node.schema.fields, time]
    theirs = [*(f for up in node.inputs for f in up.schema.fields), time]
    for setting, text, of_inputs in expressions_of(node):
        if text not in node.schema.names:
            require_deterministic(node.name, setting, text, theirs if of_inputs else own)


def require_deterministic(
    name: str, setting: str, expression: str, columns: Sequence[StructField]
) -> None:
    """Raises TopologyError if an expression is nondeterministic.

    Args:
        name: name of the asset, for the message.
        setting: the setting that contains the expression, for the message.
        columns: the columns that the expression may use.
    """
    found = _Expression(tokens(expression), columns).first()
    if found is None:
        return
    what, why = found
    raise TopologyError(
        f"{name}: expected {setting} to be deterministic, got {expression!r}, where {what} {why}: a "
        f"repeated run, a replay or a restatement would give other rows; {_ADVICE[why]}"
    )


class _Expression:
    """An expression, and its nondeterministic parts."""

    def __init__(self, pieces: tuple[Token, ...], columns: Sequence[StructField]) -> None:
        self._pieces = pieces
        self._types: dict[str, list[DataType]] = {}
        for column in columns:
            self._types.setdefault(column.name.lower(), []).append(column.dataType)
        # Lambda parameters: ``x -> …`` and ``(x, y) -> …``
        self._variables = set[str]()
        for place, piece in enumerate(pieces):
            if piece.value == "->" and piece.kind == "symbol":
                self._variables |= self._parameters(place)

    def _parameters(self, place: int) -> set[str]:
        before, found = place - 1, set[str]()
        if self._at(before).value != ")":
            return {self._at(before).value}
        while before > 0 and self._at(before).value != "(":
            before -= 1
            found.add(self._at(before).value)
        return found

    def _at(self, place: int) -> Token:
        return self._pieces[place] if 0 <= place < len(self._pieces) else _NONE

    def _symbol(self, place: int) -> str:
        piece = self._at(place)
        return piece.value if piece.kind == "symbol" else ""

    def first(self) -> tuple[str, str] | None:
        """Returns the first nondeterministic part and the reason."""
        for place, piece in enumerate(self._pieces):
            if piece.is_name:
                found = self._called(place) if self._symbol(place + 1) == "(" else self._named(place)
            else:
                found = self._clock(place) if piece.kind == "text" else None
            if found is not None:
                return found
        return None

    def _called(self, place: int) -> tuple[str, str] | None:
        name = self._at(place).value
        if name in _FUNCTIONS:
            return f"{name}()", _FUNCTIONS[name]
        if name == "unix_timestamp" and self._symbol(place + 2) == ")":
            return "unix_timestamp()", _CLOCK
        if name == "aes_encrypt" and self._makes_a_vector(place):
            return "aes_encrypt()", _RANDOM
        if name == "identifier":
            return "identifier()", _JAVA
        if name == "over" and self._at(place - 1).value in (")", "nulls"):
            return "a window function", _OTHERS
        return None

    def _named(self, place: int) -> tuple[str, str] | None:
        piece, before, after = self._at(place), self._at(place - 1), self._symbol(place + 1)
        name = piece.value
        if name == "select" and self._symbol(place - 1) == "(" and piece.kind == "name":
            return None if after and after not in "*(" else ("a query", _OTHERS)
        if name not in _WITHOUT_PARENTHESES or name in self._types or name in self._variables:
            return None
        if "." in (before.value, after) or after in ("=>", "->") or before.value == "as":
            return None
        return f"{name}, which is no column here,", _FUNCTIONS[name]

    def _makes_a_vector(self, place: int) -> bool:
        """Returns whether ``aes_encrypt`` generates a random initialization vector: none is passed and
        the mode is not ECB."""
        depth, commas = 0, 0
        for token in self._pieces[place + 1 :]:
            if token.kind == "symbol" and token.value in "([":
                depth += 1
            elif token.kind == "symbol" and token.value in ")]":
                depth -= 1
                if depth == 0:
                    break
            elif token.kind == "symbol" and token.value == "," and depth == 1:
                commas += 1
            elif token.kind == "text" and token.value.upper() == "ECB" and commas == 2 and depth == 1:
                return False
        return commas < 4

    def _clock(self, place: int) -> tuple[str, str] | None:
        """Checks a string like 'now' that Spark may cast to a time."""
        text = self._at(place).value
        if _SPECIAL.fullmatch(text) is None or self._at(place - 1).value in ("like", "ilike"):
            return None
        typed = self._at(place - 1).kind == "name" and self._at(place - 1).value in _TIME_TYPES
        if not typed and not any(self._of_time(other) for other in range(len(self._pieces))):
            return None
        what = f"{text!r}, which Spark may cast to a time (compare text with like instead),"
        return what, _CLOCK

    def _of_time(self, place: int) -> bool:
        """Returns whether a token may be a time, or return one."""
        piece, before = self._at(place), self._at(place - 1)
        if not piece.is_name:
            return False
        if self._symbol(place + 1) == "(":
            return _OF_TIMES.search(piece.value) is not None
        if piece.value in _TIME_TYPES and (before.value in ("as", "::", "<", ":")):
            return True
        kinds = self._types.get(piece.value, ())
        return any(isinstance(k, NullType) or _OF_TIMES.search(k.simpleString()) for k in kinds)
