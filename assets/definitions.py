"""The code location of the worked example; ``workspace.yaml`` points here."""

from __future__ import annotations

import dagster as dg

from assets.topology import flights_with_weather, planes
from resources import spark, warehouse
from vt_dagster import build_definitions

main = dg.define_asset_job("main", description="Takes what has landed and joins it.")
hourly = dg.ScheduleDefinition(name="hourly", job=main, cron_schedule="0 * * * *")

defs = dg.Definitions.merge(
    build_definitions(flights_with_weather, planes, warehouse=warehouse, spark=spark),
    dg.Definitions(jobs=[main], schedules=[hourly]),
)
