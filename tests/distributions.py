"""The wheel and sdist of this checkout, built once for all tests of a process."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parent.parent


@cache
def distributions() -> tuple[Path, Path]:
    """Returns the wheel and the sdist. The wheel is built from the sdist, as pip does."""
    where = Path(mkdtemp(prefix="vt_dagster_dist_"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(where), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = where.glob("*.whl")
    (sdist,) = where.glob("*.tar.gz")
    return wheel, sdist
