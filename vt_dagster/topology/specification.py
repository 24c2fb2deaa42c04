"""The specification of an operator: what it computes, as commits store it in JSON.

A specification needs neither the operator's definition nor Spark, so that ``explain``, ``lateness`` and
``explore`` read it from a commit. Durations are ISO 8601, columns are (name, SQL expression) pairs.
``FilterSpec`` is the specification of ``Filter``, where its fields are described, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import BaseModel, Field, PlainSerializer

from vt_dagster.topology.durations import Calendar, CalendarSize, Duration, iso8601, length_at, spoken

# Parts of a specification

_MAY_CHANGE = "may change between runs: earlier results remain valid in the same log"
_INPUT = "the name of an input"

Length = Annotated[timedelta, PlainSerializer(iso8601, return_type=str)]
Lengths = Length | Mapping[int, Length]
"""A duration; by partition if the partitions differ."""
Limits = int | Mapping[int, int | None] | None
"""Maximum of a buffer; by partition if the partitions differ. None = no limit."""
Input = Annotated[str, _INPUT]
JoinKind = Literal["inner", "left", "outer"]
Emitted = Annotated[Literal["every_update", "per_run"], _MAY_CHANGE]
NONE = timedelta(0)
Names = Mapping[str, tuple[str, ...]]
"""Earlier names by column, the newest first."""

_COMMENT = re.compile(r"--(?:\\\r?\n|[^\r\n])*")
_TEXT = re.compile(
    r"r'[^']*'|r\"[^\"]*\"|'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"", re.I | re.DOTALL
)
_QUOTED = re.compile(r"`(?:[^`]|``)*`")
_NAME = re.compile(r"\w+")
_SYMBOL = re.compile(r"::|->|=>|.", re.DOTALL)


@dataclass(frozen=True)
class Token:
    """A token of an SQL expression.

    Args:
        kind: ``name``, ``quoted`` (in backticks), ``text`` (a string) or ``symbol``.
        value: without quotes; in lower case except for strings.
        sql: as written.
    """

    kind: Literal["name", "quoted", "text", "symbol"]
    value: str
    sql: str = ""

    @property
    def is_name(self) -> bool:
        """Whether it may name a function or a column."""
        return self.kind in ("name", "quoted")


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
            yield Token("text", text[2:-1] if text[0] in "rR" else text[1:-1], text)
        elif found := _QUOTED.match(expression, place):
            place = found.end()
            yield Token("quoted", found[0][1:-1].replace("``", "`").lower(), found[0])
        elif found := _NAME.match(expression, place):
            place = found.end()
            yield Token("name", found[0].lower(), found[0])
        else:
            found = _SYMBOL.match(expression, place)
            assert found is not None
            place = found.end()
            yield Token("symbol", found[0], found[0])


def _after_comment(expression: str, place: int) -> int:
    """Returns the end of a block comment, which may contain nested ones."""
    depth = 0
    for mark in re.finditer(r"/\*|\*/", expression[place:]):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return place + mark.end()
    return len(expression)


class ColumnSpec(NamedTuple):
    """A selected column.

    Args:
        name: its name in the result; ``*`` = all columns of the input or side.
        sql: SQL expression over the input; of a join over ``left.*`` and ``right.*``.
    """

    name: str
    sql: str

    def __str__(self) -> str:
        plain = self.sql.rpartition(".")[2].strip("`") == self.name
        return self.sql.replace("`", "") if plain else f"{self.sql} as {self.name}"


Columns = tuple[ColumnSpec, ...]


class LatenessUnsupported(NamedTuple):
    """Why the cost of another grace cannot be computed from the logs alone.

    Args:
        why: the reason, in full sentences.
        settings: the options that ``vt-dagster what-if`` can try.
    """

    why: str
    settings: tuple[str, ...]


class LatenessOption(NamedTuple):
    """An option that sets how long an operator waits for late records.

    Args:
        name: the option's name.
        length: its value.
    """

    name: str
    length: Duration


class Specification(BaseModel, frozen=True, extra="forbid"):
    """A specification, or a part of one."""

    def definition(self) -> dict[str, Any]:
        """Returns what defines the results, as JSON values: leaves out what may change between runs."""
        return self.model_dump(mode="json", exclude=self._may_change())

    def settings(self) -> dict[str, Any]:
        """Returns what may change between runs, by name: ``grace_period``, ``window.grace``,
        ``until.duration``."""
        found: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Specification):
                found |= {f"{name}.{inner}": one for inner, one in value.settings().items()}
            elif _MAY_CHANGE in field.metadata:
                found[name] = value
        return found

    def changed_settings(self, then: Specification) -> list[str]:
        """Returns the differences from an earlier specification in what may change between runs."""
        before = then.settings()
        return [
            f"{name} was {in_words(before.get(name))}, is {in_words(value)}"
            for name, value in self.settings().items()
            if value != before.get(name)
        ]

    def _may_change(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if _MAY_CHANGE in field.metadata:
                found[name] = True
            elif isinstance(value, Specification):
                found[name] = value._may_change()
        return found


# Windows

_SESSIONS = LatenessUnsupported(
    "The records of a session define its window: a record that comes in time may merge two sessions, "
    "and a dropped record leaves two. So another grace changes the windows of other records, and its "
    "cost cannot be counted record by record as for tumbling and hopping windows.",
    ("window.grace",),
)
_SLIDING = LatenessUnsupported(
    "A sliding window begins or ends at a record: the windows of a dropped record do not exist. So "
    "another grace changes which windows exist, and its cost cannot be counted record by record as "
    "for tumbling and hopping windows.",
    ("window.grace",),
)


class _Window(Specification, frozen=True):
    grace: Annotated[Lengths, _MAY_CHANGE] = NONE
    retention: Annotated[Lengths | None, _MAY_CHANGE] = None


class TumblingWindowSpec(_Window, frozen=True):
    kind: Literal["tumbling"] = "tumbling"
    size: Lengths

    @property
    def advance(self) -> Duration:
        """Time from the start of one window to the start of the next."""
        return self.size

    def __str__(self) -> str:
        return f"tumbling windows of {in_words(self.size)}"


class CalendarWindowSpec(_Window, frozen=True):
    """A ``TumblingWindow`` over the local days, weeks or months of a time zone."""

    kind: Literal["calendar"] = "calendar"
    size: CalendarSize
    zone: str

    @property
    def calendar(self) -> Calendar:
        """The calendar that bounds the windows."""
        return Calendar(self.size, self.zone)

    def __str__(self) -> str:
        return f"tumbling windows of {self.size} in {self.zone}"


class HoppingWindowSpec(_Window, frozen=True):
    kind: Literal["hopping"] = "hopping"
    size: Lengths
    advance: Lengths

    def __str__(self) -> str:
        return f"hopping windows of {in_words(self.size)} every {in_words(self.advance)}"


class SessionWindowSpec(_Window, frozen=True):
    kind: Literal["session"] = "session"
    gap: Lengths

    def __str__(self) -> str:
        return f"sessions with a gap of {in_words(self.gap)}"


class SlidingWindowSpec(_Window, frozen=True):
    kind: Literal["sliding"] = "sliding"
    time_difference: Lengths

    def __str__(self) -> str:
        return f"sliding windows of {in_words(self.time_difference)}"


WindowSpec = (
    TumblingWindowSpec | CalendarWindowSpec | HoppingWindowSpec | SessionWindowSpec | SlidingWindowSpec
)


# Operators


class _Operator(Specification, frozen=True):
    @property
    def lateness_option(self) -> LatenessOption | None:
        """The option for which ``lateness`` computes the cost of other values, unless
        ``lateness_unsupported``; None = there is none."""
        return None

    @property
    def lateness_unsupported(self) -> LatenessUnsupported | None:
        """Why ``lateness`` cannot compute the cost of another grace; None = it can, or none is late."""
        return None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of its inputs, from left to right; an input used twice is there twice."""
        found: list[str] = []
        for name, field in type(self).model_fields.items():
            if _INPUT in field.metadata:
                value = getattr(self, name)
                found += [value] if isinstance(value, str) else value
        return tuple(found)

    def changes(self, then: _Operator, sides: Sequence[Names], own: Names) -> Iterator[str]:
        """Yields the differences in definition from an earlier specification, as text. A renamed
        column, a change of whitespace or comments, and a setting that may change between runs are no
        differences.

        Args:
            sides: earlier names of the columns of its inputs, the left one first.
            own: earlier names of the columns of its result.
        """
        names = ["operator"] if type(self) is not type(then) else type(self).model_fields
        for name in names:
            now, before = getattr(self, name), getattr(then, name)
            field = type(self).model_fields[name]
            if _MAY_CHANGE in field.metadata:
                continue
            same = (
                now == before if _INPUT in field.metadata else _equals_renamed(now, before, sides, own)
            )
            if not same:
                yield f"{name} was {in_words(before)}, is {in_words(now)}"


def _equals_renamed(now: Any, then: Any, sides: Sequence[Names], own: Names) -> bool:
    if isinstance(now, Specification) and isinstance(then, Specification):
        return now.definition() == then.definition()
    if isinstance(now, ColumnSpec) and isinstance(then, ColumnSpec):
        names = (now.name, *own.get(now.name, ()))
        return then.name in names and _same_sql(now.sql, then.sql, sides, own)
    if isinstance(now, str) and isinstance(then, str):
        return _same_sql(now, then, sides, own)
    if isinstance(now, tuple) and isinstance(then, tuple):
        pairs = zip(cast(Sequence[Any], now), cast(Sequence[Any], then), strict=False)
        return len(now) == len(then) and all(
            _equals_renamed(one, other, sides, own) for one, other in pairs
        )
    return now == then


def _same_sql(now: str, then: str, sides: Sequence[Names], own: Names) -> bool:
    """Returns whether two SQL texts are equal except for whitespace, comments and renamed columns."""
    if now == then:
        return True
    given, earlier = ([one.sql for one in tokens(text)] for text in (now, then))
    return len(given) == len(earlier) and all(
        one == other or other.strip("`") in _earlier_names(given, i, sides, own)
        for i, (one, other) in enumerate(zip(given, earlier, strict=True))
    )


def without_layout(value: Any) -> Any:
    """Returns JSON values whose texts, which may be SQL, are equal if they differ only in whitespace
    and comments."""
    if isinstance(value, str):
        return " ".join(one.sql for one in tokens(value))
    if isinstance(value, Mapping):
        return {name: without_layout(v) for name, v in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [without_layout(one) for one in cast(Sequence[Any], value)]
    return value


def _earlier_names(tokens: Sequence[str], place: int, sides: Sequence[Names], own: Names) -> set[str]:
    """Returns the names of a column with earlier names, its own among them; empty for other tokens."""
    name = tokens[place].strip("`")
    side = tokens[place - 2].lower() if place > 1 and tokens[place - 1] == "." else ""
    if tokens[place].startswith(("'", '"')):
        return set()
    if side in ("left", "right"):
        before = sides[0 if side == "left" else -1].get(name, ())
    else:
        before = (*(sides[0].get(name, ()) if sides else ()), *own.get(name, ()))
    return {name, *before} if before else set()


def in_words(value: Any) -> str:
    """Returns a value as text, for messages: of a length of each partition, all of them."""
    if isinstance(value, timedelta):
        return spoken(value)
    if isinstance(value, ColumnSpec):
        return str(value)
    if isinstance(value, tuple):
        return repr(", ".join(map(str, cast(Sequence[Any], value))))
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return ", ".join(f"{in_words(one)} in partition {partition}" for partition, one in items)
    return str(value) if isinstance(value, Specification) else repr(value)


class _OneInput(_Operator, frozen=True):
    source: Input


class FilterSpec(_OneInput, frozen=True):
    operator: Literal["filter"] = "filter"
    predicate: str
    negate: bool = False


class MapValuesSpec(_OneInput, frozen=True):
    operator: Literal["map_values"] = "map_values"
    select: Columns


class FlatMapValuesSpec(_OneInput, frozen=True):
    operator: Literal["flat_map_values"] = "flat_map_values"
    elements: ColumnSpec
    keep: Columns = ()


class SelectKeySpec(_OneInput, frozen=True):
    operator: Literal["select_key"] = "select_key"
    group_key: Columns
    partitions: int | None = None
    partition_by: str | None = None


class MergeSpec(_Operator, frozen=True):
    operator: Literal["merge"] = "merge"
    sources: Annotated[tuple[str, ...], _INPUT]


class ToTableSpec(_OneInput, frozen=True):
    operator: Literal["to_table"] = "to_table"


class ToStreamSpec(_OneInput, frozen=True):
    operator: Literal["to_stream"] = "to_stream"


class _Join(_Operator, frozen=True):
    left: Input
    right: Input
    kind: JoinKind
    select: Columns

    def copied(self, left: Sequence[str], right: Sequence[str]) -> list[tuple[str, str, str]]:
        """Returns the result's columns that are copied from a side: (name, side, column there).

        Args:
            left, right: the columns of both sides.
        """
        sides = {"left": left, "right": right}
        found: list[tuple[str, str, str]] = []
        for name, sql in self.select:
            side, _, column = sql.partition(".")
            side = side.strip().lower()
            if side not in sides:
                continue
            if name == "*":
                # Of equal names, ``right.*`` leaves out those that the left side has.
                taken = {c.lower() for c in left} if side == "right" else set[str]()
                found += [(c, side, c) for c in sides[side] if c.lower() not in taken]
                continue
            plain = column.strip().strip("`").lower()
            found += [(name, side, c) for c in sides[side] if c.lower() == plain]
        return found


class LookupJoinSpec(_Join, frozen=True):
    """A stream joined with a table, see ``StreamTableJoin``."""

    grace_period: Annotated[Lengths, _MAY_CHANGE] = NONE
    as_known: Literal["now", "when_recorded"] | Length = "now"
    max_age: Length | None = None
    at: Literal["at_or_before", "before", "at_or_after", "after", "nearest"] = "at_or_before"
    before_first: Literal["first_version"] | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether a version that starts after the record may match, apart from ``before_first``."""
        return self.at not in ("at_or_before", "before")

    def grace_of(self, partition: int) -> timedelta:
        """Returns the grace period of a partition."""
        return length_at(self.grace_period, partition)


class StreamTableJoinSpec(LookupJoinSpec, frozen=True):
    operator: Literal["stream_table_join"] = "stream_table_join"

    @property
    def lateness_option(self) -> LatenessOption:
        return LatenessOption("grace_period", self.grace_period)

    @property
    def lateness_unsupported(self) -> LatenessUnsupported | None:
        if self.before_first is not None:
            return LatenessUnsupported(
                "With before_first, an earlier version of a key that comes later changes the match of "
                "records of any age, and so does a version that expires. So no grace period is long "
                "enough, and the cost of another one cannot be counted record by record.",
                ("grace_period", "before_first"),
            )
        if self.looks_ahead:
            return LatenessUnsupported(
                "With at_or_after, after and nearest, a version matches records from before its start: "
                "they wait for versions that do not exist yet, not only for late ones. So the cost of "
                "another grace period is not only that of late table records, which alone is counted.",
                ("grace_period", "max_age"),
            )
        if self.as_known == "now":
            return None
        return LatenessUnsupported(
            "With as_known, each record is joined with the versions that were recorded up to a system "
            "time of its own. Versions recorded later are left out on purpose, so none of them makes a "
            "row wrong.",
            ("as_known",),
        )


class CorrectedJoinSpec(LookupJoinSpec, frozen=True):
    operator: Literal["corrected_join"] = "corrected_join"
    key: tuple[str, ...] = ()
    corrected_for: Annotated[Lengths, _MAY_CHANGE] = NONE

    @property
    def lateness_unsupported(self) -> LatenessUnsupported | None:
        return LatenessUnsupported(
            "A later run corrects each row that was joined too early. So no length makes a row wrong, "
            "except for table records that come later than corrected_for: the rows that they would "
            "correct are counted here, and are in quarantine with the record that came too late.",
            ("corrected_for", "grace_period"),
        )


class TableTableJoinSpec(_Join, frozen=True):
    operator: Literal["table_table_join"] = "table_table_join"
    monotone_timestamps: Annotated[bool | None, _MAY_CHANGE] = None
    emit: Emitted = "every_update"


class ForeignKeyJoinSpec(_Join, frozen=True):
    operator: Literal["foreign_key_join"] = "foreign_key_join"
    foreign_key: tuple[str, ...]
    monotone_timestamps: Annotated[bool | None, _MAY_CHANGE] = None
    emit: Emitted = "every_update"


class HistoryJoinSpec(_Join, frozen=True):
    operator: Literal["history_join"] = "history_join"
    emit: Emitted = "every_update"


class _StreamJoin(_Join, frozen=True):
    before: Lengths
    after: Lengths
    grace: Annotated[Lengths, _MAY_CHANGE] = NONE


class StreamStreamJoinSpec(_StreamJoin, frozen=True):
    operator: Literal["stream_stream_join"] = "stream_stream_join"


class CorrectedStreamJoinSpec(_StreamJoin, frozen=True):
    operator: Literal["corrected_stream_join"] = "corrected_stream_join"
    corrected_for: Annotated[Lengths, _MAY_CHANGE] = NONE

    @property
    def lateness_unsupported(self) -> LatenessUnsupported | None:
        return LatenessUnsupported(
            "A row without a match is retracted when its match comes. So no grace makes a row wrong, "
            "except for records that come later than corrected_for: they are counted here, and are in "
            "quarantine.",
            ("corrected_for", "grace"),
        )


class AggregatorSpec(Specification, frozen=True):
    """The Python functions of an ``Aggregator``, by name.

    Args:
        columns: the columns of its aggregate as Spark's text; None = those of a row.
    """

    adder: str
    subtractor: str
    initializer: str | None = None
    columns: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self if value is not None)


class _Aggregate(_OneInput, frozen=True):
    group_key: Columns = ()
    """The new key; empty = the key of the input."""
    partitions: int | None = None
    partition_by: str | None = None
    emit: Emitted = "every_update"


class StreamAggregateSpec(_Aggregate, frozen=True):
    operator: Literal["stream_aggregate"] = "stream_aggregate"
    aggregates: Columns


class TableAggregateSpec(_Aggregate, frozen=True):
    operator: Literal["table_aggregate"] = "table_aggregate"
    aggregates: Columns | AggregatorSpec
    select: Columns = ()
    """The columns passed to an aggregator."""


class WindowedAggregateSpec(_Aggregate, frozen=True):
    operator: Literal["windowed_aggregate"] = "windowed_aggregate"
    aggregates: Columns
    window: Annotated[WindowSpec, Field(discriminator="kind")]

    @property
    def lateness_option(self) -> LatenessOption:
        return LatenessOption("grace", self.window.grace)

    @property
    def lateness_unsupported(self) -> LatenessUnsupported | None:
        return {"session": _SESSIONS, "sliding": _SLIDING}.get(self.window.kind)


class TimeLimitSpec(Specification, frozen=True):
    kind: Literal["time_limit"] = "time_limit"
    duration: Annotated[Lengths, _MAY_CHANGE]
    max_records: Annotated[Limits, _MAY_CHANGE] = None
    max_bytes: Annotated[Limits, _MAY_CHANGE] = None
    when_full: Annotated[str, _MAY_CHANGE] = "emit_early"

    def __str__(self) -> str:
        return "a time limit"


class WindowClosesSpec(Specification, frozen=True):
    kind: Literal["window_closes"] = "window_closes"
    max_records: Annotated[Limits, _MAY_CHANGE] = None
    max_bytes: Annotated[Limits, _MAY_CHANGE] = None
    when_full: Annotated[str, _MAY_CHANGE] = "unbounded"

    def __str__(self) -> str:
        return "the close of a window"


class SuppressSpec(_OneInput, frozen=True):
    operator: Literal["suppress"] = "suppress"
    until: Annotated[TimeLimitSpec | WindowClosesSpec, Field(discriminator="kind")]


OperatorSpec = Annotated[
    FilterSpec
    | MapValuesSpec
    | FlatMapValuesSpec
    | SelectKeySpec
    | MergeSpec
    | ToTableSpec
    | ToStreamSpec
    | StreamTableJoinSpec
    | CorrectedJoinSpec
    | TableTableJoinSpec
    | ForeignKeyJoinSpec
    | HistoryJoinSpec
    | StreamStreamJoinSpec
    | CorrectedStreamJoinSpec
    | StreamAggregateSpec
    | TableAggregateSpec
    | WindowedAggregateSpec
    | SuppressSpec,
    Field(discriminator="operator"),
]
"""The specification of any operator; its field ``operator`` names the kind."""
