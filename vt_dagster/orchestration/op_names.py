"""The names of the ops that make a stream or table: those of ``vt_dagster.ops``."""

from __future__ import annotations

from vt_dagster.core.processor_registry import PROCESSORS, processor_of
from vt_dagster.topology.model import Stream

KINDS = {
    word: tuple(kind.__name__ for kind in PROCESSORS if word in kind.words())
    for word in sorted({word for kind in PROCESSORS for word in kind.words()})
}
"""Op names of operators, each with the operator classes of that name."""


def steps_of(node: Stream) -> tuple[str, ...]:
    """Returns the ops that together do what the single op of ``build_asset`` does, in order."""
    if node.operator is None:
        return ("read_op", "put_op", "write_op")
    buffer = ("grace_buffer_op",) if processor_of(node).has_grace_buffer else ()
    return ("read_logs_op", *buffer, f"{node.operator.word}_op", "write_op")
