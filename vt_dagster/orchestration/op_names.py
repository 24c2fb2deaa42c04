"""Which ops a stream or table is made by, by name: the words of ``vt_dagster.ops``."""

from __future__ import annotations

from vt_dagster.core.processor_registry import PROCESSORS, processor_of
from vt_dagster.topology.model import Stream

KINDS = {
    word: tuple(kind.__name__ for kind in PROCESSORS if word in kind.words())
    for word in sorted({word for kind in PROCESSORS for word in kind.words()})
}
"""What operators are called, each with the names of the operators that are called so."""


def steps_of(node: Stream) -> tuple[str, ...]:
    """The ops that do what the one op of ``build_asset`` does, in their order."""
    if node.operator is None:
        return ("read_op", "put_op", "write_op")
    buffer = ("grace_buffer_op",) if processor_of(node).has_grace_buffer else ()
    return ("read_logs_op", *buffer, f"{node.operator.word}_op", "write_op")
