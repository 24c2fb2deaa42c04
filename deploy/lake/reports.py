"""The code location of another team. It joins tables of the shop, whose assets are not its own: their
keys connect the lineage across code locations."""

import dagster as dg

from lake.resources import resources
from lake.tables import priced_orders
from vt_dagster import build_asset, build_checks

defs = dg.Definitions(
    assets=[
        build_asset(
            priced_orders,
            pool=f"write_{priced_orders.name}",
            automation_condition=dg.AutomationCondition.eager(),
        )
    ],
    asset_checks=[build_checks(priced_orders)],
    resources=resources(),
)
