"""Which ops a stream or table is made by, by name: the words of ``vt_dagster.ops``."""

from __future__ import annotations

import re

from vt_dagster.core.processors import PROCESSORS
from vt_dagster.topology import operators as of
from vt_dagster.topology.model import Stream

_SHORT: dict[type[of.Operator], str] = {
    of.StreamStreamJoin: "stream_join",
    of.TableTableJoin: "table_join",
    of.StreamAggregate: "aggregate",
    of.TableAggregate: "aggregate",
}
"""Operators whose op does not have the name of their class: what is aggregated, the input says."""
FILTER_NOT = "filter_not"


def word_of(kind: type[of.Operator]) -> str:
    """The name of a kind of operator, for example ``stream_table_join``."""
    return _SHORT.get(kind) or re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def operator_word(operator: of.Operator) -> str:
    """The name of one operator: a filter may be a ``filter_not``."""
    if isinstance(operator, of.Filter) and operator.negate:
        return FILTER_NOT
    return word_of(type(operator))


KINDS: dict[str, tuple[type[of.Operator], ...]] = {
    word: tuple(kind for kind in PROCESSORS if word_of(kind) == word)
    for word in dict.fromkeys(word_of(kind) for kind in PROCESSORS)
} | {FILTER_NOT: (of.Filter,)}
"""Of each name the operators that have it."""


def has_grace_buffer(node: Stream) -> bool:
    """Whether records of a join wait: it has a grace period of more than nothing."""
    return isinstance(node.operator, of.StreamTableJoin) and node.operator.waits


def steps_of(node: Stream) -> tuple[str, ...]:
    """The ops that do what the one op of ``build_asset`` does, in their order."""
    if node.operator is None:
        return ("read_op", "put_op", "write_op")
    buffer = ("grace_buffer_op",) if has_grace_buffer(node) else ()
    return ("read_logs_op", *buffer, f"{operator_word(node.operator)}_op", "write_op")
