"""The processor of each operator."""

from __future__ import annotations

from typing import Any

from vt_dagster.core.aggregates import StreamAggregateProcessor, TableAggregateProcessor
from vt_dagster.core.processor import Processor
from vt_dagster.core.row_operators import (
    FilterProcessor,
    FlatMapValuesProcessor,
    MapValuesProcessor,
    MergeProcessor,
    SelectKeyProcessor,
    ToStreamProcessor,
    ToTableProcessor,
)
from vt_dagster.core.source_processor import SourceProcessor
from vt_dagster.core.stream_stream_join import CorrectedStreamJoinProcessor, StreamStreamJoinProcessor
from vt_dagster.core.stream_table_join import CorrectedJoinProcessor, StreamTableJoinProcessor
from vt_dagster.core.suppress import SuppressProcessor
from vt_dagster.core.table_joins import (
    ForeignKeyJoinProcessor,
    HistoryJoinProcessor,
    TableTableJoinProcessor,
)
from vt_dagster.core.windowed_aggregate import WindowedAggregateProcessor
from vt_dagster.topology import operators as of
from vt_dagster.topology.model import Stream

PROCESSORS: dict[type[of.Operator], type[Processor[Any]]] = {
    of.StreamTableJoin: StreamTableJoinProcessor,
    of.CorrectedJoin: CorrectedJoinProcessor,
    of.CorrectedStreamJoin: CorrectedStreamJoinProcessor,
    of.StreamStreamJoin: StreamStreamJoinProcessor,
    of.TableTableJoin: TableTableJoinProcessor,
    of.ForeignKeyJoin: ForeignKeyJoinProcessor,
    of.HistoryJoin: HistoryJoinProcessor,
    of.Filter: FilterProcessor,
    of.MapValues: MapValuesProcessor,
    of.ToTable: ToTableProcessor,
    of.ToStream: ToStreamProcessor,
    of.TableAggregate: TableAggregateProcessor,
    of.Merge: MergeProcessor,
    of.SelectKey: SelectKeyProcessor,
    of.FlatMapValues: FlatMapValuesProcessor,
    of.StreamAggregate: StreamAggregateProcessor,
    of.WindowedAggregate: WindowedAggregateProcessor,
    of.Suppress: SuppressProcessor,
}


def processor_of(node: Stream, single_task: bool = False) -> Processor[Any]:
    """Returns the processor of a node; ``single_task``: see :class:`Processor`."""
    kind = SourceProcessor if node.operator is None else PROCESSORS[type(node.operator)]
    return kind(node, single_task)
