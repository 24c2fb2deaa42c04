"""The values of an explanation: records, their origins, and the rules that decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any, cast

from vt_dagster.rules import RULES


@dataclass(frozen=True)
class Record:
    """A record of an asset's log.

    Args:
        asset: the asset's name, with its key prefix (``shop/prices``).
        partition, offset: the record's place in the log.
        timestamp: the event time, UTC.
        recorded_at: the system time, UTC; None = the log did not record it then.
        values: the user's columns, with the key; times as texts, UTC.
        is_latest: tables only: whether it was its key's latest by timestamp on arrival; else None.
        is_late: joins with grace only: whether it was late and joined at once; else None.
    """

    asset: str
    partition: int
    offset: int
    timestamp: datetime
    recorded_at: datetime | None
    is_tombstone: bool
    values: Mapping[str, Any]
    is_latest: bool | None = None
    is_late: bool | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Its partition and offset."""
        return self.partition, self.offset

    def __str__(self) -> str:
        return f"{self.asset} {self.partition}:{self.offset}"


@dataclass(frozen=True)
class Decision:
    """A rule that decided the outcome of a record.

    Args:
        rule: the rule's name, one of ``vt_dagster.rules.RULES``.
        because: the facts of this case.
    """

    rule: str
    because: str

    @property
    def says(self) -> str:
        """The rule as a sentence."""
        return RULES[self.rule].says


@dataclass(frozen=True)
class Written:
    """The commit that wrote a record.

    Args:
        batch: the commit's number, from 1.
        run_id: the Dagster run; None = the run had no id.
        recorded_at: the commit's system time, UTC.
    """

    batch: int
    run_id: str | None
    recorded_at: datetime


@dataclass(frozen=True)
class Candidate:
    """A record that may be an input, with the rule that selected or excluded it.

    Args:
        valid_from: start of its validity (inclusive); None = it has no validity, as in a plain table.
        valid_to: end of its validity (exclusive) as of the run; None = current, or no validity.
        valid_to_now: end of its validity by current knowledge.
        known: whether the run read a log that contains it.
        chosen: whether it was joined.
        chosen_now: whether it would be joined by current knowledge.
        rule: the name of the rule that selected or excluded it.
    """

    record: Record
    valid_from: datetime | None
    valid_to: datetime | None
    valid_to_now: datetime | None
    known: bool
    chosen: bool
    chosen_now: bool
    rule: str


@dataclass(frozen=True)
class Origin:
    """The origin of a source's record.

    Args:
        kind: ``files``, ``topic``, ``deliveries``, ``versions``, or ``snapshot`` (the table's initial
            snapshot).
        names: the files, topics or deliveries that the run consumed, at most 20.
        count: the number of all of them.
        start, end: the positions that the run consumed: inclusive, exclusive; None = not recorded.
        position: the record's own offset in the topic; None = not known exactly.
    """

    kind: str
    names: tuple[str, ...]
    count: int
    start: int | None = None
    end: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class Rejected:
    """A row of a source that is in quarantine instead of the log.

    Args:
        reason: the name of the rule that rejected it.
        source: the file or topic.
        position: the line or the offset.
        raw: the row as read, at most 500 characters.
        batch: the number of the commit.
    """

    reason: str
    source: str | None
    position: int | None
    raw: str
    batch: int

    @property
    def says(self) -> str:
        """The reason as a sentence."""
        return RULES[self.reason].says if self.reason in RULES else self.reason


@dataclass(frozen=True)
class Explanation:
    """Why a row has its values, or does not exist.

    Args:
        asset: the asset's name.
        operator: the operator that makes the asset; ``source`` for an asset with a source.
        record: the row; None = there is no such row, ``decisions`` and ``notes`` give the reason.
        written: the commit that wrote the row.
        decisions: the rules that decided, in order.
        made_of: the row's input records, each explained; only the newest if there are many.
        made_of_in_all: the number of all input records.
        candidates: joins: rows of the other side around the record's time; windows: records that came
            too late; suppress: updates that a later one replaced.
        candidates_in_all: the number of all candidates.
        origin: sources only: the record's origin.
        rejected: sources only: rows in quarantine that mention the key.
        notes: further facts, and what is not known and why.
    """

    asset: str
    operator: str
    record: Record | None = None
    written: Written | None = None
    decisions: tuple[Decision, ...] = ()
    made_of: tuple[Explanation, ...] = ()
    made_of_in_all: int = 0
    candidates: tuple[Candidate, ...] = ()
    candidates_in_all: int = 0
    origin: Origin | None = None
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def more(self) -> int:
        """The number of input records that ``made_of`` leaves out."""
        return self.made_of_in_all - len(self.made_of)

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules that decided."""
        return tuple(one.rule for one in self.decisions)

    def walk(self) -> Iterator[Explanation]:
        """Yields this explanation and all those of its inputs, recursively."""
        yield self
        for one in self.made_of:
            yield from one.walk()

    def as_json(self) -> dict[str, Any]:
        """Returns all fields as plain values; times as ISO 8601."""
        found: Any = _plain(self)
        return found


@dataclass
class Reasoning:
    """Collects the decisions and notes of an explanation."""

    decisions: list[Decision] = field(default_factory=list[Decision])
    notes: list[str] = field(default_factory=list[str])

    def decide(self, rule: Any, because: str) -> None:
        """Adds a rule that decided, with the facts of this case."""
        self.decisions.append(Decision(str(rule), because))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast(list[Any], value)]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
