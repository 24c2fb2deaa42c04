"""Foreign-key join: each row of a table joined with the row of another table that it references."""

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
    """Each row of a table joined with the row of another table that it references (KIP-914, KIP-213).

    Changes of both sides trigger: a change of a right row emits one result for each left row that
    references it. The result has the left key.

    Late: a change that is out of order for its key in a versioned side is dropped and counted. Null
    key: a table has none; a left row without a foreign key emits nothing (inner; dropped and counted if
    it had none before either) or is kept unmatched (left). Tombstone: on the left, a tombstone
    if there was a row (inner: with a foreign key); on the right, for each row that references it, a
    tombstone (inner) or the unmatched row (left), again for each repeated tombstone.

    Args:
        kind: ``inner`` or ``left``.
        foreign_key: SQL expressions over the left columns, one per column of the right key. A row with
            a null in any of them references nothing.
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
                    f"{self.name}: the foreign key {expression!r} names a side of the join, but can "
                    f"only use columns of {self.left.name!r}; remove the prefix 'left.' or 'right.'"
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
        return f"{self.left.name}, each row with the row of {self.right.name} that {by} references."
