"""``flights_with_weather`` as a graph: each step of its run is an op, and one more op reports the
records in the grace buffer."""

from typing import Any

import dagster as dg
from pyspark.sql import functions as F

from assets.topology import flights_with_weather
from vt_dagster import ops
from vt_dagster.columns import TIMESTAMP

read = ops.read_logs_op(flights_with_weather)
buffer = ops.grace_buffer_op(flights_with_weather)
join = ops.stream_table_join_op(flights_with_weather)
write = ops.write_op(flights_with_weather)


@dg.op(out=dg.Out(io_manager_key=ops.OP_MEMORY))
def waiting_by_airport(context: dg.OpExecutionContext, waiting: Any) -> Any:
    """Logs how many flights wait at each airport, and since when; returns them unchanged."""
    oldest = F.date_format(F.min(TIMESTAMP), "yyyy-MM-dd HH:mm").alias("oldest")
    found = waiting.groupBy("origin").agg(F.count("*").alias("flights"), oldest).orderBy("origin")
    rows = [dg.TableRecord(row.asDict()) for row in found.collect()]
    if rows:
        context.add_output_metadata({"waiting": dg.MetadataValue.table(rows)})
    return waiting


@dg.graph_asset(**ops.graph_arguments(flights_with_weather))
def flights_with_weather_graph(after_flights: Any, after_weather: Any) -> Any:
    """Reads the flights that are new; those whose time has passed are joined, the others wait."""
    flights, arrival = read(after_flights=after_flights, after_weather=after_weather)
    released, waiting = buffer(flights=flights, arrival=arrival)
    joined = join(released=released, waiting=waiting_by_airport(waiting), arrival=arrival)
    return write(joined, arrival)
