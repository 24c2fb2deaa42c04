"""A Spark server that keeps running: runs connect to it, and need no Java."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.conftest import ROOT, ConnectServer, server_environment, spark_command
from tests.market import Market, record
from vt_dagster import SparkResource
from vt_dagster.cli import app
from vt_dagster.errors import SparkUnavailableError
from vt_dagster.orchestration.resources import session_of
from vt_dagster.spark import server

KILLS = """
import os, signal, time
from vt_dagster.storage.asset_store import AssetStore

commit = AssetStore.commit
def after_its_server(*given):
    os.kill({pid}, signal.SIGKILL)
    time.sleep(1)
    return commit(*given)
AssetStore.commit = after_its_server
"""
WATCHES = """
import contextlib
from pyspark.sql.connect.client import SparkConnectClient
from vt_dagster.spark import settings as module

requests, config, settings = [], SparkConnectClient.config, module.settings
SparkConnectClient.config = lambda client, one: requests.append(one) or config(client, one)

@contextlib.contextmanager
def watched(spark, values):
    now = lambda: {key: spark.conf.get(key, None) for key in values}
    before, context = now(), settings(spark, values)
    requests.clear()
    context.__enter__()
    count, inside = len(requests), now()
    try:
        yield
    finally:
        requests.clear()
        context.__exit__(None, None, None)
        print("settings:", inside == values, count, len(requests), now() == before, flush=True)
module.settings = watched
"""
RUN = """
import os, sys
from pathlib import Path
import dagster as dg
import pyspark.sql.connect.session
from tests.market import Market, messages
from vt_dagster import SparkResource, build_asset, build_resources

market = Market(Path(sys.argv[1]), None)
for remotes in sys.argv[2:]:
    if os.fork() == 0:
        for remote in remotes.split("|"):
            resources = build_resources(str(market.warehouse), SparkResource(remote=remote or None))
            made = [build_asset(market.prices)]
            result = dg.materialize(made, resources=resources, raise_on_error=False)
            print(messages(result) or "done", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who has the jars. A server left by the test is stopped at the end."""
    made = {**server_environment(tmp_path), "COLUMNS": "80"}
    yield made
    if (tmp_path / "cache" / "vt_dagster" / "spark" / "server.json").exists():
        spark_command(made, "stop")


def run_on(environment: dict[str, str], root: Path, *remotes: str, before: str = "") -> str:
    """Runs an asset in one process for each of ``remotes``, and returns the output.
    ``"sc://one|sc://other"`` runs it on both servers, one after the other; ``""`` is no remote."""
    without_java = {"JAVA_HOME": "/there/is/none", "SPARK_CONNECT_AUTHENTICATE_TOKEN": ""}
    done = subprocess.run(
        [sys.executable, "-c", before + RUN, str(root), *remotes],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**environment, **without_java},
    )
    return done.stdout + done.stderr


def status(environment: dict[str, str]) -> tuple[int, str]:
    """Returns exit status and output of ``vt-dagster spark status``, run in this process."""
    done = CliRunner().invoke(app, ["spark", "status"], env=environment)
    return done.exit_code, done.output


def test_commands_without_server(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert status(environment) == (1, "no Spark server is running\n")
    stopped = CliRunner().invoke(app, ["spark", "stop"], env=environment)
    assert (stopped.exit_code, stopped.output) == (0, "no Spark server was running\n")
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    with pytest.raises(SparkUnavailableError, match="start it: vt-dagster spark start"):
        session_of(SparkResource(remote="server"))
    for value in ("localhost:15002", "Server", "local[2]"):
        monkeypatch.setenv("VT_DAGSTER_SPARK", value)
        with pytest.raises(SparkUnavailableError, match="Expected VT_DAGSTER_SPARK to be 'server' or"):
            session_of(SparkResource())


@pytest.mark.timeout(600)
def test_runs_use_running_server(
    connect_server: ConnectServer, tmp_path: Path, spark: SparkSession
) -> None:
    """The fixture starts the server with ``vt-dagster spark start``, and stops it."""
    environment = {**connect_server.environment, "COLUMNS": "80"}
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"), record("b", "q1", "1 01:00"))
    assert status(environment)[0] == 0
    again = CliRunner().invoke(app, ["spark", "start"], env=environment)
    assert again.exit_code == 0
    assert "was already running" in again.output
    cache = Path(environment["XDG_CACHE_HOME"]) / "vt_dagster" / "spark"
    assert cache.stat().st_mode & 0o777 == 0o700
    for kind in ("json", "conf"):
        assert (cache / f"server.{kind}").stat().st_mode & 0o777 == 0o600, "they have the token"

    without_token = connect_server.address.partition("/;")[0]
    named = {**environment, "VT_DAGSTER_SPARK": "server"}
    said = run_on(named, tmp_path, f"{without_token}|", before=WATCHES)
    changes = set(re.findall("settings: (.*)", said))
    assert changes == {"True 2 2 True", "True 0 0 True"}, "to read all and to set; to set and to unset"
    refused, done, _ = said.partition("done\n")
    assert "Expected a Spark session on sc://localhost" in refused, "nobody without the token"
    assert "got: UNAUTHENTICATED: " in refused
    assert done, "the refused session is not that of the next run of its process"
    assert connect_server.address.partition("token=")[2] not in said
    rows = market.store(market.prices).read("log").collect()
    assert sorted(row["v"] for row in rows) == ["p1", "q1"]


@pytest.mark.endurance
def test_server_killed_during_run(
    environment: dict[str, str], tmp_path: Path, spark: SparkSession
) -> None:
    """A run fails soon if its server is killed. Without that, Spark's client would retry for ten
    minutes, and once more to release rows."""
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    code, started = spark_command(environment, "start", "--master", "local[2]")
    assert code == 0, started
    found = re.search(r"process (\d+) ", started)
    assert found is not None
    at = time.monotonic()
    said = run_on(environment, tmp_path, "server", before=KILLS.format(pid=found[1]))
    assert "to answer, but it has ended" in said
    assert "vt-dagster spark start" in said
    assert time.monotonic() - at < 120
    assert market.store(market.prices).head() is None
    assert status(environment) == (1, "no Spark server is running\n")
    code, started = spark_command(environment, "start", "--master", "local[2]")
    assert code == 0, started
    assert "done" in run_on(environment, tmp_path, "server")
    assert market.store(market.prices).read("log").count() == 1


@pytest.mark.jvm
def test_failed_start_is_explained(environment: dict[str, str]) -> None:
    code, said = spark_command(environment, "start", "--master", "local[0]")
    assert code == 2
    assert "Expected a Spark server on local[0] to start, got:" in said
    assert "server.log" in said
    assert status(environment)[0] == 1
    for conf in ("spark.driver.memory", "=4g"):
        wrong = CliRunner().invoke(app, ["spark", "start", "--conf", conf])
        assert str(wrong.exception) == f"Expected --conf name=value, got {conf!r}."


def test_starting_server_counts_as_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own process counts as running while it starts, whatever ``ps`` shows: ``ps`` may
    show no command of a process during ``exec``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listens = f"import socket, time; time.sleep(0.5); s = socket.create_server(('127.0.0.1', {port}))"
    log = tmp_path / "log"
    log.write_text("Error: nothing\n")
    monkeypatch.setattr(server, "check_connect", lambda address: None)
    process = subprocess.Popen([sys.executable, "-c", f"{listens}; time.sleep(60)"])
    try:
        made = server.Server(process.pid, port, "token", "local", str(log))
        assert not made.alive, "its command is not that of a server"
        server._wait_for_answer(made, process)  # pyright: ignore[reportPrivateUsage]
    finally:
        process.kill()
        process.wait()
    with pytest.raises(SparkUnavailableError, match="Error: nothing"):
        server._wait_for_answer(made, process)  # pyright: ignore[reportPrivateUsage]
