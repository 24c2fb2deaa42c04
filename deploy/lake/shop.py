"""The code location of the shop: it has the sources."""

import dagster as dg

from lake.resources import resources
from lake.tables import orders, prices
from vt_dagster import build_asset, build_checks, build_sensor

nodes = [prices, orders]

defs = dg.Definitions(
    assets=[build_asset(node, pool=f"write_{node.name}") for node in nodes],
    asset_checks=[build_checks(node) for node in nodes],
    sensors=[build_sensor(node) for node in nodes],
    resources=resources(),
)
