"""The files in ``deploy``: the commands, modules, jars and settings that they name exist.

The tests build no image and run no Kubernetes. They check that the programs of the commands know their
options. They start what the containers start: the code locations, and the Spark Connect server behind
TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import pyspark
import pytest
import yaml
from pyspark.sql import SparkSession
from sqlalchemy import make_url
from typer.testing import CliRunner

from tests.conftest import BIN, ROOT, output_of, server_environment
from tests.market import QUIET
from vt_dagster.cli import app
from vt_dagster.errors import SparkUnavailableError
from vt_dagster.spark import server
from vt_dagster.spark.jars import JARS_ENV, resolve_jars

DEPLOY = ROOT / "deploy"
SECRET = re.compile(r"KEY|SECRET|PASSWORD|TOKEN")


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile with their arguments, continued lines joined."""
    lines = [
        line
        for line in (DEPLOY / "Dockerfile").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in found]


def loaded(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def parsed(words: list[str]) -> None:
    """Requires that a command and its options exist in the installed program."""
    program, *rest = words
    until = next((n for n, word in enumerate(rest) if word.startswith("--")), len(rest))
    told = help_of(program, *rest[:until])
    for option in (word.partition("=")[0] for word in rest if word.startswith("--")):
        assert f"{option} " in told, (words, option)


@cache
def help_of(program: str, *command: str) -> str:
    if program == "vt-dagster":
        shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, shown.output
        return shown.output
    return output_of(program, *command, "--help", columns=200)


def test_dockerfile() -> None:
    found = instructions()
    words = [word for word, _ in found]
    (base,) = [rest for word, rest in found if word == "ARG"]
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+(@sha256:[0-9a-f]{64})?", base)
    assert words.index("USER") < words.index("CMD")
    assert [rest for word, rest in found if word == "USER"] == ["1000"]
    for word, rest in found:
        if word == "COPY":
            *sources, _ = shlex.split(rest)
            assert all((ROOT / source).exists() for source in sources), rest
        if word in ("ENV", "ARG"):
            assert not SECRET.search(rest), rest
    ran = [
        shlex.split(part) for word, rest in found if word == "RUN" for part in re.split(r"&&|;", rest)
    ]
    ours = [[w for w in words if "=" not in w or w.startswith("-")] for words in ran]
    ours = [words for words in ours if words[0] == "vt-dagster"]
    assert [words[1] for words in ours] == ["spark", "class-archive"]
    for words in ours:
        parsed(words)
    (_, command) = found[-1]
    parsed(yaml.safe_load(command))
    (hadoop,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    version = hadoop.stem.rpartition("-")[2]
    assert f"org.apache.hadoop:hadoop-aws:{version}" in ours[0], "the version of PySpark's Hadoop"


def test_compose_file(monkeypatch: Any) -> None:
    made = loaded("compose.yaml")
    services = made["services"]
    for name, service in services.items():
        assert re.search(r":\D*\d+\.?\d*", service["image"]), f"{name}: expected a full tag"
        needed = service.get("depends_on", {})
        assert {*needed} <= {*services}
        for other, how in needed.items() if isinstance(needed, dict) else ():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[other], (name, other)
        assert {*service.get("secrets", [])} <= {*made["secrets"]}
        for volume in service.get("volumes", []):
            place = volume.split(":")[0]
            assert place in made["volumes"] or (DEPLOY / place).exists(), volume
        for variable, value in (service.get("environment") or {}).items():
            if SECRET.search(variable) or variable.endswith("_URL"):
                assert re.search(r"\$\{\w+\}", value), f"{name}: {variable} in plain text"
        if service["image"].startswith("lake:"):
            parsed(service["command"])
            if "api" in service["command"]:
                module = service["command"][-1].replace(".", "/")
                assert (DEPLOY / f"{module}.py").exists(), module
    # dagster-postgres brings psycopg2; without a driver in the URL, SQLAlchemy 2.1 takes psycopg.
    asked_for = make_url(services["shop"]["environment"]["DAGSTER_POSTGRES_URL"])
    assert asked_for.get_driver_name() == "psycopg2"
    assert loaded("values.yaml")["postgresql"]["postgresqlScheme"] == asked_for.drivername
    called: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda *given: called.append(given))
    done = CliRunner().invoke(app, services["connect"]["command"][1:])
    assert done.exit_code == 0, done.output
    ((host, port, master, conf),) = called
    assert (host, port, master) == ("0.0.0.0", 15002, "local[*]")
    assert conf["spark.hadoop.fs.s3a.endpoint"] == "http://store:9000"
    workspace = loaded("workspace.yaml")["load_from"]
    assert [one["grpc_server"]["host"] for one in workspace] == ["shop", "reports"]
    assert f"grpc_pass grpc://connect:{port};" in (DEPLOY / "nginx.conf").read_text()
    asked = {*re.findall(r"\$\{(\w+)\}", (DEPLOY / "compose.yaml").read_text())}
    entries = dict(
        line.split("=", 1)
        for line in (DEPLOY / "lake.env.example").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    assert asked <= {*entries}
    assert not any(value for name, value in entries.items() if SECRET.search(name))
    ignored = ["git", "check-ignore", "deploy/lake.env", "deploy/tls/server.key"]
    done = subprocess.run(ignored, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ignored[2:]


def test_guide_certificate_commands(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "deploy.md").read_text(encoding="utf-8")
    typed = page.replace("\\\n", " ").splitlines()
    lines = [line for line in typed if line.startswith(("openssl", "printf"))]
    made = subprocess.run(
        ["sh", "-ec", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr
    names = [Path(one["file"]).name for one in loaded("compose.yaml")["secrets"].values()]
    assert {*names} <= {path.name for path in tmp_path.iterdir()}
    asked = ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "connect-tls", "server.crt"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "server.crt: OK\n", done.stderr


def test_dagster_yaml_is_valid(tmp_path: Path) -> None:
    settings = loaded("dagster.yaml")
    assert settings.pop("storage") == {"postgres": {"postgres_url": {"env": "DAGSTER_POSTGRES_URL"}}}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(settings))  # its storage is only in the image
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert instance.get_concurrency_config().pool_config.default_pool_limit == 1
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 8
        assert instance.run_monitoring_settings["free_slots_after_run_end_seconds"] > 0
        assert instance.run_retries_enabled
        assert not instance.run_retries_retry_on_asset_or_op_failure


def test_helm_values() -> None:
    values = loaded("values.yaml")
    locations = values["dagster-user-deployments"]["deployments"]
    assert [one["dagsterApiGrpcArgs"] for one in locations] == [
        ["--module-name", "lake.shop"],
        ["--module-name", "lake.reports"],
    ]
    pods = [
        *locations,
        values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]["podSpecConfig"],
    ]
    for pod in pods:
        security = pod["podSecurityContext"] if "podSecurityContext" in pod else pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert not [one["name"] for one in pod.get("env", []) if SECRET.search(one["name"])]
    retries = values["dagsterDaemon"]["runRetries"]
    assert retries["enabled"]
    assert retries["retryOnAssetOrOpFailure"] is False  # an asset has a retry policy of its own
    for location in locations:
        assert location["includeConfigInLaunchedRuns"] == {"enabled": True}
        assert location["envSecrets"] == [{"name": "lake"}]


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    """The environment of the code locations, with directories of this machine."""
    monkeypatch.syspath_prepend(str(DEPLOY))
    for name, value in {
        "LAKE_WAREHOUSE": str(tmp_path / "warehouse"),
        "LAKE_LANDING": str(tmp_path / "landing"),
        "LAKE_KAFKA": "localhost:9",
        "LAKE_CATALOG": "lake_bronze",
    }.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "lake"]:
        del sys.modules[name]


def test_code_locations_share_lineage(lake: Path) -> None:
    shop, reports = (importlib.import_module(f"lake.{name}").defs for name in ("shop", "reports"))
    graphs = []
    for defs in (shop, reports):
        dg.Definitions.validate_loadable(defs)
        graphs.append(defs.resolve_asset_graph())
    own = [{key.to_user_string() for key in graph.materializable_asset_keys} for graph in graphs]
    assert own == [{"prices", "orders"}, {"priced_orders"}]
    parents = graphs[1].get(dg.AssetKey("priced_orders")).parent_keys
    assert {key.to_user_string() for key in parents} == own[0]
    pools = {asset.op.name: asset.op.pool for defs in (shop, reports) for asset in defs.assets}
    assert pools == {name: f"write_{name}" for name in ("prices", "orders", "priced_orders")}
    told = str(shop.resources["vt_dagster_spark"]) + str(shop.resources["vt_dagster_warehouse"])
    assert "AWS" not in told


def test_shop_location_runs(lake: Path, spark: SparkSession) -> None:
    shop = importlib.import_module("lake.shop").defs
    (lake / "landing" / "prices").mkdir(parents=True)
    (lake / "landing" / "prices" / "1.csv").write_text(
        "product,price,at\napple,1.5,2026-01-01T00:00:00Z\n"
    )
    result = dg.materialize(
        [asset for asset in shop.assets if asset.key == dg.AssetKey("prices")],
        resources=shop.resources,
        run_config=QUIET,
    )
    assert result.success
    found = spark.sql("SELECT product, price FROM lake_bronze.prices").collect()
    assert list(map(tuple, found)) == [("apple", 1.5)]
    spark.sql("DROP SCHEMA lake_bronze CASCADE")


@pytest.mark.slow
def test_spark_jars_command_fills_image(tmp_path: Path, monkeypatch: Any) -> None:
    done = CliRunner().invoke(app, ["spark", "jars", "--to", str(tmp_path / "jars")])
    assert done.exit_code == 0, done.output
    expected = {jar.name for jar in resolve_jars()}
    assert f"{len(expected)} jars in" in done.output
    monkeypatch.setenv(JARS_ENV, str(tmp_path / "jars"))
    assert {jar.name: jar.parent for jar in resolve_jars()} == dict.fromkeys(
        expected, tmp_path / "jars"
    )


def test_server_requires_token(monkeypatch: Any) -> None:
    monkeypatch.delenv(server.TOKEN, raising=False)
    with pytest.raises(SparkUnavailableError, match=f"environment variable {server.TOKEN}, found none"):
        server.serve("0.0.0.0", 15002)


CLIENT = f"""
import os, sys
import pyspark.sql.connect.session
from vt_dagster.errors import SparkUnavailableError
from vt_dagster.spark.session import build_session
for token in sys.argv[2:]:  # a client each: one that was refused stays in its process
    if os.fork() == 0:
        os.environ[{server.TOKEN!r}] = token
        try:
            print(build_session(remote=sys.argv[1]).range(3).count(), flush=True)
        except SparkUnavailableError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def tls_proxy(port: int, folder: Path) -> Iterator[int]:
    """A TLS proxy with a self-signed certificate in front of a port, as nginx is in a deployment."""
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    about = [
        "-days",
        "1",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
    ]
    asked = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *files, *about]
    subprocess.run(asked, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    loop, listens = asyncio.new_event_loop(), free_port()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    def run() -> None:
        asyncio.set_event_loop(loop)
        started = asyncio.start_server(connected, "127.0.0.1", listens, ssl=context)
        loop.run_until_complete(started)
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield listens
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=10)


@pytest.mark.jvm
@pytest.mark.slow
def test_spark_connect_behind_tls(tmp_path: Path) -> None:
    """A client that trusts the certificate connects to the deployed server with the right token. A
    wrong token is refused, and the token is visible neither in errors nor in the list of processes."""
    port, environment = free_port(), {**server_environment(tmp_path), server.TOKEN: "sesame"}
    command = [str(BIN / "vt-dagster"), "spark", "serve", f"--port={port}", "--master=local[1]"]
    with (tmp_path / "log").open("wb") as log:
        served = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 180
        while not server.is_open("127.0.0.1", port):
            assert served.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.5)
        with tls_proxy(port, tmp_path) as secure:
            about = {
                **environment,
                "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(tmp_path / "cert.pem"),
                "JAVA_HOME": "/there/is/none",
            }
            address = f"sc://localhost:{secure}/;use_ssl=true"
            asked = [sys.executable, "-c", CLIENT, address, "another", "sesame"]
            done = subprocess.run(asked, env=about, capture_output=True, text=True, timeout=180)
            assert "sesame" not in done.stderr
            refused, counted = done.stdout.splitlines()
            assert "Expected a Spark session on sc://localhost" in refused
            assert counted == "3"
        told = subprocess.run(["ps", "-eww", "-o", "command="], capture_output=True, text=True).stdout
        assert "sesame" not in told
    finally:
        served.send_signal(signal.SIGTERM)
        assert served.wait(timeout=60) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
    assert oct(next(tmp_path.rglob("server.serve.conf")).stat().st_mode)[-3:] == "600"
