"""SQL expressions of operators: selected columns, aggregates, and the refusal of nondeterministic SQL.

**Nondeterministic SQL** is refused. A row may be computed more than once: a killed run is repeated, a
replay or restatement rewrites a log, a plan reads a row twice. ``rand()`` then gives other rows,
``now()`` other times. Definitions load without Spark, so this module tokenizes the text as Spark's
lexer does: a name in a string, in a comment or of a column is no call. Generators like ``explode()``
and Spark's ``window()``, with which a row has several results or none, are refused in the same way.

User-defined functions are unknown here; ``unknown_functions`` lists them, and a first run checks them
with Spark (``vt_dagster.runs.run``).

**Selected columns** are checked when the operator is made. A join selects ``left.*``, ``right.column``
or ``expression as name``; an operator with one input ``*``, ``column`` or ``expression as name``.

**Aggregates** are given like ``{"departures": "count(*)", "mean_delay": "avg(dep_delay)"}``. An
aggregate is stored as *accumulators*, each merged from record to record by sum, min or max; the result
columns are SQL expressions over them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

from pyspark.sql import functions
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.options import OPTIONS
from vt_dagster.topology.schema import check_sql_name, is_sql_name
from vt_dagster.topology.specification import ColumnSpec, Token, tokens

# Refusal of nondeterministic SQL


_RANDOM = "returns another value at each evaluation"
_CLOCK = "returns the time of the evaluation"
_PLACE = "depends on how Spark reads the rows and distributes them to tasks"
_SESSION = "depends on the session, its user or Spark's version"
_JAVA = "calls Java code, which may return anything"
_OTHERS = "reads other rows, which differ from run to run"
_ROWS = "makes several rows of one row, or none"
_EVERY = "stands for the columns that the library adds, too"

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
    _EVERY: "name the columns",
    _ROWS: "use flat_map_values for several rows of a record, windowed_by or date_trunc for windows",
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
            *("current_catalog", "current_database", "current_schema", "current_path"),
        ),
        _SESSION,
    ),
    **dict.fromkeys(("reflect", "try_reflect", "java_method"), _JAVA),
    **dict.fromkeys(
        (
            *("explode", "explode_outer", "posexplode", "posexplode_outer", "inline", "inline_outer"),
            *("stack", "json_tuple", "window", "session_window"),
        ),
        _ROWS,
    ),
}
_WITHOUT_PARENTHESES = {
    *("current_timestamp", "current_date", "current_time", "localtimestamp"),
    *("current_user", "session_user", "user"),
}
"""Names that Spark reads as function calls unless a column has the name."""

_OF_OPERATORS = ("predicate", "expression", "group_key", "select", "aggregates", "foreign_key")
"""Fields of operators with SQL over the columns of their inputs: a text, several, or pairs of name and
text."""

_SPECIAL = re.compile(r"\s*(now|today|tomorrow|yesterday)(\s.*)?", re.IGNORECASE | re.DOTALL)
"""Strings that Spark casts to a time of its clock, optionally followed by a time zone."""
_TIME_TYPES = ("date", "time", "timestamp", "timestamp_ntz", "timestamp_ltz")
_OF_TIMES = re.compile(r"date|time|day|hour|minute|second|month|year|quarter|week|trunc")
"""Matches the names of functions that take times."""

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
    *("from_protobuf", "to_protobuf", "approx_top_k_estimate", "time", "vector_norm"),
    *("vector_normalize", "vector_inner_product", "vector_cosine_similarity", "vector_l2_distance"),
}
"""Functions of a supported series of Spark that ``pyspark.sql.functions`` lacks."""


_NONE = Token("symbol", "")


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


def mentions(expression: str, column: str) -> bool:
    """Returns whether SQL text contains a column's name, perhaps in another meaning."""
    return re.search(rf"(?<!\w){re.escape(column)}(?!\w)", expression, re.IGNORECASE) is not None


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
    """Returns the SQL expressions of a stream or table, including those of its operator and of its
    sources."""
    own = [(o.name, getattr(node, o.name, None)) for o in OPTIONS if o.sql is not None]
    for source in (node.source, getattr(node, "start", None)):
        own += getattr(source, "expressions", {}).items()
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
    """Raises TopologyError if an expression is nondeterministic, or does not give one value for a row.

    Args:
        name: name of the asset, for the message.
        setting: the setting that contains the expression, for the message.
        columns: the columns that the expression may use.
    """
    found = _Expression(tokens(expression), columns).first()
    if found is None:
        return
    what, why = found
    if why in (_ROWS, _EVERY):
        raise TopologyError(
            f"{name}: expected {setting} to give one value for each row, got {expression!r}, where "
            f"{what} {why}; {_ADVICE[why]}"
        )
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
            if self._is_star(place):
                return "* as an argument", _EVERY
            if piece.is_name:
                found = self._called(place) if self._symbol(place + 1) == "(" else self._named(place)
            else:
                found = self._clock(place) if piece.kind == "text" else None
            if found is not None:
                return found
        return None

    def _is_star(self, place: int) -> bool:
        """Returns whether a ``*`` inside of an expression stands for all columns: it follows no value
        that it would multiply, and is no ``count(*)``. A selection, ``left.*``, is no expression."""
        before = self._symbol(place - 1)
        if self._symbol(place) != "*" or (before == "." and place == 2):
            return False
        counted = before == "(" and self._at(place - 2).value == "count"
        return before in ("(", ",", ".") and not counted

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
        """Returns whether a token may be a time type, a column of such a type, or a function that
        returns a time."""
        piece, before = self._at(place), self._at(place - 1)
        if not piece.is_name:
            return False
        if self._symbol(place + 1) == "(":
            return _OF_TIMES.search(piece.value) is not None
        if piece.value in _TIME_TYPES and (before.value in ("as", "::", "<", ":")):
            return True
        kinds = self._types.get(piece.value, ())
        return any(isinstance(k, NullType) or _OF_TIMES.search(k.simpleString()) for k in kinds)


# Projection


_SELECTED_COLUMN = re.compile(r"\s*(left|right)\s*\.\s*(`[^`]+`|\w+)\s*", re.IGNORECASE)
_WHOLE = re.compile(r"\s*(left|right)\s*\.\s*(.+?)\s*", re.IGNORECASE | re.DOTALL)
_STAR = re.compile(r"\s*(left|right)\s*\.\s*\*\s*", re.IGNORECASE)
_ALIAS = re.compile(r"(?P<expression>.+?)\s+as\s+(?P<name>\w+|`[^`]+`)\s*", re.IGNORECASE | re.DOTALL)
_NAMED: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "integer": IntegerType(),
    "bigint": LongType(),
    "long": LongType(),
    "smallint": ShortType(),
    "double": DoubleType(),
    "float": FloatType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestampType(),
    "binary": BinaryType(),
}


def _cast_type(expression: str) -> DataType:
    """Returns the type of a cast; NullType for other expressions, whose type only Spark can infer."""
    found = [one.value if one.kind == "symbol" else one.kind for one in tokens(expression)]
    depth = [found[:place].count("(") - found[:place].count(")") for place in range(len(found))]
    words = [one.value for one in tokens(expression) if one.kind == "name"]
    # Only the last parenthesis closes that of the cast: it is no part of a larger expression.
    whole = found[:2] == ["name", "("] and found[-3:] == ["name", "name", ")"] and 0 not in depth[2:]
    cast = whole and words[0] in ("cast", "try_cast") and words[-2] == "as"
    return _NAMED.get(words[-1], NullType()) if cast else NullType()


@dataclass(frozen=True)
class Selection:
    """Columns selected from one stream or table, as (name, SQL expression).

    Args:
        asset: name of the result, for messages.
        source: name of the stream or table.
        fields: its columns.
        select: the user's selection.
        key: columns that the result always has, unchanged and first.

    Raises:
        TopologyError: a column that does not exist, has no name, or is selected twice.
    """

    asset: str
    source: str
    fields: tuple[StructField, ...]
    select: tuple[str, ...] = ("*",)
    key: tuple[str, ...] = ()
    columns: tuple[tuple[str, str], ...] = field(init=False)

    @property
    def declared(self) -> tuple[ColumnSpec, ...]:
        """The selection as declared; ``*`` stands for all columns."""
        every = ColumnSpec("*", "*")
        return tuple(
            every if i.strip() == "*" else ColumnSpec(*self._expand(i)[0]) for i in self.select
        )

    def __post_init__(self) -> None:
        chosen = [column for item in self.select for column in self._expand(item)]
        lowered = {k.lower() for k in self.key}
        for name, expression in chosen:
            if name.lower() in lowered and expression.strip("` ").lower() != name.lower():
                raise TopologyError(
                    f"{self.asset}: {name!r} is a key column and cannot change; select {expression!r} "
                    "under another name"
                )
        keys = [(k, f"`{k}`") for k in self.key]
        chosen = keys + [c for c in chosen if c[0].lower() not in lowered]
        names = [n.lower() for n, _ in chosen]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise TopologyError(f"{self.asset}: select has {twice} more than once; rename one")
        object.__setattr__(self, "columns", tuple(chosen))

    def _expand(self, item: str) -> list[tuple[str, str]]:
        text = item.strip()
        if text == "*":
            return [(f.name, f"`{f.name}`") for f in self.fields if f.name.lower() != TIMESTAMP]
        found = self._find(text)
        if found is not None:
            return [(found.name, f"`{found.name}`")]
        if re.fullmatch(r"`[^`]+`|\w+", text):
            raise TopologyError(
                f"{self.asset}: {self.source!r} has no column {text!r}; it has "
                f"{[f.name for f in self.fields]}; an expression needs a name: 'expression as name'"
            )
        if alias := _ALIAS.fullmatch(item):
            self.check(alias.group("expression"))
            return [(alias.group("name").strip("`"), alias.group("expression"))]
        raise TopologyError(
            f"{self.asset}: {item!r} has no column name; write 'column', '*' or 'expression as name'"
        )

    def check(self, expression: str) -> None:
        """Raises TopologyError if an expression is a column's name but Spark parses it differently."""
        check_sql_name(self.asset, expression, [f.name for f in self.fields])

    def _find(self, name: str) -> StructField | None:
        plain = name.strip("` ").lower()
        return next((f for f in self.fields if f.name.lower() == plain), None)

    def type_of(self, expression: str) -> DataType:
        """Returns the type of an expression; NullType if only Spark can infer it."""
        found = self._find(expression)
        if found is not None:
            return found.dataType
        return _cast_type(expression)

    def fields_of_result(self) -> list[StructField]:
        """Returns the columns with their types; NullType if only Spark can infer one."""
        return [StructField(name, self.type_of(expression)) for name, expression in self.columns]

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        """Returns for each column the (asset, column) pairs that it derives from."""
        return {name: self.mentioned(expression) for name, expression in self.columns}

    @property
    def computed(self) -> set[str]:
        """The columns that are no plain columns of the source."""
        return {name for name, expression in self.columns if self._find(expression) is None}

    def mentioned(self, expression: str) -> list[tuple[str, str]]:
        """Returns the (asset, column) pairs that a SQL expression mentions."""

        def has(column: str) -> bool:
            pattern = rf"(?<![\w.]){re.escape(column)}(?!\w)"
            return re.search(pattern, expression, re.IGNORECASE) is not None

        return [(self.source, f.name) for f in self.fields if has(f.name)]


@dataclass(frozen=True)
class Side:
    """One input of a join: its asset, its columns, and its further time columns (``valid_from``...)."""

    asset: str
    fields: tuple[StructField, ...]
    times: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """All its columns."""
        return [*(f.name for f in self.fields), *self.times]

    def find(self, column: str) -> StructField | None:
        """Returns a column by name, ignoring case; None if it is a time column or does not exist."""
        return next((f for f in self.fields if f.name.lower() == column.lower()), None)


@dataclass(frozen=True)
class Projection:
    """The columns of a join's result as (name, SQL expression), key columns first if not selected.

    Args:
        asset: name of the result, for messages.
        key: the left side's key columns, which the result keeps.
        sides: ``left`` and ``right``.
        select: the user's selection.

    Raises:
        TopologyError: a column that does not exist, has no name, or is selected twice.
    """

    asset: str
    key: tuple[str, ...]
    sides: Mapping[str, Side]
    select: tuple[str, ...]
    columns: tuple[tuple[str, str], ...] = field(init=False)

    @property
    def declared(self) -> tuple[ColumnSpec, ...]:
        """The selection as declared; the name ``*`` stands for all columns of a side."""
        found = list[ColumnSpec]()
        for item in self.select:
            star = _STAR.fullmatch(item)
            whole = None if star is None else ColumnSpec("*", f"{star[1].lower()}.*")
            found.append(whole or ColumnSpec(*self._expand(item)[0]))
        return tuple(found)

    def __post_init__(self) -> None:
        chosen = [column for item in self.select for column in self._expand(item)]
        for name, expression in chosen:
            self._check_key(name, expression)
        names = [n.lower() for n, _ in chosen]
        keys = [(k, f"left.`{k}`") for k in self.key if k.lower() not in names]
        chosen = keys + [c for c in chosen if not self._is_own_timestamp(*c)]
        names = [n.lower() for n, _ in chosen]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise TopologyError(
                f"{self.asset}: select has {twice} more than once; choose one side's column, or "
                f"rename it, for example "
                f"'right.{twice[0]} as {self.sides['right'].asset}_{twice[0]}'"
            )
        object.__setattr__(self, "columns", tuple(chosen))

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        """Returns for each column the (asset, column) pairs that it derives from."""
        return {
            name: [(self.sides[side].asset, column) for side, column in _references(expression)]
            for name, expression in self.columns
        }

    @property
    def computed(self) -> set[str]:
        """The columns that are no plain columns of a side."""
        return {name for name, sql in self.columns if _SELECTED_COLUMN.fullmatch(sql) is None}

    def columns_of(self, side: Literal["left", "right"]) -> set[str]:
        """Returns the columns of a side that the result uses."""
        every = (one for _, expression in self.columns for one in _references(expression))
        used = {column.lower() for found, column in every if found == side}
        return {name for name in self.sides[side].names if name.lower() in used}

    def fields(self) -> list[StructField]:
        """Returns the columns with their types; NullType if only Spark can infer one."""
        return [self._field(name, expression) for name, expression in self.columns]

    def _field(self, name: str, expression: str) -> StructField:
        plain = _SELECTED_COLUMN.fullmatch(expression)
        if plain is None:
            return StructField(name, _cast_type(expression))
        side = plain.group(1).lower()
        found = self.sides[side].find(plain.group(2).strip("`"))
        kind: DataType = found.dataType if found else TimestampType()
        return StructField(name, kind, side == "right" or found is None or found.nullable)

    def _expand(self, item: str) -> list[tuple[str, str]]:
        if odd := self._odd(item):
            return [odd]
        alias = _ALIAS.fullmatch(item)
        if alias and self._odd(alias.group("expression")):
            self._refuse_unquoted(alias.group("expression"))
        for side, token in _reference_tokens(item):
            if token.kind == "name" and not is_sql_name(token.sql) and token.value != "null":
                self._refuse_unquoted(f"{side}.{token.sql}")
            self._check_reference(item, self.sides[side], token.sql.strip("`"))
        if star := _STAR.fullmatch(item):
            side = star.group(1).lower()
            taken = set[str]()
            if side == "right":
                taken = {TIMESTAMP, *(f.name.lower() for f in self.sides["left"].fields)}
            fields = self.sides[side].fields
            return [(f.name, f"{side}.`{f.name}`") for f in fields if f.name.lower() not in taken]
        if plain := _SELECTED_COLUMN.fullmatch(item):
            return [(plain.group(2).strip("`"), item.strip())]
        if alias:
            self._require_sides(item, alias.group("expression"))
            return [(alias.group("name").strip("`"), alias.group("expression"))]
        raise TopologyError(
            f"{self.asset}: the selected column {item!r} has no name; write 'left.column', "
            "'right.column', 'left.*', 'right.*' or 'expression as name'"
        )

    def _odd(self, item: str) -> tuple[str, str] | None:
        """Returns (name, expression) if an item is just a column whose name SQL needs in backticks."""
        whole = _WHOLE.fullmatch(item)
        found = self.sides[whole[1].lower()].find(whole[2]) if whole else None
        if whole is None or found is None or is_sql_name(whole[2]):
            return None
        return found.name, f"{whole[1]}.`{found.name}`"

    def _refuse_unquoted(self, text: str) -> None:
        side, _, column = text.strip().partition(".")
        raise TopologyError(
            f"{self.asset}: select has {text.strip()!r}, which SQL does not parse as a column name; "
            f"write it in backticks, '{side.strip()}.`{column.strip()}`'"
        )

    def _require_sides(self, item: str, expression: str) -> None:
        """Raises TopologyError if an expression has columns, but none of them with its side."""
        if _references(expression):
            return
        known = {name.lower() for side in self.sides.values() for name in side.names}
        found = (_NONE, *tokens(expression), _NONE)
        for before, token, after in zip(found, found[1:], found[2:], strict=False):
            # ``date '2026-01-01'``, ``date(…)`` and ``cast(… as date)`` are no columns
            typed = after.kind == "text" or after.value == "(" or before.value == "as"
            if token.is_name and token.value in known and not typed:
                raise TopologyError(
                    f"{self.asset}: expected each column of select with its side, got {item!r}; write "
                    f"'left.{token.sql}' or 'right.{token.sql}'"
                )

    def _check_reference(self, item: str, side: Side, column: str) -> None:
        known = side.names
        if column != "*" and column.lower() not in {k.lower() for k in known}:
            raise TopologyError(
                f"{self.asset}: select names {item!r}, but {side.asset!r} has no column {column!r}; "
                f"it has {known}"
            )

    def _check_key(self, name: str, expression: str) -> None:
        """Raises TopologyError if a key column gets another value than the stream's."""
        for k in self.key:
            if name.lower() == k.lower() and not _is(expression, k):
                raise TopologyError(
                    f"{self.asset}: {k!r} is a key column and has the stream's value; select "
                    f"{expression!r} under another name"
                )

    def _is_own_timestamp(self, name: str, expression: str) -> bool:
        """Returns whether a column is the left ``timestamp``, which the result always has; raises
        TopologyError if another expression has that name."""
        if name.lower() != TIMESTAMP:
            return False
        if not _is(expression, TIMESTAMP):
            raise TopologyError(
                f"{self.asset}: 'timestamp' is the stream record's own timestamp; select "
                f"{expression!r} under another name, for example '{expression} as seen_at'"
            )
        return True


def _references(expression: str) -> list[tuple[str, str]]:
    """Returns the (side, column) pairs in an expression of a join."""
    return [(side, token.sql.strip("`")) for side, token in _reference_tokens(expression)]


def _reference_tokens(expression: str) -> Iterator[tuple[str, Token]]:
    """Yields (side, the token of the column or ``*``); a text and a struct's field named ``left`` are
    no side."""
    found = tokens(expression)
    for place in range(len(found) - 2):
        side, point, column = found[place : place + 3]
        if not side.is_name or side.value not in ("left", "right") or point.value != ".":
            continue
        inside = place > 0 and found[place - 1].value == "."
        if not inside and (column.is_name or column.value == "*"):
            yield side.value, column


def _is(expression: str, left_column: str) -> bool:
    plain = _SELECTED_COLUMN.fullmatch(expression)
    return bool(
        plain
        and plain.group(1).lower() == "left"
        and plain.group(2).strip("`").lower() == left_column.lower()
    )


# Accumulators


Merge = Literal["sum", "min", "max"]

_CALL = re.compile(r"\s*(?P<function>[A-Za-z_]\w*)\s*\((?P<inside>.*)\)\s*", re.DOTALL)
_AGGREGATE_COLUMN = re.compile(r"[A-Za-z_]\w*|`[^`]+`")
_CONSTANTS = frozenset({"true", "false", "null", "current_date", "current_timestamp"})
_KNOWN = ("count", "sum", "min", "max", "avg", "mean")
_EXPECTED = (
    "write one call of count, sum, min, max, avg or mean over a column or SQL expression, "
    "for example 'count(*)' or 'sum(price * amount)'"
)
_AGGREGATE_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_NOT_NUMBERS = (
    BooleanType,
    BinaryType,
    DateType,
    TimestampType,
    TimestampNTZType,
    ArrayType,
    MapType,
    StructType,
)


@dataclass(frozen=True)
class Accumulator:
    """One stored value of a group.

    Args:
        name: its column; begins with ``_acc``.
        expression: SQL over a record's columns; null is ignored.
        merge: how two values are combined. As in SQL, null and x give x.
    """

    name: str
    expression: str
    merge: Merge


class _Call(NamedTuple):
    column: str
    function: str
    inside: str


@dataclass(frozen=True)
class Aggregates:
    """The result columns of an aggregate, and the accumulators they derive from.

    The sum over no values is 0, as in Kafka Streams; avg, min and max over no values are null.
    Identical accumulators are stored once.

    Args:
        asset: name of the result, for messages.
        declared: (column, aggregate) pairs.

    Attributes:
        columns: (name, SQL expression over the accumulators).
        accumulators: the stored values.

    Raises:
        TopologyError: an expression that is not a single aggregate call.
    """

    asset: str
    declared: tuple[tuple[str, str], ...]
    columns: tuple[tuple[str, str], ...] = field(init=False)
    accumulators: tuple[Accumulator, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.declared:
            raise TopologyError(f"{self.asset}: expected aggregates, got none; {_EXPECTED}")
        kept: dict[tuple[str, Merge], Accumulator] = {}

        def keep(expression: str, merge: Merge) -> str:
            name = f"_acc{len(kept)}"
            return kept.setdefault((expression, merge), Accumulator(name, expression, merge)).name

        columns: list[tuple[str, str]] = []
        for call in self._calls():
            x = call.inside  # which a comment may end
            if call.function == "count":
                one = "CAST(1 AS BIGINT)" if x == "*" else f"CAST(({x}\n) IS NOT NULL AS BIGINT)"
                shown = f"coalesce({keep(one, 'sum')}, 0)"
            elif call.function == "sum":
                shown = f"coalesce({keep(x, 'sum')}, 0)"
            elif call.function == "avg":
                total = keep(f"CAST(({x}\n) AS DOUBLE)", "sum")
                there = keep(f"CAST(({x}\n) IS NOT NULL AS BIGINT)", "sum")
                shown = f"{total} / nullif({there}, 0)"
            else:
                shown = keep(x, "min" if call.function == "min" else "max")
            columns.append((call.column, shown))
        object.__setattr__(self, "columns", tuple(columns))
        object.__setattr__(self, "accumulators", tuple(kept.values()))

    @property
    def sums(self) -> dict[str, str]:
        """The result columns that are sums, each with the expression that it adds up."""
        return {call.column: call.inside for call in self._calls() if call.function == "sum"}

    @property
    def invertible(self) -> bool:
        """Whether a record can be subtracted: every accumulator is a sum."""
        return all(a.merge == "sum" for a in self.accumulators)

    def fields(self, input: StructType) -> list[StructField]:
        """Returns the result columns with their types; NullType if only Spark can infer one.

        Args:
            input: schema of the aggregated records.

        Raises:
            TopologyError: a column that does not exist, or that cannot be summed or compared.
        """
        types = {f.name.lower(): f.dataType for f in input.fields}
        types.setdefault(TIMESTAMP, TimestampType())
        return [
            StructField(c.column, self._type(c, self._input_type(c, types, input.names)))
            for c in self._calls()
        ]

    def _calls(self) -> Iterator[_Call]:
        for column, aggregate in self.declared:
            yield self._parse(column, aggregate)

    def _parse(self, column: str, aggregate: str) -> _Call:
        call = _CALL.fullmatch(aggregate)
        if call is None or not _is_one_expression(call["inside"]):
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, not an aggregate; {_EXPECTED}"
            )
        function, inside = call["function"].lower(), call["inside"].strip()
        if function not in _KNOWN:
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, but {call['function']!r} has no "
                f"incremental update; {_EXPECTED}"
            )
        if inside == "*" and function != "count":
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, but only count takes '*'; {_EXPECTED}"
            )
        if re.match(r"(distinct|all)\b", inside, re.IGNORECASE):
            raise TopologyError(
                f"{self.asset}: {column!r} is {aggregate!r}, but {inside.split()[0]!r} is not "
                f"supported, since distinct values would need unbounded state; {_EXPECTED}"
            )
        return _Call(column, "avg" if function == "mean" else function, inside)

    def _input_type(self, call: _Call, types: Mapping[str, DataType], names: Sequence[str]) -> DataType:
        check_sql_name(self.asset, call.inside, names)
        if not _AGGREGATE_COLUMN.fullmatch(call.inside) or call.inside.lower() in _CONSTANTS:
            return NullType()
        name = call.inside.strip("`").lower()
        if name not in types:
            raise TopologyError(
                f"{self.asset}: {call.column!r} is {call.function}({call.inside}), but there is no "
                f"column {call.inside!r}; name one of {list(names)}"
            )
        return types[name]

    def _type(self, call: _Call, of: DataType) -> DataType:
        wrong = (MapType,) if call.function in ("min", "max") else _NOT_NUMBERS
        if call.function != "count" and isinstance(of, wrong):
            raise TopologyError(
                f"{self.asset}: {call.column!r} is {call.function}({call.inside}), but {call.inside!r} "
                f"is {of.simpleString()}, a type without {call.function}; write an expression that "
                f"converts it to {'a number' if call.function in ('sum', 'avg') else 'another type'}"
            )
        if call.function == "count":
            return LongType()
        if call.function == "avg":
            return DoubleType()
        if call.function != "sum":
            return of
        if isinstance(of, _AGGREGATE_WHOLE):
            return LongType()
        if isinstance(of, FloatType | DoubleType):
            return DoubleType()
        if isinstance(of, DecimalType):
            return DecimalType(min(of.precision + 10, 38), of.scale)
        return NullType()


def _is_one_expression(text: str) -> bool:
    """Returns whether SQL text is one expression: not empty, balanced parentheses, no comma outside."""
    found, depth = tokens(text), 0
    symbols = [one.value for one in found if one.kind == "symbol"]
    for symbol in symbols:
        depth += (symbol in ("(", "[")) - (symbol in (")", "]"))
        if depth < 0 or (symbol == "," and depth == 0):
            return False
    # A quote is a symbol only if it is not closed.
    return bool(found) and depth == 0 and not {"'", '"', "`"} & {*symbols}
