"""A table of what a function returns, as a job that processes can load: ``ROOT`` says where."""

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

import dagster as dg
import pandas as pd

from tests.market import RECORD
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


def _job(executor: dg.ExecutorDefinition) -> dg.JobDefinition:
    root = Path(os.environ["ROOT"])
    ours = build_definitions(
        rates, warehouse=str(root / "warehouse"), spark=SparkResource(master="local[2]")
    )
    every = dg.define_asset_job("main", selection="*", executor_def=executor)
    theirs = dg.Definitions(assets=[raw], jobs=[every])
    return dg.Definitions.merge(ours, theirs).resolve_job_def("main")


def spread() -> dg.JobDefinition:
    """A process a step; with ``DIE``, a process that lives on, the table's ends after its commit."""
    if os.environ.get("DIE") not in (None, str(os.getpid())):
        AssetStore.forget = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    return _job(dg.multiprocess_executor)


def here() -> dg.JobDefinition:
    """All in this process."""
    return _job(dg.in_process_executor)
