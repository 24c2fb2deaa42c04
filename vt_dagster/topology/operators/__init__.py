"""The operators of a topology: each makes a stream or table from others and is checked on construction.

The fluent methods of ``vt_dagster.topology.model`` build them. They are public so that tools can
inspect a topology.
"""

from vt_dagster.topology.node import Emit, Operator
from vt_dagster.topology.operators.aggregates import Aggregator, Row, StreamAggregate, TableAggregate
from vt_dagster.topology.operators.base import JoinKind, Materialized
from vt_dagster.topology.operators.row_operators import (
    Filter,
    FlatMapValues,
    MapValues,
    Merge,
    SelectKey,
    ToStream,
    ToTable,
)
from vt_dagster.topology.operators.stream_stream_join import CorrectedStreamJoin, StreamStreamJoin
from vt_dagster.topology.operators.stream_table_join import CorrectedJoin, StreamTableJoin
from vt_dagster.topology.operators.suppress import (
    Limit,
    Suppress,
    UntilTimeLimit,
    UntilWindowCloses,
    WhenFull,
)
from vt_dagster.topology.operators.table_joins import ForeignKeyJoin, HistoryJoin, TableTableJoin
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
