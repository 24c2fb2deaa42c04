"""The operators of a topology: each makes a stream or table from others and is checked on construction.

The fluent methods of ``vt_dagster.topology.model`` build them. They are public so that tools can
inspect a topology.
"""

from vt_dagster.topology.node import Emit, Operator
from vt_dagster.topology.operators.base import Materialized
from vt_dagster.topology.operators.corrected_join import CorrectedJoin
from vt_dagster.topology.operators.corrected_stream_join import CorrectedStreamJoin
from vt_dagster.topology.operators.filter import Filter
from vt_dagster.topology.operators.flat_map_values import FlatMapValues
from vt_dagster.topology.operators.foreign_key_join import ForeignKeyJoin
from vt_dagster.topology.operators.history_join import HistoryJoin
from vt_dagster.topology.operators.join import JoinKind
from vt_dagster.topology.operators.map_values import MapValues
from vt_dagster.topology.operators.merge import Merge
from vt_dagster.topology.operators.select_key import SelectKey
from vt_dagster.topology.operators.stream_aggregate import StreamAggregate
from vt_dagster.topology.operators.stream_stream_join import StreamStreamJoin
from vt_dagster.topology.operators.stream_table_join import StreamTableJoin
from vt_dagster.topology.operators.suppress import (
    Limit,
    Suppress,
    UntilTimeLimit,
    UntilWindowCloses,
    WhenFull,
)
from vt_dagster.topology.operators.table_aggregate import Aggregator, Row, TableAggregate
from vt_dagster.topology.operators.table_table_join import TableTableJoin
from vt_dagster.topology.operators.to_stream import ToStream
from vt_dagster.topology.operators.to_table import ToTable
from vt_dagster.topology.operators.windowed_aggregate import WindowedAggregate

__all__ = [
    "Aggregator",
    "CorrectedJoin",
    "CorrectedStreamJoin",
    "Emit",
    "Filter",
    "FlatMapValues",
    "ForeignKeyJoin",
    "HistoryJoin",
    "JoinKind",
    "Limit",
    "MapValues",
    "Materialized",
    "Merge",
    "Operator",
    "Row",
    "SelectKey",
    "StreamAggregate",
    "StreamStreamJoin",
    "StreamTableJoin",
    "Suppress",
    "TableAggregate",
    "TableTableJoin",
    "ToStream",
    "ToTable",
    "UntilTimeLimit",
    "UntilWindowCloses",
    "WhenFull",
    "WindowedAggregate",
]
