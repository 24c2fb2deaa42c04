"""A table whose records a Python function returns, in a job that other processes can load."""

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import pandas as pd

from tests.market import RECORD
from tests.test_executor import FORK_SERVER
from vt_dagster import SparkResource, build_definitions, versioned_table
from vt_dagster.storage.asset_store import AssetStore


@dg.asset
def raw() -> pd.DataFrame:
    return pd.DataFrame({"k": ["a", "b"], "v": ["1", "2"], "at": [datetime(2024, 1, 1)] * 2})


@versioned_table(key="k", schema=RECORD, timestamp="at", history_retention=timedelta(days=30))
def rates(raw: pd.DataFrame) -> pd.DataFrame:
    with (Path(os.environ["ROOT"]) / "calls").open("a") as calls:
        calls.write("called\n")
    return raw


def job_of(root: str, parent: int, fatal: bool) -> dg.JobDefinition:
    """A job whose steps run in this process; if ``fatal``, each step runs in its own process. Then the
    process of the table's step is killed after its commit; the process ``parent`` is not."""
    os.environ["ROOT"] = root
    executor: dg.ExecutorDefinition = dg.in_process_executor
    if fatal:
        executor = dg.multiprocess_executor.configured(FORK_SERVER)
        if parent != os.getpid():
            AssetStore.remove_staged_before = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    ours = build_definitions(
        rates, warehouse=f"{root}/warehouse", spark=SparkResource(master="local[2]")
    )
    every = dg.define_asset_job("main", selection="*", executor_def=executor)
    theirs = dg.Definitions(assets=[raw], jobs=[every])
    return dg.Definitions.merge(ours, theirs).resolve_job_def("main")
