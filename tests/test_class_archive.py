"""The class archive of Spark in the user's cache: when it is written and used, and that it is
harmless."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from vt_dagster.spark.class_archive import ARCHIVE_ENV, JVM_OPTIONS, ClassArchive, archive_of
from vt_dagster.spark.jars import resolve_jars

SESSION = """
from vt_dagster.spark.session import build_session

log = "-Xlog:class+load:file=classes.log"
spark = build_session(master="local[1]", conf={"spark.driver.extraJavaOptions": log})
print(spark.range(3).count())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of class archives in a user's empty cache; its path contains a space."""
    home = tmp_path / "a home"
    home.mkdir()
    monkeypatch.setenv("VT_DAGSTER_JARS", str(resolve_jars()[0].parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in (ARCHIVE_ENV, "JDK_JAVA_OPTIONS", "CI"):
        monkeypatch.delenv(name, raising=False)
    return home / "vt_dagster" / "classes"


@pytest.fixture
def spark_home(tmp_path: Path) -> Path:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark.jar").write_bytes(b"1")
    return tmp_path


def run_python(code: str, cwd: Path, *words: str) -> str:
    """Runs a Python process; returns its output with warnings and errors."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        cwd=cwd,
    )
    return done.stdout


def archived_class_count(cwd: Path) -> int:
    """The number of classes that the JVM of ``SESSION`` loaded from the archive."""
    return (cwd / "classes.log").read_text().count("shared objects file (top)")


def test_archive_per_java_and_spark(cache: Path, spark_home: Path) -> None:
    first = ClassArchive.of("/java 17.0.15", spark_home)
    assert first == ClassArchive.of("/java 17.0.15", spark_home)
    assert first != ClassArchive.of("/java 21.0.2", spark_home)
    (spark_home / "jars" / "spark.jar").write_bytes(b"12")
    assert first != ClassArchive.of("/java 17.0.15", spark_home)


def test_truncated_archive_is_not_used(cache: Path, spark_home: Path, tmp_path: Path) -> None:
    """A truncated archive is not used, since a JVM that maps it crashes."""
    archive = ClassArchive.of("/java 17", spark_home)
    assert archive.file() is None
    cache.mkdir(parents=True)
    made = tmp_path / "made"
    made.write_bytes(b"classes")
    kept = archive.keep(made)
    assert archive.file() == kept
    kept.write_bytes(b"class")
    assert archive.file() is None
    assert archive.added_to({JVM_OPTIONS: "-Dx=1"}) == {JVM_OPTIONS: "-Dx=1"}


def test_user_options_come_last(cache: Path, spark_home: Path, tmp_path: Path) -> None:
    archive = ClassArchive.of("/java 17", spark_home)
    cache.mkdir(parents=True)
    (tmp_path / "made").write_bytes(b"classes")
    file = archive.keep(tmp_path / "made")
    options = archive.added_to({JVM_OPTIONS: "-Dx=1", "spark.a": "b"})
    assert options["spark.a"] == "b"
    assert options[JVM_OPTIONS].startswith(f'"-XX:SharedArchiveFile={file}"')
    assert options[JVM_OPTIONS].endswith(" -Dx=1")


def test_unused_archives_are_removed(cache: Path, spark_home: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    names = ("unused-1.jsa", "used-1.jsa", ".made-dead", ".made-alive")
    unused, used, dead, alive = (cache / name for name in names)
    for file in (unused, used):
        file.touch()
    for folder in (dead, alive):
        folder.mkdir()
    os.utime(unused, (0, time.time() - 31 * 86_400))
    os.utime(dead, (0, time.time() - 2 * 86_400))
    (tmp_path / "made").write_bytes(b"classes")
    kept = ClassArchive.of("/java 17", spark_home).keep(tmp_path / "made")
    assert {*cache.iterdir()} == {kept, used, alive}


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (ARCHIVE_ENV, "off"),
        ("JDK_JAVA_OPTIONS", "-XX:SharedArchiveFile=/my.jsa"),
        ("JAVA_TOOL_OPTIONS", "-Xshare:off"),
    ],
)
def test_environment_disables_archive(
    variable: str, value: str, cache: Path, spark_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert archive_of(spark_home, "/java 17", {}) is not None
    assert archive_of(spark_home, "/java 17", {JVM_OPTIONS: "-XX:ArchiveClassesAtExit=/my.jsa"}) is None
    monkeypatch.setenv(variable, value)
    assert archive_of(spark_home, "/java 17", {}) is None


AT_EXIT = """
import sys
from vt_dagster.spark.class_archive import ClassArchive

sys.executable = sys.argv[1]
ClassArchive("a_key").make_at_exit()
"""
TELLS = """#!/bin/sh
echo "$(nice) $(pwd) $@" >> "$0.told"
"""
"""A script that replaces Python, which at low priority takes minutes to import on a busy machine."""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    made = tmp_path / "python"
    made.write_text(TELLS)
    made.chmod(0o700)
    return made


def test_archive_is_written_by_one_low_priority_process(
    cache: Path, tmp_path: Path, python: Path
) -> None:
    told = tmp_path / "python.told"
    assert run_python(AT_EXIT, tmp_path, str(python)) == ""
    assert run_python(AT_EXIT, tmp_path, str(python)) == ""  # the first process is still at work
    (began,) = cache.iterdir()
    os.utime(began, (0, time.time() - 2 * 86_400))
    assert (
        run_python(AT_EXIT, tmp_path, str(python)) == ""
    )  # the first process did not finish, days ago
    line = f"19 {cache} -m vt_dagster.cli class-archive\n"
    end = time.monotonic() + 60
    while not (told.exists() and told.read_text() == 2 * line):
        assert time.monotonic() < end, told.read_text() if told.exists() else "nothing"
        time.sleep(0.1)


@pytest.mark.parametrize("reason", ["CI", "no directory"])
def test_no_archive_on_ci_or_without_cache(
    reason: str, cache: Path, tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "CI":
        monkeypatch.setenv("CI", "true")
    else:
        cache.parent.touch()  # a file where the directory should be
    assert run_python(AT_EXIT, tmp_path, str(python)) == ""
    assert not cache.exists()


@pytest.mark.endurance
@pytest.mark.timeout(1800)
def test_session_uses_intact_archive(cache: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    command = [sys.executable, "-m", "vt_dagster.cli", "class-archive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=project)
    (archive,) = cache.iterdir()
    assert done.stdout.startswith(f"wrote {archive}, "), done.stderr
    assert not [*project.iterdir()]

    assert run_python(SESSION, tmp_path) == "3\n"
    assert archived_class_count(tmp_path) > 5_000

    archive.chmod(0o600)
    with archive.open("r+b") as file:  # the right size, but other contents
        file.seek(archive.stat().st_size // 2)
        file.write(bytes(100_000))
    assert run_python(SESSION, tmp_path) == "3\n"
    assert archived_class_count(tmp_path) == 0
