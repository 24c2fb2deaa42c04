"""Writes a class archive (CDS) to ``FILE``: the classes of Spark, which the JVMs of the tests load.

With the archive, a JVM that runs one asset takes a third less processor time. The tests start some
fifty JVMs. The tests have their own archive, so that no test depends on the user's cache. A JVM ignores
the archive if it was written by another version of Java or with other jars.
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
