"""The archive of Spark's classes in the user's cache directory: a new JVM loads them from it faster.

A JVM loads some 22,000 classes for its first run, which takes a quarter of the run's CPU time. Java's
class data sharing keeps them in a file (170 MB), one for each Java and Spark of a user. A process that
found no archive starts, when it ends, a process of low priority that makes one: the command
``vt-dagster class-archive``.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vt_dagster.spark.jars import cache_dir

HALF = ".made-"
"""Prefix of the directories in which archives are made."""
ARCHIVE_ENV = "VT_DAGSTER_CLASS_ARCHIVE"
JVM_OPTIONS = "spark.driver.extraJavaOptions"

QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"
"""The JVM option without which the JVM prints a warning if an archive does not fit."""

_OFF = "off"
_OF_JVMS = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
"""Variables from which each JVM takes options."""
_OF_CLASS_PATH = ("SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH")
"""Variables that change Spark's class path."""
_DAY = 86_400.0


@dataclass(frozen=True)
class ClassArchive:
    """The archive of one Java and one Spark. The file may not exist.

    Args:
        key: a digest of the Java version, its path, and Spark's jars.
    """

    key: str

    @staticmethod
    def of(java: str, spark_home: Path) -> ClassArchive:
        """Returns the archive of a Java and a Spark.

        Args:
            java: path and version of the Java.
        """
        about = [java, *(os.environ.get(name, "") for name in _OF_CLASS_PATH)]
        for jar in sorted((spark_home / "jars").glob("*.jar")):
            found = jar.stat()
            about.append(f"{jar} {found.st_size} {int(found.st_mtime)}")
        return ClassArchive(hashlib.sha256("\n".join(about).encode()).hexdigest()[:16])

    @staticmethod
    def directory() -> Path:
        return cache_dir() / "classes"

    def file(self) -> Path | None:
        """Returns the archive; None = there is none, or it is not complete.

        The file's name has its size, because a JVM that maps a truncated archive crashes.
        """
        for found in self.directory().glob(f"{self.key}-*.jsa"):
            with contextlib.suppress(OSError):
                if found.name == self._name(found.stat().st_size):
                    return found
        return None

    def added_to(self, conf: Mapping[str, str]) -> dict[str, str]:
        """Returns Spark settings with which the driver's JVM maps the archive, if there is one.

        The JVM verifies the archive's checksum (0.1 s). It works without the archive and prints nothing
        if the archive does not fit or is damaged.
        """
        file = self.file()
        if file is None:
            return dict(conf)
        with contextlib.suppress(OSError):
            os.utime(file)  # archives that are not used are removed
        own = f'"-XX:SharedArchiveFile={file}" -XX:+VerifySharedSpaces {QUIET}'
        return {**conf, JVM_OPTIONS: f"{own} {conf.get(JVM_OPTIONS, '')}".strip()}

    def keep(self, made: Path) -> Path:
        """Moves a new archive to its place; removes archives that were not used for a month, and what
        killed processes have left."""
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        kept = self.directory() / self._name(made.stat().st_size)
        made.replace(kept)
        for other in self.directory().glob("*.jsa"):
            with contextlib.suppress(OSError):
                if other != kept and _age(other) > 30 * _DAY:
                    other.unlink()
        for folder in self.directory().glob(f"{HALF}*"):
            with contextlib.suppress(OSError):
                if _age(folder) > _DAY:
                    shutil.rmtree(folder, ignore_errors=True)
        return kept

    def make_at_exit(self) -> None:
        """Starts a process of low priority that makes the archive, when this process ends.

        No process is started if an archive exists by then, on CI (``CI`` is set), or if an attempt
        began less than a day ago: Java may have no class data sharing, or the disk may be full.
        """
        atexit.register(self._make_in_background)

    def _make_in_background(self) -> None:
        if os.environ.get("CI") or os.name != "posix":
            return
        with contextlib.suppress(OSError):
            if self.file() is None and self._first_today():
                subprocess.Popen(
                    ["nice", "-n", "19", sys.executable, "-m", "vt_dagster.cli", "class-archive"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=self.directory(),
                    start_new_session=True,
                )

    def _first_today(self) -> bool:
        """Whether no other process has begun an attempt less than a day ago."""
        began = self.directory() / f"{self.key}.began"
        began.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if began.exists() and _age(began) > _DAY:
            began.unlink()
        began.touch(exist_ok=False)
        return True

    def _name(self, size: int) -> str:
        return f"{self.key}-{size}.jsa"


def archive_of(spark_home: Path, java: str, conf: Mapping[str, str]) -> ClassArchive | None:
    """Returns the archive for a JVM with these settings; None = the JVM gets no archive, because
    archives are switched off, or the options of the JVM already set one."""
    options = [conf.get(JVM_OPTIONS, ""), *(os.environ.get(name, "") for name in _OF_JVMS)]
    chosen = any(re.search("Xshare|SharedArchive|ArchiveClasses", option) for option in options)
    if chosen or os.environ.get(ARCHIVE_ENV, "").lower() == _OFF:
        return None
    return ClassArchive.of(java, spark_home)


def _age(path: Path) -> float:
    """Returns the seconds since a file was changed."""
    return time.time() - path.stat().st_mtime
