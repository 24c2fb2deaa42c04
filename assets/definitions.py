"""The code location of the worked example; ``workspace.yaml`` points here."""

from __future__ import annotations

import dagster as dg

from assets.grace import flights_with_weather_graph
from assets.topology import PUBLISHED
from resources import spark, warehouse
from vt_dagster import build_definitions, build_maintenance

main = dg.define_asset_job(
    "main", description="Takes what has landed and brings all tables up to date."
)
hourly = dg.ScheduleDefinition(name="hourly", job=main, cron_schedule="0 * * * *")

defs = dg.Definitions.merge(
    build_definitions(
        *PUBLISHED, warehouse=warehouse, spark=spark, graph_assets=[flights_with_weather_graph]
    ),
    build_maintenance(),
    dg.Definitions(jobs=[main], schedules=[hourly], executor=dg.in_process_executor),
)
