"""The wheel and the sdist hold the library, and nothing else of this repository."""

from __future__ import annotations

import configparser
import re
import subprocess
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.distributions import ROOT, distributions

pytestmark = [pytest.mark.slow, pytest.mark.network]

OURS = {".py", ".html", ".css", ".js", ".svg"}
LIBRARY = {
    *(p.relative_to(ROOT).as_posix() for p in (ROOT / "vt_dagster").rglob("*") if p.suffix in OURS),
    *("vt_dagster/py.typed", "vt_dagster/spark/log4j2.properties", "vt_dagster/spark/jars.sha256"),
    *(p.relative_to(ROOT).as_posix() for p in (ROOT / "vt_dagster/cli/project").rglob("*.txt")),
    "vt_dagster_pytest.py",
}


def test_wheel_contents() -> None:
    wheel, _ = distributions()
    with zipfile.ZipFile(wheel) as opened:
        names = {n for n in opened.namelist() if not n.endswith("/")}
        info = {n.split("/")[0] for n in names if ".dist-info/" in n}
        assert {n for n in names if ".dist-info/" not in n} == LIBRARY
        (info_folder,) = info
        entries = configparser.ConfigParser()
        entries.read_string(opened.read(f"{info_folder}/entry_points.txt").decode())
        about = Parser().parsestr(opened.read(f"{info_folder}/METADATA").decode())
        assert f"{info_folder}/licenses/LICENSE" in names
    assert {s: dict(entries[s]) for s in entries.sections()} == {
        "console_scripts": {"vt-dagster": "vt_dagster.cli:main"},
        "pytest11": {"vt_dagster": "vt_dagster_pytest"},
        "dagster_dg_cli.registry_modules": {"vt_dagster": "vt_dagster.components"},
    }
    assert {"dg", "ui", "demo", "explore"} <= set(about.get_all("Provides-Extra") or [])
    assert about["Requires-Python"] == ">=3.10"
    assert "Versioned tables" in about.get_payload()
    needs = [n.split(";")[0] for n in about.get_all("Requires-Dist") or [] if "extra ==" not in n]
    assert not [n for n in needs if n.startswith(("pytest", "ruff", "pyright", "playwright"))]


def test_sdist_contents() -> None:
    _, sdist = distributions()
    with tarfile.open(sdist) as opened:
        names = {n.partition("/")[2] for n in opened.getnames()}
    more = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert names - {""} == LIBRARY | more


@pytest.mark.endurance
@pytest.mark.parametrize("pip", ["pip==23.2", "pip"], ids=["of_python_3_11", "newest"])
def test_pip_downloads_one_pyspark(tmp_path: Path, pip: str) -> None:
    """PySpark has no wheel, so pip downloads 430 MB for each version that it looks at."""
    wheel, _ = distributions()
    venv.create(tmp_path / "env", with_pip=True)
    python = [str(tmp_path / "env" / "bin" / "python"), "-m", "pip", "--no-cache-dir"]
    subprocess.run([*python, "install", "--quiet", "--upgrade", pip], check=True, timeout=300)
    done = subprocess.run(
        [*python, "install", "--dry-run", f"{wheel}[kafka,ui,explore]"],
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr
    downloaded = re.findall(r"Downloading \S*?(pyspark-[\d.]+)tar\.gz", done.stdout)
    assert len(downloaded) == 1, downloaded
    assert re.search(r"Would install .*\bpyspark-4\.2\.", done.stdout)
