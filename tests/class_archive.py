"""Writes the classes that Spark loads to a file, from which the JVMs of tests take them: ``FILE``.

A JVM that runs one asset takes a third less of a processor with it, and tests start some fifty. Tests
have a file of their own, so that none depends on the user's cache. Where a JVM finds that the file is
not of its own version and jars, it does without.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.conftest import JVM
from tests.market import healthy_market
from vt_dagster.cli.class_archive import write


def main(file: Path) -> None:
    os.environ["JDK_JAVA_OPTIONS"] = JVM
    half = file.with_suffix(".half")
    write(half, lambda spark, root: healthy_market(root, spark))
    if half.is_file():
        half.rename(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
