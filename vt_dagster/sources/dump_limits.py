"""Comparison of a whole state with the table, and the limits within which it is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Literal, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import ARRIVAL, TIMESTAMP
from vt_dagster.core.arrival_order import MOST_BUCKETS, has_key
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.source_records import (
    DELETED,
    POSITION,
    RAW,
    REASON,
    RECORD_TIME,
    RESTATES,
    SOURCE,
    Reason,
    difference,
)
from vt_dagster.errors import ContractError, SourceError, TopologyError
from vt_dagster.sources.consumed_files import FileInfo
from vt_dagster.storage import delta
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream

OnDuplicate = Literal["fail", "quarantine"]
_BUCKET_BYTES = 4_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
UNREAD = "_unread"
"""Column with the raw content of an unreadable row; null for others."""


class Dump(NamedTuple):
    """A whole state: a file, or a directory of files.

    Args:
        name: in the source's directory.
        nested: whether the dump is a directory.
    """

    name: str
    files: tuple[FileInfo, ...]
    nested: bool

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(f.size for f in self.files)

    @property
    def size_above(self) -> int:
        """The size in bytes without sub-directories, which earlier versions of the library skipped."""
        return sum(f.size for f in self.files if "/" not in f.name)

    @property
    def modified(self) -> int:
        """The modification time of the newest file in epoch microseconds."""
        found: list[datetime] = []
        for file in self.files:
            fs, place = delta.filesystem(file.path)
            moment: datetime = fs.modified(place)
            found.append(moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc))
        return (max(found) - _EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True)
class Limits:
    """The limits within which a dump is accepted.

    Args:
        max_shrink: the largest share of the table's rows that the dump may delete.
        max_bad_share: the largest share of bad rows in the dump.
        on_duplicate: the handling of rows that share a key.
        ignore: value columns whose change alone is not a change.
        accepted: whether this dump may delete more, or be empty.
    """

    max_shrink: float
    max_bad_share: float
    on_duplicate: OnDuplicate
    ignore: Sequence[str] = ()
    accepted: bool = False

    def check(self, what: str) -> None:
        """Checks the limits.

        Raises:
            SourceError: a setting is not valid.
        """
        if not 0 <= self.max_shrink <= 1:
            raise SourceError(
                f"max_shrink of {what} must be between 0 and 1, a share of the rows that the table "
                f"holds, got {self.max_shrink}"
            )
        if self.on_duplicate not in ("fail", "quarantine"):
            raise SourceError(
                f"on_duplicate of {what} must be 'fail' or 'quarantine', got {self.on_duplicate!r}"
            )


def check_ignored(name: str, ignore: Sequence[str], key: Sequence[str], schema: StructType) -> None:
    """Checks that ``ignore`` names value columns.

    Raises:
        TopologyError: it names others.
    """
    wrong = [c for c in ignore if c not in schema.names or c in key]
    if wrong:
        others = [c for c in schema.names if c not in key]
        raise TopologyError(
            f"{name}: ignore must name value columns, some of {others}, got {wrong}; correct the names"
        )


def buckets_of(size: int) -> int:
    """Returns the number of buckets in which ``size`` bytes are numbered in order of arrival."""
    return max(1, min(MOST_BUCKETS, size // _BUCKET_BYTES))


def records_of(
    dump: DataFrame,
    node: Stream,
    held: DataFrame,
    hold: Callable[[DataFrame], DataFrame],
    limits: Limits,
    *,
    what: str,
    time: int,
    size: int,
) -> DataFrame:
    """Returns the difference of a dump to the table as upserts and tombstones.

    If the key of a row is unknown (unreadable, or with a null), any key may be missing by mistake: the
    dump then deletes nothing.

    Plan: that of ``core.source_records.difference``, persisted; one job that counts it; with deletions,
    one job that counts the rows of the table.

    Args:
        dump: the schema's columns, ``_source``, ``_position``, ``_unread`` and ``_reason``.
        held, hold: see ``Comparing``.
        what: the name of the dump, for messages.
        time: the time of the dump in epoch microseconds.
        size: its size in bytes.

    Raises:
        SourceError: the dump is empty, deletes too many rows, or has duplicate keys.
        ContractError: the share of bad rows is too large.
    """
    compared = [c for c in value_columns(node) if c not in limits.ignore]
    news = hold(
        difference(dump, held, key=node.key, compared=compared, buckets=buckets_of(size)),
    )
    lost = ~F.col(DELETED) & ~has_key(node.key)
    twice = F.coalesce(F.col(REASON) == Reason.DUPLICATE_KEY, F.lit(False))
    found = _counted(
        news, deleted=F.col(DELETED), lost=lost, twice=twice, bad=lost | F.col(REASON).isNotNull()
    )
    if found["twice"] and limits.on_duplicate == "fail":
        _refuse_duplicates(news.where(twice), node.key, what, found["twice"])
    if found["bad"]:
        _check_share(what, found["bad"], dump.count(), limits.max_bad_share)
    if not limits.accepted:
        _check_size(what, found, held, limits.max_shrink)
    if found["lost"]:
        news = news.where(~F.col(DELETED))
    moment = F.timestamp_micros(F.lit(time))
    raw = F.coalesce(F.col(UNREAD), F.to_json(F.struct(*[F.col(f"`{c}`") for c in node.schema.names])))
    timed = {} if TIMESTAMP in node.schema.names else {TIMESTAMP: moment}
    return news.withColumns(
        {
            **timed,
            RECORD_TIME: moment,
            # A row marked as deleted is in every dump, so it may repeat the table's state.
            RESTATES: ~F.col(DELETED),
            RAW: raw,
            SOURCE: F.coalesce(F.col(SOURCE), F.lit(what)),
        }
    ).select(
        *[F.col(f"`{c}`") for c in node.schema.names],
        *timed,
        *(ARRIVAL, DELETED, RECORD_TIME, RESTATES, SOURCE, POSITION, RAW, REASON),
    )


def _counted(rows: DataFrame, **conditions: Any) -> dict[str, int]:
    sums = [F.sum(F.when(c, 1).otherwise(0)).alias(name) for name, c in conditions.items()]
    found = rows.agg(F.count(F.lit(1)).alias("all"), *sums).collect()[0]
    return {name: int(number or 0) for name, number in found.asDict().items()}


def _refuse_duplicates(rows: DataFrame, key: Sequence[str], what: str, count: int) -> None:
    keys = [F.col(f"`{k}`") for k in key]
    some = [tuple(row) for row in rows.select(*keys).distinct().orderBy(*keys).limit(3).collect()]
    shown = ", ".join(repr(one[0] if len(one) == 1 else one) for one in some)
    raise SourceError(
        f"{what} has {count:,} rows that share their key with another one, for example {shown}; "
        "expected one row per key; nothing was committed. Mend the dump, or set "
        "on_duplicate='quarantine' of the source: then the table keeps its rows of these keys"
    )


def _check_share(what: str, bad: int, rows: int, most: float) -> None:
    if bad > most * rows:
        raise ContractError(
            f"{what}: {bad:,} of {rows:,} rows are bad ({bad / rows:.1%}): unreadable, without a key, "
            f"or with a duplicate key; expected at most {most:.1%}; nothing was committed. "
            "Mend the dump, or raise max_bad_share of the source to send them to quarantine"
        )


def _check_size(what: str, found: Mapping[str, int], held: DataFrame, most: float) -> None:
    deleted = 0 if found["lost"] else found["deleted"]
    if not deleted and found["all"]:
        return
    there = held.count()
    if there == deleted and found["all"] == deleted:
        raise SourceError(
            f"{what} is empty: expected rows; nothing was committed. Put a whole dump in its place, or "
            "run once with accept_shrink: true, which deletes all rows of the table"
        )
    if deleted > most * there:
        raise SourceError(
            f"{what} lacks {deleted:,} of the {there:,} rows that the table holds "
            f"({deleted / there:.0%}), expected at most {most:.0%} (max_shrink); nothing was committed."
            " Check whether it is complete; if it is, run once with accept_shrink: true"
        )


def require_past(what: str, time: int, skew: timedelta) -> None:
    """Checks that a dump's time is not in the future by this machine's clock.

    Raises:
        SourceError: the time is ahead by more than ``skew``.
    """
    now = datetime.now(timezone.utc)
    limit = int((now.timestamp() + skew.total_seconds()) * 1_000_000)
    if time > limit:
        raise SourceError(
            f"{what} has the time {in_utc(time)}, which is more than max_clock_skew ({skew}) "
            f"ahead of this machine's clock ({now:%Y-%m-%dT%H:%M:%SZ}): all later dumps would be "
            "out of order. Correct its time, or raise max_clock_skew of the source"
        )
