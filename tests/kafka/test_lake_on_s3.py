"""The deployment's code locations on an S3 store: Spark uses S3A, all else s3fs and deltalake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyspark
import pytest
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.kafka.topics import Topics
from vt_dagster import read
from vt_dagster.cli import app
from vt_dagster.spark.jars import JARS_ENV, resolve_jars, resolve_maven_jars
from vt_dagster.storage import delta

WAREHOUSE = "s3a://lake/warehouse"
HEAD = "product,price,at\n"


@pytest.fixture
def s3_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store with an empty bucket, and the environment of ``deploy/lake.env.example``."""
    from moto.server import ThreadedMotoServer  # half a second, so not for other tests

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    entries = (ROOT / "deploy" / "lake.env.example").read_text(encoding="utf-8").splitlines()
    given = dict(line.split("=", 1) for line in entries if line.startswith("AWS_"))
    given["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    for name, value in given.items():
        monkeypatch.setenv(name, value or "sesame-4711")
    fsspec.filesystem("s3").clear_instance_cache()
    found = fsspec.filesystem("s3")
    found.mkdir("lake")
    yield found
    server.stop()


@pytest.fixture
def lake_process(topics: Topics, tmp_path: Path, s3_store: Any) -> Iterator[subprocess.Popen[str]]:
    """The process that runs assets of the lake; it has the jars of the image."""
    (hadoop,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    aws = resolve_maven_jars(f"org.apache.hadoop:hadoop-aws:{hadoop.stem.rpartition('-')[2]}")
    (tmp_path / "jars").mkdir()
    for name, jar in {jar.name: jar for jar in (*resolve_jars(), *aws)}.items():
        (tmp_path / "jars" / name).symlink_to(jar)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "deploy"), os.environ.get("PYTHONPATH", "")]
        ),
        JARS_ENV: str(tmp_path / "jars"),
        "LAKE_WAREHOUSE": WAREHOUSE,
        "LAKE_LANDING": "s3a://lake/landing",
        "LAKE_KAFKA": topics.cluster.servers,
        "LAKE_DRIVER_MEMORY": "1g",
    }
    command = [sys.executable, "-m", "tests.kafka.lake_child"]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tmp_path)
    yield child
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(timeout=60) == 0


@pytest.mark.endurance  # the SDK that S3A needs is a download of 686 MB
def test_lake_runs_on_s3(topics: Topics, s3_store: Any, lake_process: subprocess.Popen[str]) -> None:
    """A first, a second and an empty run; two assets at once, and two runs of one asset at once."""

    def run(*names: str) -> list[str]:
        assert lake_process.stdin is not None
        assert lake_process.stdout is not None
        lake_process.stdin.write(json.dumps(names) + "\n")
        lake_process.stdin.flush()
        return json.loads(lake_process.stdout.readline())

    def price(file: int, price: float, day: int) -> None:
        text = f"{HEAD}apple,{price},2026-01-{day:02d}T00:00:00Z\n"
        s3_store.pipe_file(f"lake/landing/prices/{file}.csv", text.encode())

    def order(amount: int, day: int) -> None:
        value = {"product": "apple", "amount": amount, "ordered_at": f"2026-01-{day:02d}T12:00:00Z"}
        topics.produce("orders", [{"key": "apple", "value": value}])

    def commits() -> list[int]:
        return [
            len(delta.versions(f"{WAREHOUSE}/{n}/log")) for n in ("prices", "orders", "priced_orders")
        ]

    topics.create("orders")
    price(1, 1.5, 1)
    order(2, 1)
    assert run("prices", "orders") == ["", ""]
    assert run("priced_orders") == [""]
    price(2, 2.5, 3)
    order(4, 3)
    order(1, 4)
    assert run("prices", "orders") == ["", ""]
    assert run("priced_orders") == [""]
    assert commits() == [2, 2, 2]
    assert run("prices", "orders") == ["", ""]
    assert run("priced_orders") == [""]
    assert commits() == [2, 2, 2], "nothing new"

    price(3, 3.5, 5)
    said = run("prices", "prices")
    assert "" in said
    assert {*said} <= {""} or "ConcurrentRunError" in "".join(said), said
    assert commits() == [3, 2, 2]

    found = read("priced_orders", warehouse=WAREHOUSE).to_pylist()
    assert [(row["amount"], row["price"], row["total"]) for row in found] == [
        (2, 1.5, 3.0),
        (4, 2.5, 10.0),
    ]
    # The same warehouse by its other URL scheme.
    asked = ["get", "prices", "--key", "apple", "--json", "--warehouse", "s3://lake/warehouse"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["price"] == 3.5
