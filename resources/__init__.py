"""The resources of the worked example: a local Spark and a warehouse under ``data/``."""

from __future__ import annotations

import os
from pathlib import Path

from vt_dagster import SparkResource, WarehouseResource

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("VT_DAGSTER_DATA") or ROOT / "data")
LANDING = DATA / "landing"

warehouse = WarehouseResource(path=os.environ.get("VT_DAGSTER_WAREHOUSE") or str(DATA / "warehouse"))
spark = SparkResource(master=os.environ.get("SPARK_MASTER") or "local[*]")
