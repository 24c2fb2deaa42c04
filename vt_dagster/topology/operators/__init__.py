"""What makes a stream or table out of others. Each operator is checked when it is made.

The fluent methods of ``vt_dagster.topology.model`` make these; they are public for whoever wants to
look at a topology.
"""

from vt_dagster.topology.operators.aggregates import Aggregator, Row, TableAggregate, WindowedAggregate
from vt_dagster.topology.operators.base import Emit, Materialized, Operator
from vt_dagster.topology.operators.joins import (
    ForeignKeyJoin,
    JoinKind,
    StreamTableJoin,
    TableTableJoin,
)
from vt_dagster.topology.operators.suppress import (
    Limit,
    Suppress,
    UntilTimeLimit,
    UntilWindowCloses,
    WhenFull,
    is_session,
    is_sliding,
)
from vt_dagster.topology.operators.transform import Filter, MapValues, ToStream, ToTable

__all__ = [
    "Aggregator",
    "Emit",
    "Filter",
    "ForeignKeyJoin",
    "JoinKind",
    "Limit",
    "MapValues",
    "Materialized",
    "Operator",
    "Row",
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
    "is_session",
    "is_sliding",
]
