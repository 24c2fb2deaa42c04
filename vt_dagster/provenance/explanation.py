"""What an explanation says, as values: records, where they came from, and which rule decided."""

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
        asset: its name, with the folders that it is in.
        recorded_at: when the log came to know it; None = it is from before that was noted.
        values: the user's columns, the key's too; times as texts, UTC.
        is_latest: of a table: whether it was its key's latest by timestamp when it came; else None.
        is_late: of a join with grace: whether it was joined at once; else None.
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
    """A rule that decided something of a record.

    Args:
        rule: its name, one of ``vt_dagster.rules.RULES``.
        because: what was so in this case.
    """

    rule: str
    because: str

    @property
    def says(self) -> str:
        """The rule itself, in a sentence."""
        return RULES[self.rule].says


@dataclass(frozen=True)
class Written:
    """The commit by which a record came into its log.

    Args:
        batch: its number, from 1.
        run_id: Dagster's run; None where none was given.
    """

    batch: int
    run_id: str | None
    recorded_at: datetime


@dataclass(frozen=True)
class Candidate:
    """A row of the other side that may have answered.

    Args:
        valid_from, valid_to: when it was true, by what the run knew: inclusive, exclusive; None =
            current, or the side is a plain table.
        valid_to_now: the same by what is known now.
        known: whether the run could know it.
        chosen: whether it is the one that was joined.
        chosen_now: whether it would be, by what is known now.
        rule: the name of the rule by which it was chosen, or was not.
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
    """Where the record of a source came from.

    Args:
        kind: ``files``, ``topic``, ``deliveries``, ``versions``, or ``snapshot``: the one that its
            table started with.
        names: the files, topics or deliveries that its run took, at most 20 of them.
        count: of how many.
        start, end: what the run took of them, positions: inclusive, exclusive; None = not noted.
        position: the record's own place, a topic's offset; None = not known exactly.
    """

    kind: str
    names: tuple[str, ...]
    count: int
    start: int | None = None
    end: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class Rejected:
    """A row of a source that is not in the log: what its quarantine has.

    Args:
        position: the line, or the offset.
        raw: the row as it was read, at most 500 characters.
    """

    reason: str
    source: str | None
    position: int | None
    raw: str
    batch: int

    @property
    def says(self) -> str:
        """The reason in a sentence."""
        return RULES[self.reason].says if self.reason in RULES else self.reason


@dataclass(frozen=True)
class Explanation:
    """Why a row is as it is, or is not there.

    Args:
        asset: whose row it is.
        operator: what the asset is the result of; ``source`` where it has a source.
        record: the row; None: there is none, and ``decisions`` say why.
        written: the commit that it came by.
        decisions: the rules that decided, in order.
        made_of: the records that it was made of, each explained; of many the newest.
            ``made_of_in_all`` counts all.
        candidates: of a join: rows of the other side around the record's time; of a window: records
            that came too late for it; of suppress: updates that a later one replaced.
            ``candidates_in_all`` counts all of them.
        origin: of a source: where it came from.
        rejected: rows of a source that its quarantine has, and that mention the key.
        notes: what could not be told, and why.
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
        """How many records it was made of that are not named."""
        return self.made_of_in_all - len(self.made_of)

    @property
    def rules(self) -> tuple[str, ...]:
        """The names of the rules that decided."""
        return tuple(one.rule for one in self.decisions)

    def walk(self) -> Iterator[Explanation]:
        """This explanation and all that are within it."""
        yield self
        for one in self.made_of:
            yield from one.walk()

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values, times as ISO 8601."""
        found: Any = _plain(self)
        return found


@dataclass
class Reasoning:
    """An explanation that is being made."""

    decisions: list[Decision] = field(default_factory=list[Decision])
    notes: list[str] = field(default_factory=list[str])

    def decide(self, rule: Any, because: str) -> None:
        """Adds a rule that decided, and what was so."""
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
