"""Runs the deployment's code locations in a process with its own Spark, as in a pod: see
``test_lake_on_s3.py``. A line of input names assets to run at the same time; a line of output has
their errors."""

from __future__ import annotations

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import dagster as dg

from tests.market import QUIET, messages
from vt_dagster.spark.session import build_session


def run(locations: list[Any], name: str) -> str:
    """Runs an asset; returns its errors."""
    key = dg.AssetKey(name)
    (found,) = [one for one in locations for asset in one.assets if asset.key == key]
    checks = [one for one in found.asset_checks if {k.asset_key for k in one.check_keys} == {key}]
    result = dg.materialize(
        [*(asset for asset in found.assets if asset.key == key), *checks],
        resources=found.resources,
        run_config=QUIET,
        raise_on_error=False,
    )
    return messages(result)


def main() -> None:
    locations = [importlib.import_module(f"lake.{name}").defs for name in ("shop", "reports")]
    resource = locations[0].resources["vt_dagster_spark"]
    build_session(conf=resource.spark_config)
    with ThreadPoolExecutor(2) as pool:
        for line in sys.stdin:
            print(json.dumps([*pool.map(partial(run, locations), json.loads(line))]), flush=True)


if __name__ == "__main__":
    main()
