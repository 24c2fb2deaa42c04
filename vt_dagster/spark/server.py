"""A long-running Spark server on this machine: runs connect to it instead of starting a JVM each.

Dagster starts a process for each run, and a JVM takes seconds to start and some runs to warm up. The
server is Spark Connect with the jars and settings of ``build_session``. It listens on localhost only
and requires a token; port and token are in the user's cache directory.

Rows that a killed run has cached remain in memory until the server stops. Settings of a run's
``spark_config`` that only take effect at JVM start have no effect on the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from vt_dagster.errors import SparkUnavailableError
from vt_dagster.spark.class_archive import archive_of
from vt_dagster.spark.jars import cache_dir, resolve_jars
from vt_dagster.spark.session import (
    check_connect,
    check_java,
    check_spark_home,
    is_open,
    session_settings,
    shown,
)

SERVER = "server"
"""Value of ``remote`` or ``VT_DAGSTER_SPARK`` for the server that ``vt-dagster spark start`` starts."""
NAMED = "VT_DAGSTER_SPARK"
TOKEN = "SPARK_CONNECT_AUTHENTICATE_TOKEN"
"""Spark's own environment variable: the token that clients send, and that ``serve`` requires."""

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_START_SECONDS, _STOP_SECONDS = 180, 30


@dataclass(frozen=True)
class Server:
    """A started server.

    Args:
        pid: process id.
        port: port on localhost.
        token: required to connect.
        master: Spark master of the server.
        log: log file of the server.
    """

    pid: int
    port: int
    token: str
    master: str
    log: str

    @property
    def address(self) -> str:
        """Address for ``build_session(remote=…)``. Contains the token: do not log it."""
        return f"sc://localhost:{self.port}/;token={self.token}"

    @property
    def alive(self) -> bool:
        """Whether the server's process runs; a reused process id does not count."""
        command = ["ps", "-ww", "-o", "command=", "-p", str(self.pid)]  # -ww: ignore COLUMNS
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
        return _CLASS in listed.stdout and str(_file("conf")) in listed.stdout


def running() -> Server | None:
    """Returns the running server of this user and machine; None = none."""
    try:
        found = Server(**json.loads(_file("json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.alive else None


def start(master: str = "local[*]", conf: Mapping[str, str] = {}) -> Server:
    """Starts a server and waits until it answers; returns a running server unchanged.

    Args:
        master: Spark master of the server.
        conf: Spark settings; they override the defaults.

    Raises:
        SparkUnavailableError: the server does not start; the message quotes its output.
    """
    from filelock import FileLock

    _file("json").parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(_file("lock")):
        found = running()
        if found is not None:
            return found
        made, process = _launch(master, conf)
        try:
            _wait_for_answer(made, process)
        except BaseException:
            _end(made)
            raise
        _write(_file("json"), json.dumps(asdict(made)))
        return made


def stop() -> Server | None:
    """Stops the server with all running work; returns it, or None if none was running."""
    found = running()
    if found is not None:
        _end(found)
    _file("json").unlink(missing_ok=True)
    return found


def resolve_remote(remote: str | None) -> str | None:
    """Returns the Spark Connect address for ``remote``; None = Spark in this process.

    Args:
        remote: an address, or ``server``; None = the value of ``VT_DAGSTER_SPARK``.

    Raises:
        SparkUnavailableError: ``server`` is requested but not running; or the value of
            ``VT_DAGSTER_SPARK`` is no address.
    """
    named = remote or os.environ.get(NAMED) or None
    if not remote and named not in (None, SERVER) and not named.startswith("sc://"):
        raise SparkUnavailableError(
            f"Expected {NAMED} to be {SERVER!r} or a Spark Connect address like sc://host:15002, got "
            f"{shown(named)!r}; correct it, or unset it to start Spark in this process."
        )
    if named != SERVER:
        return named
    found = running()
    if found is None:
        raise SparkUnavailableError(
            "Expected the Spark server of this machine, but it is not running; start it: "
            f"vt-dagster spark start. To use none, set remote=None and unset {NAMED}."
        )
    return found.address


def _file(kind: str) -> Path:
    return cache_dir() / "spark" / f"server.{kind}"


def _write(path: Path, text: str) -> None:
    """Writes a file that only its user can read."""
    with open(path, "w", encoding="utf-8", opener=lambda p, f: os.open(p, f, 0o600)) as file:
        file.write(text)


def _launch(master: str, conf: Mapping[str, str]) -> tuple[Server, subprocess.Popen[bytes]]:
    home = check_spark_home()
    archive = archive_of(home, check_java(), conf)
    if archive:
        conf = archive.added_to(conf)
        archive.make_at_exit()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_urlsafe(24)
    settings = _settings("127.0.0.1", port, token, master, conf)
    command, environment = _command(home, _file("conf"), settings)
    with _file("log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    return Server(process.pid, port, token, master, str(_file("log"))), process


def serve(host: str, port: int, master: str = "local[*]", conf: Mapping[str, str] = {}) -> NoReturn:
    """Becomes a server for other machines, the process of a container: it logs to stdout, and ends with
    the first SIGTERM. Its clients send the token of the environment variable ``TOKEN``.

    Spark serves without TLS: a proxy before it has the certificate.

    Args:
        host: address to listen on.
        master: Spark master of the server.
        conf: Spark settings; they override the defaults.

    Raises:
        SparkUnavailableError: there is no token.
    """
    token = os.environ.get(TOKEN)
    if not token:
        raise SparkUnavailableError(
            f"Expected the token of the server in the environment variable {TOKEN}, found none: "
            "anyone who reaches the port could run code. Set it to a long random text, here and for "
            "the clients."
        )
    settings = _settings(host, port, token, master, conf)
    place = _file("serve.conf")
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_java()
    command, environment = _command(check_spark_home(), place, settings)
    os.execve(command[0], command, environment)


def _settings(host: str, port: int, token: str, master: str, conf: Mapping[str, str]) -> dict[str, str]:
    return {
        "spark.connect.grpc.binding.address": host,
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.authenticate.token": token,
        **session_settings("vt_dagster server", master, resolve_jars(), conf),
    }


def _command(home: Path, place: Path, settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command of a server and its environment.

    Settings (with the token) go to a file: every user of the machine can read a command line.
    """
    _write(place, "".join(f"{name} {value}\n" for name, value in settings.items()))
    environment = {k: v for k, v in os.environ.items() if k != "SPARK_REMOTE"}
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    submit = [str(home / "bin" / "spark-submit"), "--properties-file", str(place)]
    return [*submit, "--class", _CLASS, "spark-internal"], environment


def _wait_for_answer(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_SECONDS
    while not is_open("localhost", server.port):
        # Not server.alive: while the launcher becomes the JVM, ps may show no command for a moment.
        if process.poll() is not None or time.monotonic() > end:
            output = Path(server.log).read_text(encoding="utf-8", errors="replace")
            wrong = (line for line in output.splitlines() if "rror" in line or "xception" in line)
            raise SparkUnavailableError(
                f"Expected a Spark server on {server.master} to start, got: "
                f"{next(wrong, 'no answer').strip()[:300]}. See {server.log}; check the settings."
            )
        time.sleep(0.2)
    check_connect(server.address)


def _end(server: Server) -> None:
    end = time.monotonic() + _STOP_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)
        while server.alive:
            if time.monotonic() > end:
                os.kill(server.pid, signal.SIGKILL)
                end = float("inf")
            time.sleep(0.1)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(server.pid, os.WNOHANG)  # reaps it if it is a child of this process
