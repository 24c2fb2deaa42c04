"""Dagster types of values between ops: Spark DataFrames with their required columns."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import dagster as dg

from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
)
from vt_dagster.core.log_columns import log_columns
from vt_dagster.runs.gate import misfits
from vt_dagster.runs.pin import Arrival
from vt_dagster.runs.run import Results
from vt_dagster.topology.model import Stream


def _is_frame(value: Any) -> bool:
    """A Spark DataFrame, classic or of Spark Connect."""
    return hasattr(value, "schema") and hasattr(value, "sparkSession")


RESULTS = (TIMESTAMP, PARTITION, IS_TOMBSTONE, ARRIVAL, OUTCOME)
"""Columns that rows before the commit have in addition to their schema."""


def misfit(node: Stream, what: str, more: tuple[str, ...], value: Any) -> str | None:
    """Returns the problems of a DataFrame before the commit of a stream or table; None = no problem."""
    if not _is_frame(value):
        return (
            f"expected a Spark DataFrame with {what} of {node.name!r}, got "
            f"{type(value).__module__}.{type(value).__qualname__}; return the Spark DataFrame "
            "itself from the op before"
        )
    problems = misfits(value, node.schema, more)
    if not problems:
        return None
    return (
        f"expected {what} of {node.name!r}: {'; '.join(problems)}; correct the op before, or the "
        "asset's schema"
    )


def _frame_type(node: Stream, what: str, more: tuple[str, ...], meaning: str) -> dg.DagsterType:
    def check(_: Any, value: Any) -> dg.TypeCheck:
        wrong = misfit(node, what, more, value)
        return dg.TypeCheck(success=wrong is None, description=wrong)

    columns = [
        dg.TableColumn(f.name, f.dataType.simpleString(), description=None) for f in node.schema.fields
    ]
    return dg.DagsterType(
        check,
        name=f"{node.name}_{what}",
        description=f"{meaning} Columns: those of {node.name!r}, {', '.join(more)}.",
        metadata={"dagster/column_schema": dg.TableSchema(columns=columns)},
    )


@cache
def records_type(node: Stream) -> dg.DagsterType:
    """Records of a source as read: the node's columns, timestamp, order of arrival."""
    return _frame_type(node, "records", RESULTS, "Records as read, without an outcome.")


@cache
def considered_type(node: Stream) -> dg.DagsterType:
    """A source's records with their outcomes: applied, late, quarantined."""
    return _frame_type(node, "considered", RESULTS, "Records with their outcomes in this run.")


@cache
def log_type(node: Stream) -> dg.DagsterType:
    """Log rows of a stream or table that are the input of a run."""
    return _frame_type(node, "log", tuple(log_columns(node)), "Log rows that a run takes.")


@cache
def results_type(node: Stream) -> dg.DagsterType:
    """The results of an operator's run with their outcomes, before the commit."""
    frame = _frame_type(
        node,
        "results",
        RESULTS,
        "An operator's results, and its state for the next run.",
    )

    def check(context: Any, value: Any) -> dg.TypeCheck:
        if not isinstance(value, Results):
            return dg.TypeCheck(
                success=False,
                description=f"expected the Results of {node.name!r}, got "
                f"{type(value).__module__}.{type(value).__qualname__}; return "
                "vt_dagster.runs.run.Results(rows, known) from the op before",
            )
        return cast(dg.TypeCheck, frame.type_check(context, value.rows))

    return dg.DagsterType(
        check, name=f"{node.name}_results", description=frame.description, metadata=frame.metadata
    )


ArrivalType = dg.DagsterType(
    lambda _, value: isinstance(value, Arrival),
    name="Arrival",
    description="The input of one run: files or offset ranges, pinned when it starts.",
    typing_type=Arrival,
)
