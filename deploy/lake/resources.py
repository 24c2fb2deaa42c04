"""The warehouse and Spark of all code locations, from the environment. Credentials are not among them:
Spark, fsspec and deltalake read those from the environment themselves, so Dagster never shows one."""

import os
from typing import Any

from vt_dagster import SparkResource, WarehouseResource, build_resources

_OF_SPARK = {
    "AWS_ENDPOINT_URL": "spark.hadoop.fs.s3a.endpoint",
    "LAKE_METASTORE": "spark.hadoop.hive.metastore.uris",
    "LAKE_DRIVER_MEMORY": "spark.driver.memory",
}
"""Settings of a Spark in the run's own pod, by variable; a Spark Connect server has its own."""


def resources() -> dict[str, Any]:
    """Returns the resources; with VT_DAGSTER_SPARK, runs use that Spark Connect server."""
    conf = {
        name: os.environ[variable] for variable, name in _OF_SPARK.items() if variable in os.environ
    }
    if "AWS_ENDPOINT_URL" in os.environ:
        conf["spark.hadoop.fs.s3a.path.style.access"] = "true"
    if "LAKE_METASTORE" in os.environ:
        conf["spark.sql.catalogImplementation"] = "hive"
    warehouse = WarehouseResource(
        path=os.environ["LAKE_WAREHOUSE"], catalog=os.environ.get("LAKE_CATALOG")
    )
    return build_resources(warehouse, SparkResource(spark_config=conf))
