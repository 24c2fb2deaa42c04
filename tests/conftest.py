"""Fixtures and hooks of all tests: one Spark session, and tables that runs really wrote."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from filelock import FileLock
from pyspark.sql import SparkSession

from vt_dagster.spark.jars import resolve_jars
from vt_dagster.spark.server import Server
from vt_dagster.spark.session import build_session
from vt_dagster.spark.settings import small_run

if TYPE_CHECKING:  # it imports Dagster, which the process that only distributes tests does not need
    from tests.market import Market

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
# Options of every JVM that a test starts. Most of these JVMs run many short queries for a minute, so
# optimizing their code takes longer than running it. To compile a method after a third of the default
# number of calls takes a tenth less processor time; so does the serial collector. Without a setting the
# JVM then reserves 48 MB for compiled code. A Connect server with many runs fills them, and hangs.
JVM = (
    "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
    " -XX:ReservedCodeCacheSize=400m -Xlog:cds=off,cds+dynamic=off"
    " -XX:Tier3InvocationThreshold=60 -XX:Tier3MinInvocationThreshold=30"
    " -XX:Tier3CompileThreshold=600 -XX:Tier3BackEdgeThreshold=20000"
)
# Options of the session that all tests share. It lives for half an hour and more. There, optimizing a
# method pays off after four times as many calls as the JVM's default. It then takes a quarter less.
LONG_LIVED = (
    "-XX:TieredStopAtLevel=4"
    " -XX:Tier3InvocationThreshold=200 -XX:Tier3MinInvocationThreshold=100"
    " -XX:Tier3CompileThreshold=2000 -XX:Tier3BackEdgeThreshold=60000"
    " -XX:Tier4InvocationThreshold=20000 -XX:Tier4MinInvocationThreshold=2400"
    " -XX:Tier4CompileThreshold=60000 -XX:Tier4BackEdgeThreshold=160000"
)
CLASSES = Path(sys.prefix) / ".classes.jsa"
"""The archive that ``make test`` writes first (``class_archive.py``); without it tests are slower."""
os.environ["VT_DAGSTER_CLASS_ARCHIVE"] = "off"  # no test writes the user's archive
os.environ.setdefault(
    "JDK_JAVA_OPTIONS", f"{JVM} -XX:SharedArchiveFile={CLASSES}" if CLASSES.is_file() else JVM
)

# Python keeps compiled modules, as for users: only the first process of the tests compiles them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_LONGEST_FIRST = (
    *("test_conformance.py", "test_assets_conformance.py", "test_demo.py", "test_end_to_end.py"),
    *("test_crash.py", "test_faults.py", "test_maintenance.py", "test_self_joins.py"),
    "test_pages.py",  # the pages of the demo that test_demo.py has run
    *("test_operator_properties.py", "test_random_chains.py", "test_erase.py"),
    *("test_view_freshness.py", "test_explain_operators.py", "test_sink.py"),
    "test_corrected_joins_on_delta.py",
)

_LONGEST_FIRST_OF_FAST = (
    *("test_session.py", "test_components.py", "test_explore.py", "test_init.py"),
    *("test_sliding_windows.py", "test_definitions.py", "test_layers.py", "test_check_command.py"),
    *("test_deploy.py", "test_example_sql.py", "test_log_diff.py", "test_options.py"),
    *("test_reference_model.py", "test_calendar_windows.py"),
)


_NOT_FAST = {"jvm", "slow", "endurance", "kafka", "browser", "cluster", "network"}
"""Markers of tests that start a JVM, a broker or a browser, or take long without one."""
_JVM_OF = {"spark", "connect_server", "broker"}
"""Fixtures that start a JVM."""


def pytest_configure(config: pytest.Config) -> None:
    """With ``-m fast`` no JVM can start, in this process or in one that a test starts. Python then
    collects garbage seldom, since no garbage holds objects of a JVM."""
    gc.disable()  # until tests are collected
    if config.option.markexpr == "fast":
        os.environ["JAVA_HOME"] = "no-java-in-fast-tests"
        gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and collected tests live as long as the process. Garbage collection is off while they are
    created, and ignores them later: it took a fifth of the time of the fast tests."""
    done = yield
    gc.freeze()
    gc.enable()
    return done


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the fast tests, and puts the files that take longest first.

    The processes that share the tests then end at about the same time.
    """
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        if not markers & _NOT_FAST and not _JVM_OF & {*getattr(item, "fixturenames", ())}:
            item.add_marker("fast")
    longest = _LONGEST_FIRST_OF_FAST if config.option.markexpr == "fast" else _LONGEST_FIRST
    places = {name: place for place, name in enumerate(longest)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def migrations() -> Iterator[None]:
    """Reads the scripts of Dagster's migrations once for all Dagster instances. Each new instance needs
    the number of the last migration; to read the scripts takes most of the time of its creation."""
    found: dict[str | None, ScriptDirectory] = {}

    def kept(config: Config) -> ScriptDirectory:
        place = config.get_main_option("script_location")
        if place not in found:
            found[place] = read(config)
        return found[place]

    read = ScriptDirectory.from_config
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ScriptDirectory, "from_config", kept)
        yield


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A local session that all tests share; with ``SPARK_REMOTE``, a session on that Connect server."""
    if remote := os.environ.get("SPARK_REMOTE"):
        yield build_session("vt_dagster tests", remote=remote)
        return
    session = build_session(
        "vt_dagster tests",
        master="local[2]",
        conf={
            "spark.sql.shuffle.partitions": "2",
            # Many short queries leave much garbage: a large young generation collects it cheaply.
            "spark.driver.extraJavaOptions": f"-Xms1800m -Xmn900m -XX:MetaspaceSize=256m {LONG_LIVED}",
            # No test looks at the UI pages of these queries.
            "spark.sql.ui.retainedExecutions": "20",
            "spark.ui.retainedJobs": "20",
            "spark.ui.retainedStages": "20",
            "spark.ui.retainedTasks": "20",
            # Spark formats each plan for these pages, and validates the plan after each of its rules.
            # Both take a fiftieth of the time of the tests.
            "spark.sql.ui.explainMode": "simple",
            "spark.sql.lightweightPlanChangeValidation": "false",
            "spark.python.sql.dataFrameDebugging.enabled": "false",
        },
    )
    yield session
    session.stop()


@pytest.fixture
def few_rows(request: pytest.FixtureRequest) -> Iterator[None]:
    """Spark plans a test's queries for few rows, as in small runs, since code generation takes most of
    the time of a query over a few rows. For test files that do not test how queries are planned."""
    if "spark" not in request.fixturenames:
        yield
        return
    with small_run(request.getfixturevalue("spark")):
        yield


def server_environment(home: Path) -> dict[str, str]:
    """The environment of a user who has the jars. The cache under ``home`` records the Spark server."""
    return {
        **os.environ,
        "XDG_CACHE_HOME": str(home / "cache"),
        "VT_DAGSTER_JARS": str(resolve_jars()[0].parent),
        "PYTHONPATH": str(ROOT),
    }


def spark_command(environment: dict[str, str], *words: str, cwd: Path | None = None) -> tuple[int, str]:
    """Runs ``vt-dagster spark``, and returns its exit status and its output."""
    done = subprocess.run(
        [str(BIN / "vt-dagster"), "spark", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=cwd,
    )
    return done.returncode, done.stdout + done.stderr


def output_of(program: str, *words: str, columns: int) -> str:
    """The output of an installed program in a terminal of ``columns`` letters. The program runs in this
    process, since the import of Dagster in another process takes a second or two."""
    (installed,) = entry_points(group="console_scripts", name=program)
    main, printed = installed.load(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(printed):
        patched.setenv("COLUMNS", str(columns))
        patched.setattr(sys, "argv", [program, *words])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0, (program, words)
    return printed.getvalue()


@dataclass(frozen=True)
class ConnectServer:
    """A Spark Connect server that ``vt-dagster spark start`` has started.

    Args:
        environment: of processes that use the server, if ``VT_DAGSTER_SPARK`` is ``server`` in them.
        address: ``sc://…``, with its token.
    """

    environment: dict[str, str]
    address: str


@pytest.fixture(scope="session")
def connect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConnectServer]:
    """One server for all tests in all of pytest's processes; the last process stops it. The server runs
    in another directory than the processes that use it. Those processes start no JVM."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "connect_server"
    environment, elsewhere, users = server_environment(root), root / "elsewhere", root / "users"
    found = Path(environment["XDG_CACHE_HOME"]) / "vt_dagster" / "spark" / "server.json"
    mine = users / str(os.getpid())
    with FileLock(f"{root}.lock"):
        elsewhere.mkdir(parents=True, exist_ok=True)
        users.mkdir(exist_ok=True)
        if not any(users.iterdir()):
            options = ["--few-rows", "--master", "local[2]", "--conf", "spark.driver.memory=1500m"]
            status, said = spark_command(environment, "start", *options, cwd=elsewhere)
            assert status == 0, said
            assert "the Spark server started" in said
        mine.touch()
    server = Server(**json.loads(found.read_text(encoding="utf-8")))
    yield ConnectServer(environment, server.address)
    with FileLock(f"{root}.lock"):
        mine.unlink()
        if any(users.iterdir()):
            return
        status, said = spark_command(environment, "stop", cwd=elsewhere)
        assert status == 0, said
        assert "stopped the Spark server" in said
        assert not server.alive
    assert not (elsewhere / "data").exists(), "nothing is written where the server stands"


@pytest.fixture(scope="session")
def market(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Market:
    """A topology after two runs. Tests only read it: a test that changes tables changes a copy."""
    from tests.market import healthy_market

    return healthy_market(tmp_path_factory.mktemp("market"), spark)
