"""foreign-key join: each row of a table with the row of another that it refers to."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vt_dagster.errors import TopologyError
from vt_dagster.topology.operators.base import check_emit, need_each_record, need_table
from vt_dagster.topology.operators.join import check_kind
from vt_dagster.topology.operators.table_table_join import TableTableJoin
from vt_dagster.topology.projection import Selection
from vt_dagster.topology.schema import same_types

_SIDE = re.compile(r"(?<![\w.`])(left|right)\s*\.", re.IGNORECASE)
_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True)
class ForeignKeyJoin(TableTableJoin):
    """Each row of a table with the row of another that it refers to (KIP-914, KIP-213).

    Both sides trigger: a change of the right row gives one result for each left row that refers to
    it. The result has the left's key.

    Late: a change that is out of order for its key in a versioned side is dropped and counted. Null
    key: a table has none; without a foreign key a left row gives nothing (inner; dropped and counted
    where it had none before) or is kept alone (left). Tombstone: on the left a tombstone where there
    was a row, of an inner join where it had a foreign key; on the right one for each row that refers
    to it (inner), or that row alone (left), as often as it comes.

    Args:
        kind: ``inner`` or ``left``.
        foreign_key: SQL expressions over the left's columns, one for each column of the right's key.
            A row in which any is null refers to nothing.
    """

    foreign_key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_table(self.name, "the left side of a foreign-key join", self.left)
        need_table(self.name, "the right side of a foreign-key join", self.right)
        check_kind(self.name, "foreign-key join", self.kind, ("inner", "left"))
        need_each_record(self.name, "a foreign-key join", self.left)
        need_each_record(self.name, "a foreign-key join", self.right)
        check_emit(self.name, self.emit)
        object.__setattr__(self, "select", tuple(self.select))
        if len(self.foreign_key) != len(self.right.key):
            raise TopologyError(
                f"{self.name}: the foreign key {list(self.foreign_key)} must have one expression for "
                f"each key column of {self.right.name!r}, which has {list(self.right.key)}"
            )
        own = Selection(self.name, self.left.name, tuple(self.left.schema.fields))
        for expression in self.foreign_key:
            own.check(expression)
            side = _SIDE.search(_TEXT.sub("", expression))
            if side and side[1].lower() not in map(str.lower, self.left.schema.names):
                raise TopologyError(
                    f"{self.name}: the foreign key {expression!r} names a side of the join, but has "
                    f"only the columns of {self.left.name!r}; write their names alone"
                )
        types = [own.type_of(expression) for expression in self.foreign_key]
        if not same_types(types, self.right.key_types):
            theirs = [t.simpleString() for t in self.right.key_types]
            raise TopologyError(
                f"{self.name}: the foreign key {list(self.foreign_key)} has the types "
                f"{[t.simpleString() for t in types]}, but the key of {self.right.name!r} has "
                f"{theirs}; cast it, for example 'cast({self.foreign_key[0]} as {theirs[0]})'"
            )
        self.projection()

    def describe(self) -> str:
        by = ", ".join(self.foreign_key)
        return f"{self.left.name}, each row with the row of {self.right.name} that {by} refers to."
