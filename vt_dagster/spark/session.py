"""Builds the Spark session: UTC, with Delta Lake and Kafka, little log output, tuned for small runs.

Importing this module starts nothing. ``resolve_jars`` finds the jars that PySpark does not ship,
``build_session`` starts (or reuses) a session with them, and checks that it has Delta Lake and UTC. A
JVM that starts prints nothing; one that fails gives a one-line reason.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vt_dagster.errors import SparkUnavailableError
from vt_dagster.spark.class_archive import JVM_OPTIONS, archive_of
from vt_dagster.spark.jars import (
    SERIES,
    newest,
    one_line,
    pyspark_series,
    resolve_jars,
    series_of,
    supported,
)

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark.sql import SparkSession

# Session requirements


DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
TIME_ZONE = "spark.sql.session.timeZone"
_LIMITS = " ".join(
    f"-Dorg.apache.avro.limits.{part}.maxLength={most}"
    for part, most in {"string": 2**27, "bytes": 2**27, "collectionItems": 2**24}.items()
)
"""Limits of a part of an Avro message. Avro allocates as much as the message says before it reads it: a
few bytes of another format may ask for gigabytes, and end the JVM."""
EXTENSIONS, CATALOG = "spark.sql.extensions", "spark.sql.catalog.spark_catalog"
_UTC = {
    "UTC",
    "Etc/UTC",
    "Zulu",
    "Etc/Zulu",
    "GMT",
    "Etc/GMT",
    "Universal",
    "Etc/Universal",
    "Z",
    "+00:00",
}
"""Accepted names of UTC, the time zone of all tables."""

_MEANING = {
    "spark.sql.timestampType": ("TIMESTAMP_LTZ",),
    "spark.sql.ansi.enforceReservedKeywords": ("FALSE",),  # ``left`` and ``right`` name sides of joins
    "spark.sql.ansi.doubleQuotedIdentifiers": ("FALSE",),
    "spark.sql.parser.escapedStringLiterals": ("FALSE",),
    # LEGACY reads texts as times that other sessions refuse
    "spark.sql.legacy.timeParserPolicy": ("CORRECTED", "EXCEPTION"),
}
"""Settings that could change the meaning of types and expressions, with their accepted values."""

_with_delta: weakref.WeakSet[Any] = weakref.WeakSet()
"""Sessions of a supported Spark with Delta Lake. Cached: both remain, and the check takes time."""


def lacking(session: SparkSession) -> list[str]:
    """Returns the missing requirements of a session, each with the actual value; empty = complete.

    The settings are read each time, because other users of the session may change its time zone.

    Raises:
        SparkUnavailableError: the session's Spark is of no supported series.
    """
    extensions = session.conf.get(EXTENSIONS, "") or ""
    catalog = session.conf.get(CATALOG, "") or ""
    zone = session.conf.get(TIME_ZONE, "") or ""
    found: list[str] = []
    if DELTA_EXTENSION not in extensions:
        found.append(f"{EXTENSIONS}={DELTA_EXTENSION}, it has {extensions or 'none'!r}")
    if not catalog:
        found.append(f"{CATALOG}={DELTA_CATALOG}, it has 'none'")
    if zone not in _UTC:
        found.append(f"{TIME_ZONE}=UTC, it has {zone!r}")
    if session not in _with_delta and catalog:
        series = series_of(session.version)
        if series not in SERIES:
            raise SparkUnavailableError(
                f"Expected a session of Spark {supported()}, got one of Spark {session.version}, for "
                "which no jars are known. Use a server or cluster of one of these series, and the "
                f'PySpark of the same series: pip install "pyspark[connect]=={newest()}.*".'
            )
        try:
            session.catalog.currentDatabase()  # loads the catalog's class
            _with_delta.add(session)
        except Exception as error:  # from py4j or gRPC, depending on the class that is missing
            found.append(f"the jars of {SERIES[series][0]} ({one_line(error)[:200]})")
    for key, wanted in _MEANING.items():
        value = session.conf.get(key, wanted[0]) or wanted[0]
        if value.upper() not in wanted:
            found.append(f"{key}={' or '.join(wanted)}, it has {value!r}")
    return found


# Launch


def not_started(target: str, reason: str) -> SparkUnavailableError:
    return SparkUnavailableError(
        f"Expected a Spark session on {target}, got: {reason.rstrip('.')}. "
        "Check the address and the Spark settings."
    )


@contextlib.contextmanager
def quiet_start(target: str) -> Iterator[Any]:
    """Yields a launcher for the JVM; holds the JVM's stderr back until the session exists.

    If the start fails, one line of the JVM's output becomes the error, and the rest is dropped.
    """
    from py4j.protocol import Py4JNetworkError
    from pyspark.java_gateway import launch_gateway

    stderr: _JvmStderr | None = None

    def launch(conf: Any) -> JavaGateway:
        nonlocal stderr
        stderr = _JvmStderr()
        with stderr.writer() as handle:
            return launch_gateway(conf, popen_kwargs={"stderr": handle})

    try:
        yield launch
    except Exception as error:
        # In these cases the exception names a consequence only; the JVM's output has the cause.
        gone = isinstance(error, Py4JNetworkError | ConnectionError)
        next_only = gone or re.search("JAVA_GATEWAY_EXITED|stopped SparkContext", str(error))
        reason = stderr.reason() if stderr and next_only else ""
        if stderr:
            stderr.release(drop=True)
        if reason:
            raise not_started(target, reason) from None
        raise
    if stderr:
        stderr.release()


class _JvmStderr:
    """Copies the JVM's stderr to this process's stderr, without one useless warning."""

    _NOISE = b"WARNING: Using incubator modules"
    _NO_JVM = "Error occurred during initialization of VM"
    _OPTIONS = re.compile(r"(NOTE: )?Picked up J\w+_OPTIONS")

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._lock = threading.Lock()
        self._held: collections.deque[bytes] | None = collections.deque(maxlen=2000)
        self._thread = threading.Thread(target=self._copy, name="spark-stderr", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def writer(self) -> Iterator[int]:
        """Yields the descriptor for the JVM; closes this process's copy at the end."""
        try:
            yield self._write
        finally:
            os.close(self._write)

    def release(self, drop: bool = False) -> None:
        """Writes the held lines (or drops them), and copies all later lines at once."""
        with self._lock:
            held, self._held = self._held or (), None
            if not drop:
                for line in held:
                    os.write(2, line)

    def reason(self) -> str:
        """Returns the error in the JVM's own output, or its first line, without the prefix of a log
        line. The second one if the first says only that there is no JVM."""
        self._thread.join(timeout=2)  # the thread ends when the JVM has ended
        with self._lock:
            lines = [line.decode(errors="replace").strip() for line in self._held or ()]
        own = [line for line in lines if line and not self._OPTIONS.match(line)]
        errors = [line for line in own if line.startswith("Exception in thread")]
        first = next(iter([*errors, *(line for line in own if line != self._NO_JVM), *own]), "")
        return re.sub(r'^(Exception in thread "\w+"|\S+ \S+ ERROR \w+:) ', "", first)

    def _copy(self) -> None:
        # os.write, not sys.stderr: a daemon thread must not hold its lock when Python exits.
        with os.fdopen(self._read, "rb") as lines:
            for line in lines:
                if line.startswith(self._NOISE):
                    continue
                with self._lock:
                    if self._held is not None:
                        self._held.append(line)
                    else:
                        with contextlib.suppress(OSError):
                            os.write(2, line)


# Session


__all__ = ["build_session", "resolve_jars"]

JAVA_VERSIONS = range(17, 22)  # Spark 4 needs 17; from 24 on Hadoop's login fails in Spark 4.0
FEW_QUERIES = {
    # With C1 only, the default code cache is too small, and the JVM stops compiling when it is full.
    JVM_OPTIONS: "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
}
"""Settings for a process with few queries over few rows: optimizing such queries takes longer than
running them."""

_CONNECT_PORT = 15002
_CONNECT_MODE = "SPARK_CONNECT_MODE_ENABLED"
"""PySpark's variable: functions like ``F.col`` build expressions for Spark Connect."""
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_CONNECT_SECONDS = 5.0  # for a TCP connection to a master
_ANSWER_SECONDS = 20  # for an answer of Spark Connect


def build_session(
    app_name: str = "vt_dagster",
    master: str = "local[*]",
    remote: str | None = None,
    conf: Mapping[str, str] = {},
    create: Callable[[dict[str, str]], SparkSession] | None = None,
) -> SparkSession:
    """Starts a Spark session with Delta Lake and Kafka, or reuses the active session of this process.

    The session's time zone is UTC. ``conf`` overrides every other default; jars, SQL extensions
    and JVM options of ``conf`` are added to this function's own. In a reused session, settings that
    only take effect at JVM start have no effect. With a ``local`` master, Python workers use this
    interpreter (unless ``PYSPARK_PYTHON`` is set).

    Args:
        app_name: The name Spark shows for this application.
        master: ``local[*]``, ``local-cluster[...]``, ``spark://host:port`` or any other master.
        remote: ``sc://host:port`` connects to a Spark Connect server instead: master, jars and
            driver defaults do not apply; the server must have Delta Lake, and keeps its settings.
        conf: Spark settings.
        create: Creates the session from its settings; None = PySpark's builder, whose
            ``getOrCreate`` reuses the context that was started here.

    Raises:
        SparkUnavailableError: no Java or a wrong one, a PySpark or a Spark of no supported series, an
            unreachable master, missing jars, a reused session without Delta Lake, or a time zone other
            than UTC in ``conf``.
    """
    pyspark_series()
    zone = conf.get(TIME_ZONE, "UTC")
    if zone != "UTC":
        raise SparkUnavailableError(
            f"Expected spark.sql.session.timeZone=UTC, got {zone!r}: versions are compared by UTC "
            "timestamps. Remove the setting and convert where times are shown."
        )
    with _forgotten_if_refused():
        try:
            create = create or _built
            if remote:
                session = _connect(app_name, remote, conf, create)
            else:
                session = _classic(app_name, master, conf, create)
            lacks = lacking(session)
        except SparkUnavailableError:
            raise
        except Exception as error:  # whatever PySpark, py4j or gRPC raise while a session starts
            raise not_started(shown(remote or master), _reason(error)) from None
        if lacks:
            raise SparkUnavailableError(
                f"Expected a Spark session with Delta Lake in UTC, but the session in use lacks "
                f"{'; '.join(lacks)}. "
                + (
                    "Start a Spark Connect server that has all of that."
                    if remote
                    else "Stop it first (spark.stop()), or create it with build_session()."
                )
            )
    close_when_interrupted(session)
    return session


@contextlib.contextmanager
def _interrupts_kept() -> Generator[None]:
    """Keeps the process's handler of interrupts, if it has one other than Python's own.

    PySpark installs one that raises ``KeyboardInterrupt`` after a call to the JVM, which uses the
    connection of the interrupted call. Dagster cancels a step by its own handler; with PySpark's, the
    step fails with these two errors instead.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and callable(before) and before is not signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def close_when_interrupted(session: Any) -> None:
    """Makes py4j close the connection of a call to the JVM that is interrupted by any exception.
    Without effect on Spark Connect.

    py4j itself does so for ``KeyboardInterrupt`` only. Dagster cancels a run with another exception;
    without this, each later call of the thread would get the answer to the previous call.
    """
    context = getattr(session, "_sc", None)
    client: Any = None if context is None else context._gateway._gateway_client
    if not hasattr(client, "get_thread_connection") or "send_command" in vars(client):
        return
    send = client.send_command

    def send_or_close(*command: Any, **how: Any) -> Any:
        try:
            return send(*command, **how)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException:
            connection = client.get_thread_connection()
            if connection is not None:
                connection.close()
            raise

    client.send_command = send_or_close


def shown(address: str) -> str:
    """Returns an address without its parameters: one of them may be a token."""
    return address.partition(";")[0].rstrip("/")


def _reason(error: Exception) -> str:
    """Returns in one line why a session did not start; for gRPC's long errors, the status and the
    details."""
    details = getattr(error, "details", None)
    if callable(details):
        return str(details())
    found = re.search(r'status = StatusCode\.(\w+)\s+details = "([^"]*)"', str(error))
    return f"{found[1]}: {found[2]}" if found else one_line(error)


@contextlib.contextmanager
def _forgotten_if_refused() -> Iterator[None]:
    """Ends a session on Spark Connect that was created here and then refused. PySpark would return it
    to the next caller that asks for a session, whatever the address."""
    before, mode = _connected(), os.environ.get(_CONNECT_MODE)
    try:
        yield
    except SparkUnavailableError:
        refused = _connected()
        if refused is not None and refused is not before:
            refused.release_session_on_close = False  # the server may not know it
            refused.stop()
        if mode is None and before is None:
            os.environ.pop(_CONNECT_MODE, None)
        raise


def _connected() -> Any:
    """Returns the active session on Spark Connect; None = there is none."""
    module = sys.modules.get("pyspark.sql.connect.session")
    return None if module is None else module.SparkSession.getActiveSession()


def _built(settings: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def connect_settings(app_name: str, remote: str, conf: Mapping[str, str]) -> dict[str, str]:
    """Returns all settings of a session on a Spark Connect server."""
    return {"spark.remote": remote, "spark.app.name": app_name, **conf, TIME_ZONE: "UTC"}


def _connect(
    app_name: str,
    remote: str,
    conf: Mapping[str, str],
    create: Callable[[dict[str, str]], SparkSession],
) -> SparkSession:
    from pyspark.sql.utils import is_remote

    if not remote.startswith("sc://"):
        raise SparkUnavailableError(
            f"Expected a Spark Connect address like sc://host:15002, got {shown(remote)!r}; "
            "pass a Spark master as master=... instead."
        )
    if _running() and not is_remote():
        raise SparkUnavailableError(
            f"Expected no local Spark session while connecting to {shown(remote)}, but one is active "
            "in this process; stop it (spark.stop()) or use a new process."
        )
    _check_reachable(remote, default_port=_CONNECT_PORT)
    check_connect(remote)
    silence_connect()
    # Windows over whole tables are intended; a classic session has this warning in its log only.
    warnings.filterwarnings("ignore", "WARN WindowExpression: No Partition", UserWarning)
    session = create(connect_settings(app_name, remote, conf))
    _retry_while_it_runs(session, remote)
    return session


def silence_connect() -> None:
    """Keeps Spark Connect's client from logging each refused call, because some calls are made only to
    see whether they are refused.

    PySpark disables that logger, unless SPARK_CONNECT_LOG_LEVEL is set. Dagster enables it again in
    each run, if its instance has settings: ``logging.config.dictConfig`` for the handlers of
    ``python_logs`` enables all loggers. It leaves their levels.
    """
    if "SPARK_CONNECT_LOG_LEVEL" not in os.environ:
        logging.getLogger("pyspark.sql.connect.logging").setLevel(logging.CRITICAL + 1)


def _retry_while_it_runs(session: SparkSession, remote: str) -> None:
    """Lets operations fail at once if a server on this machine has ended, and with it its sessions.
    Spark's client would retry each operation for ten minutes."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    parts = urlsplit(f"//{_authority(remote)}")
    host, port = parts.hostname or "", parts.port or _CONNECT_PORT
    if host not in _THIS_MACHINE:
        return

    class WhileItRuns(DefaultPolicy):
        def can_retry(self, e: BaseException) -> bool:
            if not super().can_retry(e):
                return False
            if is_open(host, port):
                return True
            raise SparkUnavailableError(
                f"Expected the Spark server on {host}:{port} to answer, but it has ended: it was "
                "stopped, or killed, perhaps for lack of memory. Uncommitted work is lost. Start "
                "it again (vt-dagster spark start), and run again."
            )

    client: Any = getattr(session, "client")  # noqa: B009  a classic session has none
    client.set_retry_policies([WhileItRuns()])


def _authority(url: str) -> str:
    return re.split(r"[/;]", url.partition("://")[2], maxsplit=1)[0]


def _classic(
    app_name: str,
    master: str,
    conf: Mapping[str, str],
    create: Callable[[dict[str, str]], SparkSession],
) -> SparkSession:
    from pyspark import SparkConf, SparkContext

    running = _running()
    if running is not None:
        for key, value in {**conf, TIME_ZONE: "UTC"}.items():
            if running.conf.isModifiable(key):
                running.conf.set(key, value)
        return running
    if master.startswith("sc://"):
        raise SparkUnavailableError(
            f"Expected a Spark master, got the Spark Connect address {shown(master)!r}; "
            "pass it as remote=..."
        )
    if os.environ.get("SPARK_REMOTE"):
        raise SparkUnavailableError(
            f"Expected to start Spark with master {master!r}, but SPARK_REMOTE is set to "
            f"{shown(os.environ['SPARK_REMOTE'])!r}; pass it as remote=..., or unset it."
        )
    if master.startswith("spark://"):
        _check_reachable(master)
    own_jvm = SparkContext._gateway is None
    archive = archive_of(check_spark_home(), check_java(), conf) if own_jvm else None
    jvm_conf = archive.added_to(conf) if archive else conf
    settings = session_settings(app_name, master, resolve_jars(), jvm_conf)
    if master.startswith("local"):
        python = conf.get("spark.pyspark.python", sys.executable)
        os.environ.setdefault("PYSPARK_PYTHON", python)
    spark_conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with _interrupts_kept(), quiet_start(master) as launch:
        SparkContext(conf=spark_conf, gateway=launch(spark_conf) if own_jvm else None)
        session = create(settings)
        if not own_jvm:  # a JVM started elsewhere may lack the jars: load a class of Delta
            session.catalog.currentDatabase()
    _remember_classes(session)
    if archive:
        archive.make_at_exit()
    return session


def _remember_classes(session: SparkSession) -> None:
    """Caches the JVM classes and methods that PySpark uses for every column expression.

    PySpark looks them up each time, and the JVM then searches all its jars: a third of the planning
    time.
    """
    jvm: Any = session.sparkContext._jvm
    functions, window = "org.apache.spark.sql.functions", "org.apache.spark.sql.expressions.Window"
    for name in (functions, window, "PythonUtils", "PythonSQLUtils"):
        found = getattr(jvm, name)
        for member in dir(found):
            setattr(found, member, getattr(found, member))
        setattr(jvm, name, found)
    jvm.functions = getattr(jvm, functions)


def _running() -> SparkSession | None:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def session_settings(
    app_name: str, master: str, jars: list[Path], conf: Mapping[str, str]
) -> dict[str, str]:
    """Returns all settings of a new session. Lists (jars, extensions, JVM options) are concatenated."""
    _check_files(conf.get("spark.jars", ""))
    log4j = Path(__file__).with_name("log4j2.properties").as_uri()
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.driver.memory": "2g",
        "spark.sql.adaptive.enabled": "true",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Spark's own default, INT96, is deprecated in Parquet and larger.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # Cached rows are read two or three times only, and choosing a compression per column takes a
        # tenth of an operator's time.
        "spark.sql.inMemoryColumnarStorage.compressed": "false",
        # A run with few records compiles some sixty classes, a corrected join's twice as many. With
        # Spark's default, 100, runs of two assets in turns compile all of theirs each time.
        "spark.sql.codegen.cache.maxEntries": "1000",
        # It calls the JVM several times per column expression, only to improve error messages.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        CATALOG: DELTA_CATALOG,
    }
    cores = _local_cores(master)
    if cores:
        settings["spark.sql.shuffle.partitions"] = str(max(2, 2 * cores))
        # The number of tasks in which Delta's VACUUM lists a directory; Spark's default is 10,000.
        settings["spark.sql.sources.parallelPartitionDiscovery.parallelism"] = str(2 * cores)
    if re.match(r"local(\[|$)", master):  # works even if the host name does not resolve
        settings |= {"spark.driver.host": "localhost", "spark.driver.bindAddress": "127.0.0.1"}
    settings |= dict(conf)

    def joined(key: str, separator: str, *own: str) -> str:
        given = [item for item in conf.get(key, "").split(separator) if item]
        return separator.join([*own, *(item for item in given if item not in own)])

    driver = conf.get(JVM_OPTIONS, "")
    executor = conf.get("spark.executor.extraJavaOptions", "")
    # The JVM uses the last value of a repeated property, so the user's log4j file overrides ours, and
    # our UTC overrides the user's time zone.
    settings |= {
        "spark.jars": joined("spark.jars", ",", *(jar.as_uri() for jar in jars)),
        EXTENSIONS: joined(EXTENSIONS, ",", DELTA_EXTENSION),
        # On stderr, which quiet_start reads, also why the JVM does not start.
        JVM_OPTIONS: (
            f"-XX:+DisplayVMOutputToStderr {_LIMITS} -Dlog4j2.configurationFile={log4j} {driver} "
            "-Duser.timezone=UTC"
        ),
        "spark.executor.extraJavaOptions": f"{_LIMITS} {executor} -Duser.timezone=UTC",
        TIME_ZONE: "UTC",
    }
    return settings


def _local_cores(master: str) -> int | None:
    """Returns the cores of a master on this machine; None for a real cluster."""
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
    if cluster:
        return int(cluster[1]) * int(cluster[2])
    local = re.fullmatch(r"local(?:\[\s*(\d+|\*)\s*(?:,.*)?\])?", master)
    if not local:
        return None
    return (os.cpu_count() or 1) if local[1] == "*" else int(local[1] or 1)


# -------------------------------------------------------------------------------------- checks


def _check_files(jars: str) -> None:
    paths = [item.removeprefix("file:") for item in jars.split(",") if item]
    missing = [p for p in paths if not re.match(r"\w{2,}:", p) and not Path(p).exists()]
    if missing:
        raise SparkUnavailableError(
            f"Expected the jar {', '.join(missing)} of spark.jars, but there is no such file; "
            "correct the path."
        )


def check_spark_home() -> Path:
    """Returns the directory of Spark. If it is from SPARK_HOME, checks its version, because PySpark
    starts that Spark whatever its version is."""
    import pyspark

    home, series = os.environ.get("SPARK_HOME"), pyspark_series()
    if home and not any(Path(home, "jars").glob(f"spark-core_2.13-{series}.*.jar")):
        raise SparkUnavailableError(
            f"Expected Spark {series} with Scala 2.13 in SPARK_HOME={home}, since PySpark is "
            f"{series}; found no such jars there. Unset SPARK_HOME to use the Spark that PySpark ships."
        )
    return Path(home or Path(pyspark.__file__).parent)


def check_java() -> str:
    """Returns path and version of the java that Spark's launcher uses; checks that the version is
    supported."""
    wanted = f"Java {JAVA_VERSIONS[0]} or {JAVA_VERSIONS[-1]}"
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin")) if home else None)
    if java is None:
        where = f"in JAVA_HOME={home}" if home else "on PATH, and JAVA_HOME is not set"
        raise SparkUnavailableError(
            f"Expected {wanted}, found no java {where}. Install one (a JRE is enough) "
            "and set JAVA_HOME to it."
        )
    try:
        run = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
        output = run.stderr + run.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        output = one_line(error)
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    if not found or int(found[1]) not in JAVA_VERSIONS:
        got = f"Java {found[1]}" if found else f"an answer without a version ({output[:80]!r})"
        raise SparkUnavailableError(
            f"Expected {wanted} for Spark {pyspark_series()}, got {got} from {java}. "
            f"Set JAVA_HOME to a {wanted} installation."
        )
    return f"{Path(java).resolve()} {output}"


def _check_reachable(url: str, default_port: int | None = None) -> None:
    """Checks that one of the hosts of ``spark://a:7077,b:7077`` or ``sc://host:15002/;...`` accepts
    connections."""
    problems: list[str] = []
    for address in _authority(url).split(","):
        try:
            parts = urlsplit(f"//{address}")
            host, port = parts.hostname, parts.port or default_port
            if not host or not port:
                raise ValueError("no host:port")
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
            return
        except (OSError, ValueError) as error:
            problems.append(f"{address or shown(url)}: {one_line(error)}")
    raise SparkUnavailableError(
        f"Expected Spark to answer at {shown(url)}, got no connection ({'; '.join(problems)}). "
        "Start it, or correct the address."
    )


def is_open(host: str, port: int) -> bool:
    """Returns whether a port accepts connections."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def check_connect(url: str) -> None:
    """Checks that Spark Connect answers at an open port; without this check its client would retry for
    a long time."""
    import grpc
    from pyspark.sql.connect.client import DefaultChannelBuilder

    builder = DefaultChannelBuilder(url)
    channel = builder.toChannel()
    try:
        grpc.channel_ready_future(channel).result(timeout=_ANSWER_SECONDS)
    except grpc.FutureTimeoutError:
        by_tls = builder.use_ssl or (builder.secure and builder.host != "localhost")
        tls = (
            ": with it, or with a token for another host than localhost, the server needs TLS and a "
            "certificate that this process trusts (GRPC_DEFAULT_SSL_ROOTS_FILE_PATH)"
        )
        raise SparkUnavailableError(
            f"Expected Spark Connect to answer at {shown(url)}, but what listens there does not speak "
            f"its protocol (waited {_ANSWER_SECONDS} s). Correct the address or its "
            f"use_ssl{tls if by_tls else ''}."
        ) from None
    finally:
        channel.close()
