"""The Spark session: each refusal is a message of one line, and jars are downloaded once."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import grpc
import pytest
from packaging.specifiers import SpecifierSet
from pyspark.sql.connect.client.retries import RetryPolicy
from pyspark.sql.connect.logging import configureLogging

from tests.conftest import CLASSES, JVM
from tests.market import QUIET
from vt_dagster.errors import SparkUnavailableError
from vt_dagster.spark import jars, session

ROOT = Path(__file__).parents[1]
QUICK = JVM + (f" -XX:SharedArchiveFile={CLASSES}" if CLASSES.is_file() else "")
"""JVM options for a fast start. The JVM prints nothing about them, unlike about
``JDK_JAVA_OPTIONS``."""
_NOT_INHERITED = ("SPARK_", "PYSPARK_", "JDK_JAVA_OPTIONS")


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new Python process and directory, because this process may have a session."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
    with tempfile.TemporaryDirectory() as directory:  # Spark leaves a spark-warehouse there
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**inherited, "PYTHONPATH": str(ROOT), **env},
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=300,
        )


def refusals(*cases: tuple[str, dict[str, str]]) -> list[str]:
    """The message with which ``build_session(arguments)`` refuses each case of arguments and
    environment. Nothing else is printed. All cases share one process: a refusal starts nothing."""
    done = run_python(
        f"""
        import os
        from vt_dagster.errors import SparkUnavailableError
        from vt_dagster.spark.session import build_session
        before = dict(os.environ)
        for arguments, more in {list(cases)!r}:
            os.environ.update(more)
            try:
                eval("build_session(" + arguments + ")")
            except SparkUnavailableError as error:
                print(error)
            os.environ.clear()
            os.environ.update(before)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stdout
    assert all(line.startswith("Expected ") for line in lines)
    return lines


def fake_java(home: Path, script: str) -> str:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return str(home)


# ------------------------------------------------------------------------------- what stops it


def test_refused_environments(tmp_path: Path):
    """No Java, a wrong Java, address or time zone, or another Spark is refused at once: Spark's client
    would retry for ten minutes, and this process has five."""
    of_java = {
        'openjdk version "11.0.22" 2024-01-16': "Java 11",
        'java version "1.8.0_402"': "Java 8",
        'openjdk version "25.0.3" 2026-04-21 LTS': "Java 25",
        "no Java runtime present": "an answer without a version",
    }
    homes = {
        fake_java(tmp_path / str(n), f"echo '{printed}' >&2"): got
        for n, (printed, got) in enumerate(of_java.items())
    }
    cases: list[tuple[str, dict[str, str], str]] = [
        ("", {"JAVA_HOME": str(tmp_path)}, "found no java in JAVA_HOME"),
        ("", {"JAVA_HOME": "", "PATH": str(tmp_path)}, "found no java on PATH"),
        *(("", {"JAVA_HOME": home}, f"got {got}") for home, got in homes.items()),
        ("master='spark://localhost:1'", {}, "no connection (localhost:1: "),
        ("master='spark://localhost:1,localhost:2'", {}, "; localhost:2: "),
        ("master='spark://localhost'", {}, "no host:port"),
        ("remote='sc://localhost:1/;token=secret'", {}, "no connection (localhost:1: "),
        ("remote='localhost:15002;token=secret'", {}, "sc://host:15002"),
        (
            "master='sc://localhost/;token=secret'",
            {},
            "'sc://localhost'; pass it as remote=...",
        ),
        (
            "",
            {"SPARK_REMOTE": "sc://localhost/;token=secret"},
            "SPARK_REMOTE is set to 'sc://localhost'",
        ),
        ("conf={'spark.sql.session.timeZone': 'Europe/Berlin'}", {}, "got 'Europe/Berlin'"),
        ("", {"SPARK_HOME": str(tmp_path)}, "found no such jars"),
    ]
    told = refusals(*((arguments, more) for arguments, more, _ in cases))
    assert "secret" not in "".join(told)
    for (*case, says), message in zip(cases, told, strict=True):
        assert says in message, case
    assert all("Java 17 or 21" in message for message in told[: 2 + len(homes)])


@pytest.mark.parametrize("release", ["17.0.15", "21", "21.0.2"])
def test_supported_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str):
    noise = "echo 'Picked up JAVA_TOOL_OPTIONS: -Xmx1g' >&2"
    home = fake_java(tmp_path, f"{noise}; echo 'openjdk version \"{release}\"' >&2")
    monkeypatch.setenv("JAVA_HOME", home)
    session.check_java()


@pytest.fixture
def client_log() -> Iterator[logging.Logger]:
    """The logger of Spark Connect's client. The fixture restores its state after the test."""
    log = logging.getLogger(configureLogging.__module__)
    level, before = log.level, (log.disabled, [*log.handlers])
    yield log
    log.setLevel(level)
    log.disabled, log.handlers = before


def test_connect_client_log_is_not_printed(
    client_log: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Dagster enables this logger, which PySpark has disabled, in each run of an instance with
    settings. Its messages are printed only if SPARK_CONNECT_LOG_LEVEL is set."""

    @dg.asset
    def mine():
        client_log.error("refused: asked for")

    def printed() -> str:
        client_log.handlers = []
        client_log.setLevel(logging.NOTSET)
        configureLogging()  # PySpark calls this when the client is imported
        session.silence_connect()
        settings = {"telemetry": {"enabled": False}}
        with dg.DagsterInstance.ephemeral(settings=settings) as instance:
            assert dg.materialize([mine], instance=instance, run_config=QUIET).success
        return capsys.readouterr().err

    monkeypatch.delenv("SPARK_CONNECT_LOG_LEVEL", raising=False)
    assert "refused: asked for" not in printed()
    monkeypatch.setenv("SPARK_CONNECT_LOG_LEVEL", "ERROR")
    assert "refused: asked for" in printed()


class Unavailable(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_calls_to_ended_server_are_not_retried(host: str):
    """A call to a local server that has ended is not retried. Calls to a running server, or to a
    server on another machine, are retried as Spark does."""
    policies: list[RetryPolicy] = []
    asked: Any = SimpleNamespace(client=SimpleNamespace(set_retry_policies=policies.extend))
    session._retry_while_it_runs(asked, "sc://elsewhere:15002/;token=secret")  # pyright: ignore
    assert policies == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        session._retry_while_it_runs(asked, f"sc://{host}:{port}/;token=secret")  # pyright: ignore
        (policy,) = policies
        assert policy.can_retry(Unavailable())
        assert not policy.can_retry(ValueError())
    with pytest.raises(
        SparkUnavailableError, match=rf"{host}:{port} to answer, but it has ended"
    ) as told:
        policy.can_retry(Unavailable())
    assert "secret" not in str(told.value)


def test_spark_home_of_other_series_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SPARK_HOME with a Spark of another series than PySpark is refused, even if the series is
    supported: PySpark would start that Spark."""
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr(jars, "version", lambda _: "4.1.4")
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.13-4.2.1.jar").touch()
    with pytest.raises(SparkUnavailableError, match=r"Expected Spark 4\.1 .* since PySpark is 4\.1"):
        session.check_spark_home()
    (tmp_path / "jars" / "spark-core_2.13-4.1.1.jar").touch()
    assert session.check_spark_home() == tmp_path


@pytest.mark.parametrize("found", ["3.5.9", "4.3.0", "40.1"])
@pytest.mark.parametrize("remote", [None, "sc://localhost:1"])
def test_unsupported_pyspark_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: str, remote: str | None
):
    """The refusal comes before any start, connection or download."""
    monkeypatch.setattr(jars, "version", lambda _: found)
    with pytest.raises(SparkUnavailableError) as told:
        session.build_session(remote=remote)
    assert str(told.value) == (
        f"Expected PySpark 4.0, 4.1 or 4.2, found {found}; run: "
        'pip install "pyspark[connect]==4.2.*", or the series of your cluster.'
    )
    with pytest.raises(SparkUnavailableError, match="Expected PySpark"):
        session.resolve_jars()


def test_package_requires_supported_spark_series():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = [SpecifierSet(found) for found in re.findall(r'"pyspark(?:\[connect\])?([<>=].*)"', text)]
    assert len(bounds) == 2, "with and without its extra"
    some = [f"{major}.{minor}" for major in (3, 4, 5) for minor in range(9)]
    for asked in bounds:
        assert [series for series in some if f"{series}.9" in asked] == [*jars.SERIES]


@pytest.mark.jvm
def test_jvm_error_reaches_message():
    """The message has the JVM's own text: of options with which it does not start, whether or not it
    prints the options from the environment first, of a heap that it cannot have, of a missing jar, of a
    package without a version, before which Ivy prints its settings, and of a directory that cannot be
    written, so that it ends."""
    heap, options = "conf={'spark.driver.memory': '99zz'}", ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")
    *told, large, small, jar, package, local = refusals(
        *((heap, {name: "-Dx=1"}) for name in options),
        *((heap.replace("99zz", size), {}) for size in ("9999999g", "1k")),
        ("conf={'spark.jars': '/no/such.jar'}", {}),
        ("conf={'spark.jars.packages': 'a:b'}", {}),
        ("", {"SPARK_LOCAL_DIRS": "/dev/null/none"}),
    )
    assert "Failed to create directory /dev/null/none/" in local
    for message in told:
        assert "Invalid maximum heap size: -Xmx99zz" in message
    assert "got: Could not reserve enough space for" in large
    assert "got: Too small maximum heap. Check" in small
    assert "/no/such.jar" in jar
    assert "Maven Coordinates must be in the form 'groupId:artifactId:version'" in package


# ---------------------------------------------------------------------------------------- jars


@pytest.mark.parametrize(("series", "patch"), [("4.0", "4.0.0"), ("4.1", "4.1.1"), ("4.2", "4.2.0")])
def test_jars_from_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, series: str, patch: str
):
    monkeypatch.setenv(jars.JARS_ENV, str(tmp_path))
    monkeypatch.setattr(jars, "version", lambda _: f"{series}.9")
    (tmp_path / f"delta-spark_{series}_2.13-4.4.0.jar").touch()
    with pytest.raises(SparkUnavailableError, match=r"spark-sql-kafka-0-10.* found 1 other jar"):
        session.resolve_jars()
    (tmp_path / f"spark-sql-kafka-0-10_2.13-{patch}.jar").touch()
    (tmp_path / f"spark-avro_2.13-{patch}.jar").touch()
    (tmp_path / "log4j-1.2-api-2.0.0.jar").touch()  # ships with PySpark, in another version
    assert [jar.name for jar in session.resolve_jars()] == [
        f"delta-spark_{series}_2.13-4.4.0.jar",
        f"spark-avro_2.13-{patch}.jar",
        f"spark-sql-kafka-0-10_2.13-{patch}.jar",
    ]


def test_missing_directory_of_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(jars.JARS_ENV, str(tmp_path / "nowhere"))
    with pytest.raises(SparkUnavailableError, match=r"nowhere, found none; correct the path, fill it"):
        session.resolve_jars()


def test_jars_of_other_series_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Delta Lake's jars for another Spark series are refused. Only their file names have the series."""
    monkeypatch.setenv(jars.JARS_ENV, str(tmp_path))
    monkeypatch.setattr(jars, "version", lambda _: "4.2.1")
    for coordinates in jars.SERIES["4.1"]:
        (tmp_path / f"{'-'.join(coordinates.split(':')[1:])}.jar").touch()
    with pytest.raises(SparkUnavailableError, match=r"^Expected io\.delta:delta-spark_4\.2_2\.13:4"):
        session.resolve_jars()


def test_unreachable_maven_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    settings = tmp_path / "jgo.conf"
    settings.write_text("[repositories]\ncentral = http://localhost:1/maven2\n")
    monkeypatch.setenv("JGO_CONFIG_FILE", str(settings))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(jars.JARS_ENV, raising=False)
    with pytest.raises(SparkUnavailableError, match=r"^Expected to download io\.delta.*") as caught:
        session.resolve_jars()
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.jar"))


class Repository:
    """A fake of the download that counts its calls."""

    def __init__(self) -> None:
        self.asked = 0
        self.seconds = 0.0
        self.content = {"delta": "delta", "kafka": "kafka"}

    def download(self, work: Path, target: Path, *_: object) -> list[Path]:
        self.asked += 1
        time.sleep(self.seconds)
        return self.write(target)

    def write(self, target: Path) -> list[Path]:
        """Writes the jars, with the same bytes each time."""
        for name, content in self.content.items():
            with zipfile.ZipFile(target / f"{name}-1.jar", "w") as jar:
                jar.writestr(zipfile.ZipInfo("content"), content)
        return sorted(target.glob("*.jar"))


def digest(jar: Path) -> str:
    return hashlib.sha256(jar.read_bytes()).hexdigest()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    fake = Repository()
    written = tmp_path / "true"
    written.mkdir()
    table = tmp_path / "jars.sha256"
    table.write_text("".join(f"{digest(jar)}  {jar.name}\n" for jar in fake.write(written)))
    monkeypatch.setattr(jars, "CHECKSUMS", table)
    monkeypatch.setattr(jars, "_download", fake.download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(jars.JARS_ENV, raising=False)
    return fake


def test_warm_jar_cache_downloads_nothing(repository: Repository):
    cold = session.resolve_jars()
    assert session.resolve_jars() == cold
    assert repository.asked == 1
    assert all(jar.is_file() for jar in cold)


@pytest.mark.parametrize("damage", ["jar gone", "jar cut", "list gone", "list cut", "list odd"])
def test_incomplete_jar_cache_is_rebuilt(repository: Repository, damage: str):
    cold = session.resolve_jars()
    sizes = [jar.stat().st_size for jar in cold]
    victim = cold[0] if damage.startswith("jar") else cold[0].with_name("jars.json")
    if damage.endswith("gone"):
        victim.unlink()
    elif damage.endswith("cut"):
        victim.write_bytes(victim.read_bytes()[:-5])
    else:
        victim.write_text("[]")
    assert [jar.stat().st_size for jar in session.resolve_jars()] == sizes
    assert repository.asked == 2


def test_damaged_jar_of_same_size_is_replaced(repository: Repository):
    cold = session.resolve_jars()
    whole = cold[0].read_bytes()
    about = cold[0].stat()
    cold[0].write_bytes(whole.replace(b"delta", b"DELTA"))
    os.utime(cold[0], ns=(about.st_atime_ns, about.st_mtime_ns))  # its time does not differ either
    assert session.resolve_jars() == cold
    assert repository.asked == 2
    assert cold[0].read_bytes() == whole


def test_jar_with_wrong_checksum_is_refused(repository: Repository, tmp_path: Path):
    true = next(tmp_path.glob("true/delta-1.jar"))
    repository.content["delta"] = "DELTA"
    with pytest.raises(SparkUnavailableError) as caught:
        session.resolve_jars()
    said = str(caught.value)
    assert said.startswith(f"Expected delta-1.jar with the SHA-256 {digest(true)}, found ")
    found = said.partition(", found ")[2].partition(";")[0]
    assert len(found) == 64
    assert found != digest(true)
    assert "\n" not in said
    assert not list((tmp_path / "vt_dagster").rglob("*.jar"))
    repository.content["delta"] = "delta"
    assert len(session.resolve_jars()) == 2


def test_jar_without_checksum_is_refused(repository: Repository, tmp_path: Path):
    repository.content["other"] = "other"
    with pytest.raises(SparkUnavailableError, match=r"found also other-1\.jar"):
        session.resolve_jars()
    assert not list((tmp_path / "vt_dagster").rglob("*.jar"))
    # A jar of the caller's own coordinates needs no checksum; jars with a known checksum are checked.
    assert len(jars.resolve_maven_jars("org.example:other:1")) == 3
    repository.content["kafka"] = "KAFKA"
    with pytest.raises(SparkUnavailableError, match=r"^Expected kafka-1\.jar with"):
        jars.resolve_maven_jars("org.example:other:2")


def test_foreign_jar_in_cache_is_ignored(repository: Repository):
    cold = session.resolve_jars()
    shutil.copy(cold[0], cold[0].with_name("other-1.jar"))
    listed = cold[0].with_name("jars.json")
    sizes = json.loads(listed.read_text())
    listed.write_text(json.dumps({**sizes, "other-1.jar": sizes["delta-1.jar"]}))
    assert session.resolve_jars() == cold
    assert repository.asked == 2


@pytest.mark.endurance  # it reads the jars of all series, which change only with SERIES
@pytest.mark.network
def test_every_jar_has_checksum(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(jars.JARS_ENV, raising=False)
    taken = [*session.resolve_jars(), *jars.resolve_broker_jars()]
    for series in {*jars.SERIES} - {jars.pyspark_series()}:
        taken += jars._of_cache(f"series-{series}", jars.SERIES[series], jars._shipped())
    assert {jar.name: digest(jar) for jar in taken} == jars.checksums()


def test_concurrent_cold_starts_download_once(repository: Repository):
    repository.seconds = 0.2
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: session.resolve_jars(), range(4)))
    assert repository.asked == 1
    assert all(result == results[0] for result in results)


def test_read_only_jar_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "vt_dagster").touch()  # a file where the directory should be
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(jars.JARS_ENV, raising=False)
    with pytest.raises(SparkUnavailableError, match="Make it writable"):
        session.resolve_jars()


# ------------------------------------------------------------------------------------ settings


def test_conf_overrides_defaults_and_extends_lists():
    settings = session.session_settings(
        "app",
        "local[3]",
        [Path("/j/delta.jar")],
        {
            "spark.driver.memory": "5g",
            "spark.sql.extensions": "org.example.Extension",
            "spark.driver.extraJavaOptions": "-Dx=1 -Duser.timezone=CET",
        },
    )
    assert settings["spark.driver.memory"] == "5g"
    assert settings["spark.sql.shuffle.partitions"] == "6"
    assert settings["spark.jars"] == "file:///j/delta.jar"
    assert settings["spark.sql.extensions"] == f"{session.DELTA_EXTENSION},org.example.Extension"
    assert settings["spark.driver.extraJavaOptions"].endswith(
        "log4j2.properties -Dx=1 -Duser.timezone=CET -Duser.timezone=UTC"
    )


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[2]", 2),
        ("local[2,3]", 2),
        ("local[*]", os.cpu_count()),
        ("local-cluster[2, 3, 1024]", 6),
        ("spark://host:7077", None),
        ("yarn", None),
    ],
)
def test_local_cores(master: str, cores: int | None):
    assert session._local_cores(master) == cores


def test_import_starts_nothing():
    done = run_python(
        """
        import sys, vt_dagster.spark.session
        from pyspark import SparkContext
        print("jgo" in sys.modules, SparkContext._gateway, SparkContext._active_spark_context)
        """
    )
    assert done.stdout == "False None None\n", done.stderr


# --------------------------------------------------------------------------------- real sessions


@pytest.mark.slow
def test_session_has_delta_and_kafka_and_is_reused(tmp_path: Path):
    done = run_python(
        f"""
        import os, signal, sys, threading
        from vt_dagster.spark.session import build_session
        class Canceled(BaseException): pass
        def cancel(*_): raise Canceled  # as Dagster cancels a step
        signal.signal(signal.SIGINT, cancel)
        conf = {{"spark.driver.extraJavaOptions": {QUICK!r}}}
        spark = build_session(master="local[2]", conf=conf)
        path = {str(tmp_path / "a table")!r}
        spark.sql("SELECT timestamp'1970-01-01 00:00:01' AS t").write.format("delta").save(path)
        print(spark.read.format("delta").load(path).selectExpr("unix_micros(t)").first()[0])
        spark._jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(
            "org.apache.spark.sql.kafka010.KafkaSourceProvider")
        print(spark.sql("SELECT java_method('java.lang.System', 'getProperty', 'user.timezone')")
            .first()[0])
        print(os.environ["PYSPARK_PYTHON"] == sys.executable)
        again = build_session(conf={{"spark.sql.shuffle.partitions": "7"}})
        print(again is spark, again.conf.get("spark.sql.shuffle.partitions"))
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            spark._jvm.java.lang.Thread.sleep(20_000)
        except Canceled:
            print("canceled", spark.range(4).count())
        """
    )
    told = ["1000000", "UTC", "True", "True 7", "canceled 4"]
    assert done.stdout.splitlines() == told, done.stderr
    assert done.stderr == ""


@pytest.mark.slow
def test_session_without_delta_is_refused():
    """An active session, a stopped session whose JVM stays, and a team's session that has all settings
    but the jars are refused."""
    done = run_python(
        f"""
        from dagster_pyspark import LazyPySparkResource
        from pyspark.sql import SparkSession
        from vt_dagster import SparkResource
        from vt_dagster.errors import SparkUnavailableError
        from vt_dagster.orchestration.resources import session_of
        from vt_dagster.spark.session import build_session

        def refused(made):
            try:
                made()
            except SparkUnavailableError as error:
                print(error)

        plain = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
        plain = plain.config("spark.driver.extraJavaOptions", {QUICK!r}).getOrCreate()
        refused(lambda: build_session(master="local[1]"))
        plain.stop()
        refused(lambda: build_session(master="local[1]"))
        if left := SparkSession.getActiveSession():
            left.stop()
        whole = SparkResource(master="local[1]").pyspark_config()
        del whole["spark.jars"]
        refused(lambda: session_of(LazyPySparkResource(spark_config=whole)))
        """
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    for lacks in ("spark.sql.extensions", "spark.sql.catalog.spark_catalog"):
        assert f"{lacks}=" in lines[0]
    assert "it has 'none'" in lines[0]
    assert "DeltaCatalog" in lines[1]
    for part in ("LazyPySparkResource", "the jars of io.delta:delta-spark", "pyspark_config()"):
        assert part in lines[2]


def test_connect_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token makes Spark's client use TLS for each host but localhost: the message says so."""
    monkeypatch.setattr(session, "_ANSWER_SECONDS", 1)
    monkeypatch.delenv("SPARK_CONNECT_AUTHENTICATE_TOKEN", raising=False)
    told = r"does not speak its protocol \(waited 1 s\)\. Correct the address or its use_ssl"
    with socket.socket() as listens:
        listens.bind(("127.0.0.1", 0))
        listens.listen()
        port = listens.getsockname()[1]
        with pytest.raises(SparkUnavailableError, match=rf"{told}\.$"):
            session.check_connect(f"sc://127.0.0.1:{port}")
        for place in ("127.0.0.1:%d/;token=sesame", "localhost:%d/;use_ssl=true"):
            with pytest.raises(SparkUnavailableError, match=rf"{told}: .* a token .* needs TLS") as got:
                session.check_connect(f"sc://{place % port}")
            assert "sesame" not in str(got.value)
