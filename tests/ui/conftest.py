"""Dagster on the data that the demo of a few days' flights left, and a browser that opens its pages."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests import demo_subset
from tests.conftest import ConnectServer

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
"""Flags for a browser in a container that sends no requests to other hosts."""


@pytest.fixture(scope="session")
def environment(
    tmp_path_factory: pytest.TempPathFactory, connect_server: ConnectServer
) -> dict[str, str]:
    """The environment of a process that uses the instance, which is a copy with a damaged table."""
    made, _ = demo_subset.demo_results(demo_subset.ALL, tmp_path_factory)
    data = shutil.copytree(made, tmp_path_factory.mktemp("ui") / "data")
    about = {
        **connect_server.environment,
        "VT_DAGSTER_SPARK": "server",
        "VT_DAGSTER_DATA": str(data),
        "DAGSTER_HOME": str(data / "dagster_home"),
        "VT_DAGSTER_EXPLORE": demo_subset.EXPLORE,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.ui.damaged_table"],
        cwd=ROOT,
        env=about,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return about


@contextlib.contextmanager
def serving(environment: dict[str, str], *command: str) -> Iterator[str]:
    """The address of a program of Dagster that serves the instance."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(environment["DAGSTER_HOME"]) / f"{command[0]}.log"
    program = str(Path(sys.executable).parent / command[0])
    words = [program, *command[1:], "-w", "workspace.yaml", "-p", str(port), "-h", "127.0.0.1"]
    with log.open("w") as out:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 180
        while not _answers(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        yield address
    finally:
        # SIGTERM to the group, then SIGKILL: the program may leave a code server behind.
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)


@pytest.fixture(scope="session")
def server(environment: dict[str, str]) -> Iterator[str]:
    """The address of a webserver on the instance. Its pages are only read, so no daemon runs."""
    with serving(environment, "dagster-webserver") as address:
        yield address


@pytest.fixture(scope="session")
def dev(environment: dict[str, str]) -> Iterator[str]:
    """The address of ``dg dev`` on the instance: webserver and daemon."""
    with serving(environment, "dg", "dev") as address:
        yield address


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/server_info", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def exploring(warehouse: str, **about: Any) -> Iterator[str]:
    """The address of a ``vt-dagster explore`` on a warehouse.

    Args:
        about: the working directory and environment of its process.
    """
    command = [str(Path(sys.executable).parent / "vt-dagster"), "explore", "--port", "0"]
    process = subprocess.Popen([*command, warehouse], stdout=subprocess.PIPE, text=True, **about)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="session")
def explore(environment: dict[str, str]) -> Iterator[str]:
    """The address of a ``vt-dagster explore`` on the instance's warehouse."""
    where = environment["VT_DAGSTER_DATA"]  # so that screenshots show no path of this machine
    with exploring("warehouse", cwd=where, env=environment) as address:
        yield address


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium; ``make browser`` installs one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        said = f"expected one of {names} on PATH, found none: make browser installs it"
        assert not os.environ.get("CI"), said
        pytest.skip(said)
    return found


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """One browser for all tests of a file."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots(environment: dict[str, str]) -> Path:
    """The directory for screenshots; ``VT_DAGSTER_SCREENSHOTS`` sets one that is kept."""
    where = os.environ.get("VT_DAGSTER_SCREENSHOTS")
    folder = Path(where) if where else Path(environment["VT_DAGSTER_DATA"]) / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
