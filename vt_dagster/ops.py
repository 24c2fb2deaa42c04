"""The ops that assets are made of, for graphs of your own; see ``vt_dagster.orchestration.ops``."""

from vt_dagster.orchestration.ops import (
    OP_MEMORY,
    TABLES,
    Results,
    maintenance_op,
    operate_op,
    publish_op,
    put_op,
    read_logs_op,
    read_op,
    write_op,
)
from vt_dagster.orchestration.run_config import FilesConfig, TopicsConfig

__all__ = [
    "OP_MEMORY",
    "TABLES",
    "FilesConfig",
    "Results",
    "TopicsConfig",
    "maintenance_op",
    "operate_op",
    "publish_op",
    "put_op",
    "read_logs_op",
    "read_op",
    "write_op",
]
