"""The jars that Spark needs and PySpark does not ship, downloaded once into the user's cache.

Each jar is compared with its SHA-256 in ``jars.sha256`` beside this file, at the download and at every
use: hashing all jars takes less than 0.1 s, and sizes or times do not detect every change. After a
change of a coordinate below, write the checksums again::

    python -c "from vt_dagster.spark import jars; jars.write_checksums()"

and review the diff: the file then trusts whatever the repository has sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vt_dagster.errors import SparkUnavailableError, counted

# These versions depend on each other and on session.JAVA_VERSIONS: after a change, check all.
_VERSIONS = {"4.0": ("4.4.0", "4.0.0"), "4.1": ("4.4.0", "4.1.1"), "4.2": ("4.4.0", "4.2.0")}
"""By series of Spark: the version of Delta Lake, and that of Spark's Kafka source and Avro."""
SERIES = {
    series: (
        f"io.delta:delta-spark_{series}_2.13:{of_delta}",
        f"org.apache.spark:spark-sql-kafka-0-10_2.13:{of_spark}",
        f"org.apache.spark:spark-avro_2.13:{of_spark}",
    )
    for series, (of_delta, of_spark) in _VERSIONS.items()
}
"""The supported series of Spark, oldest first, each with the Maven coordinates of its jars."""

BROKER = ("org.apache.kafka:kafka_2.13:4.1.1",)
"""A Kafka broker for tests and demos."""

CHECKSUMS = Path(__file__).with_name("jars.sha256")
"""Checksums of all jars above and of their dependencies, in the format of ``sha256sum -c``."""

JARS_ENV = "VT_DAGSTER_JARS"

_HTTP_SECONDS = 20  # per request
_LOCK_SECONDS = 900.0  # another process may download the same jars over a slow connection
_MANIFEST = "jars.json"
_REFUSED = (
    "the download was discarded. Check the repositories in jgo's configuration file and try "
    "again, or set VT_DAGSTER_JARS to a directory that has the jars."
)


def resolve_jars() -> list[Path]:
    """Returns the jars that Spark needs and PySpark does not ship: Delta Lake, Kafka source and Avro.

    The first call on a machine downloads them (about 25 MB) with their dependencies from Maven
    Central, or from the repositories in jgo's configuration file, into the user's cache directory.
    Later calls verify the checksums and download damaged jars again. Concurrent calls from any number
    of processes are safe.

    If ``VT_DAGSTER_JARS`` names a directory, its ``*.jar`` are used and nothing is downloaded. These
    jars may be other builds, so their checksums are not verified.

    Raises:
        SparkUnavailableError: PySpark is of no supported series, the jars cannot be downloaded, or a
            checksum is unknown or differs.
    """
    coordinates = SERIES[pyspark_series()]
    given = os.environ.get(JARS_ENV)
    if given:
        return _jars_in(Path(given).expanduser(), coordinates)
    return _of_cache(f"pyspark-{version('pyspark')}", coordinates, _shipped())


def resolve_broker_jars() -> list[Path]:
    """Returns the jars of a Kafka broker (about 35 MB); repositories and cache as in
    :func:`resolve_jars`.

    Raises:
        SparkUnavailableError: the jars cannot be downloaded, or a checksum is unknown or differs.
    """
    return _of_cache("broker", BROKER, frozenset())


def resolve_maven_jars(*coordinates: str) -> list[Path]:
    """Returns the jars of Maven coordinates with their dependencies, cached as in :func:`resolve_jars`.

    The caller chooses the coordinates, so a jar may have no known checksum: then only its format and
    its size in the cache are checked. Known checksums are verified.

    Raises:
        SparkUnavailableError: the jars cannot be downloaded, or a known checksum differs.
    """
    return _of_cache("other", coordinates, frozenset(), any_jar=True)


def checksums() -> dict[str, str]:
    """Returns the known SHA-256 checksums by file name of the jar."""
    lines = CHECKSUMS.read_text(encoding="ascii").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def write_checksums() -> None:
    """Downloads all jars and writes ``CHECKSUMS``; for developers, after a change of a coordinate.

    Raises:
        SparkUnavailableError: the jars cannot be downloaded.
    """
    found = dict[str, str]()
    of_spark = [(coordinates, _shipped()) for coordinates in SERIES.values()]
    for coordinates, shipped in (*of_spark, (BROKER, frozenset[str]())):
        with tempfile.TemporaryDirectory() as temp:
            jars = _download(Path(temp), Path(temp), coordinates, shipped)
            found |= {jar.name: _digest(jar) for jar in jars}
    lines = [f"{digest}  {name}\n" for name, digest in sorted(found.items())]
    CHECKSUMS.write_text("".join(lines), encoding="ascii")


def _of_cache(
    key: str, coordinates: Sequence[str], shipped: Set[str], any_jar: bool = False
) -> list[Path]:
    """Returns the jars of coordinates; each set of coordinates has its own cache directory.

    Args:
        any_jar: whether to accept jars without a known checksum.
    """
    pins = [":".join(c.split(":")[1:]).replace(":", "-") for c in coordinates]
    cache = cache_dir() / "jars" / "_".join([key, *pins])
    return _cached(cache, any_jar) or _fill(cache, coordinates, shipped, any_jar)


def series_of(spark_version: str) -> str:
    """Returns the series of a version of Spark or PySpark: ``4.0.5`` -> ``4.0``."""
    return ".".join(spark_version.split(".")[:2])


def newest() -> str:
    """Returns the newest supported series."""
    return list(SERIES)[-1]


def supported() -> str:
    """Returns the supported series as words: ``4.0, 4.1 or 4.2``."""
    return f"{', '.join([*SERIES][:-1])} or {newest()}"


def pyspark_series() -> str:
    """Returns the series of the installed PySpark.

    Raises:
        SparkUnavailableError: the series is not supported, or there is no PySpark.
    """
    try:
        found = version("pyspark")
    except PackageNotFoundError:
        found = "none"
    if series_of(found) not in SERIES:
        raise SparkUnavailableError(
            f"Expected PySpark {supported()}, found {found}; "
            f'run: pip install "pyspark[connect]=={newest()}.*", or the series of your cluster.'
        )
    return series_of(found)


def _shipped() -> frozenset[str]:
    """Returns the artifact names of the jars that PySpark ships."""
    spec = find_spec("pyspark")
    roots = spec.submodule_search_locations if spec else None
    found = [jar.name for root in roots or () for jar in Path(root, "jars").glob("*.jar")]
    return frozenset(_artifact(name) for name in found)


def _artifact(file_name: str) -> str:
    """Returns a jar's artifact name: ``log4j-1.2-api-2.24.3.jar`` -> ``log4j-1.2-api``; the version
    begins at the last ``-digit``."""
    named = re.match(r"(.+)-\d", file_name)
    return named[1] if named else file_name.removesuffix(".jar")


def _jars_in(directory: Path, coordinates: Sequence[str]) -> list[Path]:
    """Returns the jars of a user's directory, without those that PySpark ships."""
    if not directory.is_dir():
        raise SparkUnavailableError(
            f"Expected a directory of jars in {JARS_ENV}={directory}, found none; correct the path, "
            f"fill it (vt-dagster spark jars --to {directory}), or unset {JARS_ENV} to download them."
        )
    shipped = _shipped()
    jars = [j.resolve() for j in sorted(directory.glob("*.jar")) if _artifact(j.name) not in shipped]
    found = {_artifact(jar.name) for jar in jars}
    missing = [c for c in coordinates if c.split(":")[1] not in found]
    if missing:
        raise SparkUnavailableError(
            f"Expected {' and '.join(missing)} in {JARS_ENV}={directory}, found "
            f"{counted(len(jars), 'other jar')} there; copy the missing ones and their dependencies "
            f"into it, or unset {JARS_ENV} to download them."
        )
    return jars


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vt_dagster"


def _digest(jar: Path) -> str:
    return hashlib.sha256(jar.read_bytes()).hexdigest()


def _cached(cache: Path, any_jar: bool) -> list[Path] | None:
    """Returns the jars of a complete cache; None if a jar is missing or differs in size or checksum."""
    try:
        sizes: dict[str, int] = json.loads((cache / _MANIFEST).read_text())
        jars = [cache / name for name in sizes]
        complete = bool(jars) and all(jar.stat().st_size == sizes[jar.name] for jar in jars)
        if not complete:
            return None
        _compare(jars, any_jar)
    except (OSError, ValueError, AttributeError, SparkUnavailableError):
        return None
    return jars


def _compare(jars: Sequence[Path], any_jar: bool) -> None:
    """Verifies the checksums of jars.

    Raises:
        SparkUnavailableError: a checksum differs, or is unknown although ``any_jar`` is false.
    """
    known = checksums()
    unknown = [jar.name for jar in jars if jar.name not in known]
    if unknown and not any_jar:
        raise SparkUnavailableError(
            f"Expected only jars with known checksums, found also {', '.join(unknown)}; {_REFUSED}"
        )
    for jar in jars:
        expected = known.get(jar.name)
        if expected is not None and (found := _digest(jar)) != expected:
            raise SparkUnavailableError(
                f"Expected {jar.name} with the SHA-256 {expected}, found {found}; {_REFUSED}"
            )


def _fill(cache: Path, coordinates: Sequence[str], shipped: Set[str], any_jar: bool) -> list[Path]:
    """Downloads into a temporary directory and renames it to ``cache``, so that the cache is never
    partial."""
    from filelock import FileLock, Timeout

    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{cache}.lock", timeout=_LOCK_SECONDS):
            jars = _cached(cache, any_jar)  # another process may have filled it while this one waited
            if jars:
                return jars
            prefix = f".{cache.name}-"
            for left in cache.parent.glob(f"{prefix}*"):  # left over from a killed process
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache.parent, prefix=prefix) as temp:
                fresh = Path(temp, "jars")
                fresh.mkdir()
                jars = _download(Path(temp), fresh, coordinates, shipped)
                _compare(jars, any_jar)
                sizes = {jar.name: jar.stat().st_size for jar in jars}
                (fresh / _MANIFEST).write_text(json.dumps(sizes, indent=1))
                shutil.rmtree(cache, ignore_errors=True)
                fresh.rename(cache)
    except Timeout:
        raise SparkUnavailableError(
            f"Expected the jars in {cache}, but another process has held {cache}.lock for "
            f"{_LOCK_SECONDS / 60:.0f} minutes; end that process and try again."
        ) from None
    except OSError as error:
        raise SparkUnavailableError(
            f"Expected to write jars to {cache}, got: {one_line(error)}. Make it writable, "
            f"set XDG_CACHE_HOME, or set {JARS_ENV} to a directory that has the jars."
        ) from None
    return [cache / name for name in sizes]


def _download(work: Path, target: Path, coordinates: Sequence[str], shipped: Set[str]) -> list[Path]:
    """Downloads coordinates and their dependencies to ``target``, without the shipped jars."""
    from concurrent.futures import ThreadPoolExecutor

    from jgo.config import GlobalSettings
    from jgo.constants import MAVEN_CENTRAL_URL
    from jgo.maven import MavenContext

    try:
        # A new, empty Maven repository: partial files of other programs cannot be picked up.
        maven = MavenContext(
            repo_cache=work / "repository",
            remote_repos={"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories},
            timeout=_HTTP_SECONDS,
        )
        direct, transitive = maven.resolver.resolve([maven.create_dependency(c) for c in coordinates])
        needed = [d.artifact for d in direct]
        needed += [d.artifact for d in transitive if d.scope in ("compile", "runtime")]
        needed = [a for a in needed if a.artifactId not in shipped]
        with ThreadPoolExecutor(max_workers=4) as pool:
            jars = list(pool.map(lambda artifact: artifact.resolve(), needed))
    # jgo raises RuntimeError, errors of requests, and XML errors.
    except Exception as error:
        raise SparkUnavailableError(
            f"Expected to download {' and '.join(coordinates)}, got: {one_line(error)}. "
            "Check the network, name your mirror in jgo's configuration file, or set "
            f"{JARS_ENV} to a directory that has the jars."
        ) from None
    damaged = [jar.name for jar in jars if not zipfile.is_zipfile(jar)]
    if damaged:
        raise SparkUnavailableError(
            f"Expected jar files, but {', '.join(damaged)} arrived damaged; try again."
        )
    return [jar.rename(target / jar.name) for jar in jars]


def one_line(error: BaseException) -> str:
    """Returns an error's message (that of the root cause, if any) as one line without stack trace."""
    java: Any = getattr(error, "java_exception", None)
    text = str(java.toString() if java is not None else error).strip()
    text = text.rpartition("\nCaused by: ")[2]
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= 300 else f"{line[:300]}..."
