"""An op for each operator, by its name: ``filter_op``, ``stream_table_join_op``, ``suppress_op`` …

All are generated from the list of operators. Call one with the stream or table that the operator makes,
as in ``filter_op(cheap)``; it returns an op ``(one DataFrame for each log, arrival) -> results``.
Inputs and output have the Dagster types of their nodes; ``results`` are :class:`Results`. The grace
period of a join is a separate step, :func:`grace_buffer_op`: the join then takes the released and the
waiting records.
"""

from typing import Any, Protocol

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import OUTCOME
from vt_dagster.core.arrival_order import Outcome, union
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import TopologyError
from vt_dagster.orchestration.dagster_types import ArrivalType, considered_type, log_type, results_type
from vt_dagster.orchestration.op_names import KINDS, steps_of
from vt_dagster.orchestration.resources import PREFIX, keys_of, stores_for
from vt_dagster.runs.run import Results, Run
from vt_dagster.topology.model import Stream
from vt_dagster.topology.operators import Operator

OP_MEMORY = "vt_dagster_op_memory"
"""Resource key of the IO manager between ops."""
_RELEASED, _WAITING = "released", "waiting"


class OperatorOp(Protocol):
    """Makes the op of a stream or table that is the result of one kind of operator.

    Args:
        node: the operator's result.
        name: of the op; None = ``<operator>_<node>``.
        resource_prefix: prefix of its resource keys.

    Raises:
        TopologyError: the node is a source, or the result of another operator.
    """

    def __call__(
        self, node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
    ) -> dg.OpDefinition: ...


def _op_of(word: str) -> OperatorOp:
    def make(
        node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
    ) -> dg.OpDefinition:
        _require(node, f"{word}_op")
        return _operate(node, name or f"{word}_{node.name}", resource_prefix)

    make.__name__ = make.__qualname__ = f"{word}_op"
    make.__doc__ = f"Op of the result of a {' or '.join(KINDS[word])}. {OperatorOp.__doc__}"
    return make


_OPS = {word: _op_of(word) for word in KINDS}

aggregate_op = _OPS["aggregate"]
"""``group_by(…).aggregate(…)`` of a table or a stream, without windows."""
corrected_join_op = _OPS["corrected_join"]
"""A stream-table join that corrects its rows when late records of the table arrive
(``corrected_for``)."""
corrected_stream_join_op = _OPS["corrected_stream_join"]
"""A stream-stream join that corrects its rows when late records arrive (``corrected_for``)."""
filter_op = _OPS["filter"]
"""``filter``: the rows for which a condition holds."""
filter_not_op = _OPS["filter_not"]
"""``filter_not``: the rows for which a condition does not hold."""
flat_map_values_op = _OPS["flat_map_values"]
"""``flat_map_values``: any number of records for each record of a stream."""
foreign_key_join_op = _OPS["foreign_key_join"]
"""Two tables joined by a foreign key."""
history_join_op = _OPS["history_join"]
"""Two versioned tables joined at all times of their history."""
map_values_op = _OPS["map_values"]
"""``map_values``: the same rows with other columns."""
merge_op = _OPS["merge"]
"""``merge``: the records of several streams."""
select_key_op = _OPS["select_key"]
"""``select_key``: the records of a stream with another key."""
stream_join_op = _OPS["stream_join"]
"""Two streams joined within a time window."""
stream_table_join_op = _OPS["stream_table_join"]
"""A stream joined with a table; with a grace period, its input is the output of ``grace_buffer_op``."""
suppress_op = _OPS["suppress"]
"""``suppress``: updates held back until a time limit, or until their window closes."""
table_join_op = _OPS["table_join"]
"""Two tables joined by their keys."""
to_stream_op = _OPS["to_stream"]
"""``to_stream``: the changes of a table."""
to_table_op = _OPS["to_table"]
"""``to_table``: the table of a stream's records."""
windowed_aggregate_op = _OPS["windowed_aggregate"]
"""A stream aggregated by window: tumbling, hopping, sliding or session."""


def grace_buffer_op(
    node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
) -> dg.OpDefinition:
    """Op ``(one DataFrame for each log, arrival) -> (released, waiting)``: the grace period of a join.

    Both outputs are records of the stream with ``_outcome``, computed once and held until the commit.
    Ops in between may read them, but must pass both to the join unchanged.

    - ``released``: records that are final in this run: ``applied`` (timestamp <= stream time - grace at
      the run's end), ``late`` (timestamp < stream time - grace on arrival: they did not wait) and
      ``dropped`` (tombstones, and in an inner join records without a key). For a corrected join
      also records to be joined again, and the changes of the table that require it.
    - ``waiting``: records of this run and earlier runs that later runs release.

    Args:
        node: the result of a stream-table join or corrected join with a ``grace_period``.
        name: of the op; None = ``grace_buffer_<node>``.

    Raises:
        TopologyError: the node has no grace period, so nothing waits.
    """
    _require(node, "grace_buffer_op")
    consumed = processor_of(node).consumed
    kept = considered_type(consumed[0])

    @dg.op(
        name=name or f"grace_buffer_{node.name}",
        ins={**{up.name: dg.In(log_type(up)) for up in log_nodes(node)}, "arrival": dg.In(ArrivalType)},
        out={
            name: dg.Out(kept, description=meaning, io_manager_key=OP_MEMORY)
            for name, meaning in (
                (_RELEASED, "Records that are final in this run."),
                (_WAITING, "Records that wait for stream time to pass their grace period."),
            )
        },
        description=f"Holds records of {consumed[0].name} back until their grace period is over.",
        required_resource_keys=keys_of(resource_prefix),
    )
    def buffer(context: dg.OpExecutionContext, **given: Any):
        run = Run(given["arrival"], stores_for(context, resource_prefix))
        records = run.buffer([given[up.name] for up in consumed])
        counts = dict(run.arrival.buffered)
        if counts:
            waits = counts.pop(Outcome.WAITING, 0)
            context.add_output_metadata(
                {f"records_{outcome}": n for outcome, n in counts.items()}, _RELEASED
            )
            context.add_output_metadata({"records_waiting": waits}, _WAITING)
            done = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(counts.items())) or "none"
            context.log.info(f"{node.name}: released: {done}; waiting: {waits:,}")
        waits = F.col(OUTCOME) == Outcome.WAITING
        return records.where(~waits), records.where(waits)

    return buffer


def _operate(node: Stream, name: str, prefix: str) -> dg.OpDefinition:
    processor = processor_of(node)
    consumed, buffered = processor.consumed, processor.has_grace_buffer
    if buffered:
        kept = considered_type(consumed[0])
        ins = {_RELEASED: dg.In(kept), _WAITING: dg.In(kept)}
    else:
        ins = {up.name: dg.In(log_type(up)) for up in log_nodes(node)}

    @dg.op(
        name=name,
        ins={**ins, "arrival": dg.In(ArrivalType)},
        out=dg.Out(results_type(node), io_manager_key=OP_MEMORY),
        description=operator_of(node).describe(),
        required_resource_keys=keys_of(prefix),
    )
    def operate(context: dg.OpExecutionContext, **given: Any) -> Results:
        run = Run(given["arrival"], stores_for(context, prefix))
        if buffered:
            return run.join(union(given[_RELEASED], given[_WAITING]))
        read: list[DataFrame] = [given[up.name] for up in consumed]
        return run.operate(read)

    return operate


def operator_of(node: Stream) -> Operator:
    """Returns the operator of a node.

    Raises:
        TopologyError: the node is a source.
    """
    if node.operator is None:
        raise TopologyError(
            f"{node.name}: expected the result of an operator, got a source; read it with read_op"
        )
    return node.operator


def input_nodes(node: Stream) -> tuple[Stream, ...]:
    """What an operator's asset is made of, each once."""
    return tuple({up.name: up for up in operator_of(node).inputs}.values())


def log_nodes(node: Stream) -> tuple[Stream, ...]:
    """Whose logs it consumes, each once."""
    return tuple({up.name: up for up in processor_of(node).consumed}.values())


def _require(node: Stream, op: str) -> None:
    """Refuses an op that is none of the steps of a node."""
    word, steps = operator_of(node).word, steps_of(node)
    if op not in steps:
        raise TopologyError(
            f"{node.name}: expected an op of a {word.replace('_', ' ')}, got {op}; make its graph of "
            f"{' -> '.join(steps)}"
        )
