"""A versioned table in a test, with the methods of KIP-889: put, get, delete and history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime
from enum import Enum
from typing import Any, Final, Literal

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import table_store as of_table
from vt_dagster.core import versioned_table
from vt_dagster.core.arrival_order import Outcome, by_partition
from vt_dagster.core.source_records import REASON, prepare
from vt_dagster.errors import ContractError
from vt_dagster.testing.memory_store import MemoryStore, Records, to_value
from vt_dagster.topology.model import VersionedTable

Row = dict[str, Any]

_AT = "_at"


class Refused(Enum):
    """The result of a put that the table refused."""

    REFUSED = "refused"


REFUSED: Final = Refused.REFUSED
"""A put older than the history retention; KIP-889's ``PUT_RETURN_CODE_NOT_PUT``."""


class VersionedStore:
    """The methods of KIP-889 on a versioned table of a :class:`TopologyTestDriver`.

    A key is a value, or a tuple for a composite key, without nulls. A time is a datetime (naive = UTC)
    or an integer, epoch milliseconds. The ``..._each`` methods make many calls in one run: each call
    sees the table as it was before the run, so pass distinct keys.
    """

    def __init__(
        self,
        node: VersionedTable,
        store: MemoryStore,
        pipe: Callable[..., None],
        session: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._node, self._store, self._pipe, self._session = node, store, pipe, session

    def get(self, key: Any, as_of: datetime | int | None = None) -> Row | None:
        """Returns the row of a key as of a time (inclusive) or now; None if there is none, if it was
        deleted, or if the time is older than the history retention (unless the current version was
        already valid then)."""
        return self.get_each((key, as_of))[0]

    def get_each(self, *calls: tuple[Any, datetime | int | None]) -> list[Row | None]:
        """Returns the results of many :meth:`get` calls, given as (key, as_of)."""
        node = self._node
        schema = StructType(
            [StructField(k, t) for k, t in zip(node.key, node.key_types, strict=True)]
            + [StructField(_AT, TimestampType()), StructField(ARRIVAL, LongType())]
        )
        asked = [
            {**self._key(key), _AT: to_value(as_of, TimestampType()), ARRIVAL: i}
            for i, (key, as_of) in enumerate(calls)
        ]
        table = pa.Table.from_pylist(asked, schema=to_arrow_schema(schema))
        with self._session():
            view, calls_ = self._store.view(), self._store.frame(table)
            now = of_table.rows_now(node, of_table.current(node, view), self._times())
            now = now.join(calls_.where(F.col(_AT).isNull()), list(node.key))
            dated = of_table.as_read(node, view).join(
                calls_.where(F.col(_AT).isNotNull()), list(node.key)
            )
            then = versioned_table.get_as_of(dated, F.col(_AT), self._horizon())
            found = {r.pop(ARRIVAL): r for r in now.unionByName(then).toArrow().to_pylist()}
        for row in found.values():
            del row[_AT]
        return [found.get(i) for i in range(len(calls))]

    def history(self, key: Any) -> list[Row]:
        """Returns all versions of a key by ``valid_from``, with tombstones."""
        values = tuple(self._key(key).values())
        with self._session():
            view = of_table.as_read(self._node, self._store.view())
            own = versioned_table.key_range(view, key=self._node.key, lower=values, upper=values)
            return versioned_table.history(own, key=self._node.key).toArrow().to_pylist()

    def put(
        self, key: Any, value: Any, timestamp: datetime | int
    ) -> datetime | Literal[Refused.REFUSED] | None:
        """Stores a value in a run of its own.

        Args:
            value: the value columns by name; the bare value if there is only one value column;
                None = a tombstone, whatever the table's tombstone condition.

        Returns:
            the end of the value's validity (exclusive): the timestamp of the key's next version, or
            None if the value is the latest; ``REFUSED`` if the timestamp is older than the history
            retention, or the value loses a tie.
        """
        return self.put_each(self._record(key, value, timestamp))[0]

    def put_each(self, *records: Mapping[str, Any]) -> list[datetime | Literal[Refused.REFUSED] | None]:
        """Returns the results of many :meth:`put` calls, given as records for ``pipe``, in one run."""
        self._pipe(self._node.name, *records)
        assert self._store.held is not None
        outcomes = {r[ARRIVAL]: r for r in self._store.held.to_pylist()}
        versions = self._valid_to()
        answers: list[datetime | Literal[Refused.REFUSED] | None] = []
        for i in range(len(records)):
            row = outcomes[i]
            if row[OUTCOME] == Outcome.QUARANTINED:
                raise ContractError(
                    f"{self._node.name}: expected a record with a key and a timestamp, got "
                    f"{dict(records[i])} ({row[REASON]}); set both"
                )
            own = versions[tuple(_hashable(row[k]) for k in self._node.key)]
            refused = row[OUTCOME] in (Outcome.LATE, Outcome.LOST_TIE)
            begun = [begin for begin in own if begin <= row[TIMESTAMP]]
            answers.append(REFUSED if refused else own[max(begun)] if begun else None)
        return answers

    def delete(self, key: Any, timestamp: datetime | int) -> Row | None:
        """Stores a tombstone in a run of its own.

        Returns:
            the row that was valid at the timestamp; None if there was none, or if the timestamp is
            older than the history retention, and nothing is stored.
        """
        return self.delete_each(self._record(key, None, timestamp))[0]

    def delete_each(self, *records: Mapping[str, Any]) -> list[Row | None]:
        """Returns the results of many :meth:`delete` calls, as records for ``pipe``, in one run."""
        removed = self.find_each(*records)
        self.put_each(*({**r, IS_TOMBSTONE: True} for r in records))
        return removed

    def find_each(self, *records: Mapping[str, Any]) -> list[Row | None]:
        """Returns the results of :meth:`delete_each` without changing the table."""
        node, store = self._node, self._store
        with self._session():
            asked = replace(node, tombstone=None)
            requests = prepare(Records(store, records).read(store.spark, asked), asked)
            found = versioned_table.delete(
                requests.select(*node.key, TIMESTAMP, PARTITION, ARRIVAL),
                of_table.as_read(node, store.view()),
                key=node.key,
                stream_time=self._stream_time(),
                history_retention=node.history_retention,
            )
            rows = found.where("removed IS NOT NULL").select(ARRIVAL, "removed.*")
            removed = {r.pop(ARRIVAL): r for r in rows.toArrow().to_pylist()}
        return [removed.get(i) for i in range(len(records))]

    def _horizon(self) -> Column:
        return of_table.horizon_of(self._node, self._stream_time())

    def _stream_time(self) -> Column:
        return by_partition(self._times())

    def _times(self) -> Mapping[int, int]:
        head = self._store.head()
        return {} if head is None else head.commit.stream_time

    def _valid_to(self) -> Mapping[tuple[Any, ...], dict[datetime, datetime | None]]:
        """Returns ``valid_to`` by key and ``valid_from``."""
        columns = [*self._node.key, VALID_FROM, VALID_TO]
        with self._session():
            view = of_table.as_read(self._node, self._store.view()).select(*columns).toArrow()
        rows = zip(*(view[c].to_pylist() for c in columns), strict=True)
        found = defaultdict[tuple[Any, ...], dict[datetime, datetime | None]](dict)
        for *key, begin, end in rows:
            found[tuple(map(_hashable, key))][begin] = end
        return found

    def _key(self, key: Any) -> Row:
        names = self._node.key
        values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(names) or any(v is None for v in values):
            raise ContractError(
                f"{self._node.name}: expected a key with a value for each of {list(names)}, got "
                f"{key!r}; a composite key is a tuple, and no part of it may be None"
            )
        return dict(zip(names, values, strict=True))

    def _record(self, key: Any, value: Any, timestamp: datetime | int) -> Row:
        node = self._node
        if node.timestamp not in (TIMESTAMP, *node.schema.names):
            raise ContractError(
                f"{node.name}: expected a timestamp column, got the expression {node.timestamp!r}, "
                "which put() and delete() cannot fill; pipe a record instead"
            )
        record = {**self._key(key), node.timestamp: timestamp}
        names = [c for c in node.value_columns if c != node.timestamp]
        if value is None:
            return record | {IS_TOMBSTONE: True}
        if isinstance(value, Mapping) and set(value) <= set(names):
            return record | dict(value)
        if len(names) != 1:
            raise ContractError(
                f"{node.name}: expected a mapping with the value columns {names}, got {value!r}"
            )
        return record | {names[0]: value}


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value
