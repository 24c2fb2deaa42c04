"""Runs assets of the topology in processes that kill themselves at a named point: ``[ADDRESS ROOT ASSET
POINT]…``. If the point names ``purge``, the process erases the key ``b`` from the asset instead. If
ADDRESS is a Spark Connect server, the queries run there and continue after the process is killed. If
it is ``local``, Spark dies with the process. Each process is a fork of this one, which has all imports.

A point is ``before:FUNCTION`` or ``after:FUNCTION``; ``during:FUNCTION`` kills the process some
milliseconds after the function begins.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pyspark.sql.connect.session  # noqa: F401  # pyright: ignore[reportUnusedImport]
from pyspark.sql import SparkSession

from tests.storage.topology import Topology
from vt_dagster.runs.erase import erase
from vt_dagster.spark.session import build_session
from vt_dagster.storage import parquet, rewrite
from vt_dagster.storage.asset_store import AssetStore


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_soon() -> None:
    time.sleep(0.15)
    die()


def arm(owner: Any, name: str, when: str, matches: Any) -> None:
    original = getattr(owner, name)

    def armed(*args: Any, **kwargs: Any) -> Any:
        if not matches(*args, **kwargs):
            return original(*args, **kwargs)
        if when == "before":
            die()
        if when == "during":
            threading.Thread(target=die_soon, daemon=True).start()
        result = original(*args, **kwargs)
        die()
        return result

    setattr(owner, name, armed)


def session(remote: str | None) -> SparkSession:
    if remote is not None:
        return build_session("crash", remote=remote)
    return build_session("crash", master="local[1]", conf={"spark.sql.shuffle.partitions": "1"})


def run(address: str, root: str, asset: str, point: str) -> None:
    when, function = point.split(":")
    if function in ("log", "view", "quarantine"):
        arm(parquet, "write", when, lambda rows, path, **_: path.endswith(function))
    elif function == "purge":
        arm(rewrite, function, when, lambda *_: True)
    else:
        arm(AssetStore, function, when, lambda *_, **__: True)
    spark = session(None if address == "local" else address)
    topology = Topology(Path(root))
    if function == "purge":
        node, about = getattr(topology, asset), {"key": ["b"], "among": topology.nodes}
        erase(topology.warehouse, node, spark, reason="asked to", **about)
    else:
        topology.run(asset, spark)


def killed(run: Callable[..., None]) -> None:
    """Runs each case of the command line in a fork of this process, which must be killed.

    Args:
        run: the function that runs a case; it takes each word of the case as one argument.
    """
    words, told = len(signature(run).parameters), sys.argv[1:]
    for case in (told[n : n + words] for n in range(0, len(told), words)):
        child = os.fork()
        if child == 0:
            try:
                run(*case)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"{case[1:]} was not killed: {status}")


if __name__ == "__main__":
    killed(run)
