"""The commands and code of the README and the first pages work."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.conftest import ConnectServer
from tests.market import messages
from vt_dagster.cli import app
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FIRST = (REPOSITORY / "docs" / "start" / "files.md").read_text(encoding="utf-8")


def _block(after: str, language: str = "") -> str:
    """Returns the first code block after a heading or sentence."""
    rest = FIRST[FIRST.index(after) :]
    found = re.search(rf"```{language}[^\n]*\n(.*?)```", rest, re.DOTALL)
    assert found is not None
    return found.group(1)


def _type(
    command: str, where: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    program, *arguments = command.split()
    beside = Path(sys.executable).parent / program
    return subprocess.run(
        [str(beside), *arguments],
        cwd=where,
        env={**environment, "DAGSTER_HOME": str(where), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _asked(command: str) -> str:
    """The output of a ``vt-dagster`` command, which runs in this process."""
    program, *arguments = command.split()
    assert program == "vt-dagster"
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_own_table_in_15_lines(
    tmp_path: Path,
    spark: SparkSession,
    connect_server: ConnectServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processes of the asset and of its checks use a Spark server that already runs."""
    code = _block("# Your own table in 15 lines", "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    (tmp_path / "prices.py").write_text(code)
    landing = tmp_path / "landing" / "prices"
    landing.mkdir(parents=True)
    (landing / "1.csv").write_text(
        "product,price,at\n"
        "apple,1.0,2026-01-31T10:00:00Z\n"
        "apple,1.2,2026-01-31T14:00:00Z\n"
        "apple,1.1,2026-01-31T11:00:00Z\n"
    )
    materialize, get, history = _block("put CSV files with a header line", "bash").strip().splitlines()
    environment = {**connect_server.environment, "VT_DAGSTER_SPARK": "server"}
    done = _type(materialize, tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    found = _asked(get)
    assert re.search(r"price +1\.1\n", found), found
    assert re.findall(r"price=[\d.]+", _asked(history)) == ["price=1.0", "price=1.1", "price=1.2"]

    # a bad price fails the run with a message; the run is in this process, which has a session
    (landing / "2.csv").write_text("product,price,at\napple,-1,2026-02-01T10:00:00Z\n")
    defs: dg.Definitions = runpy.run_path("prices.py", run_name="prices")["defs"]
    job = defs.resolve_implicit_global_asset_job_def()
    broken = job.execute_in_process(raise_on_error=False)
    assert not broken.success
    said = messages(broken)
    assert "nothing was committed" in said
    assert "greater_than_or_equal_to(0)" in said
    assert '"price":-1.0' in said


ORDER = """
from vt_dagster import Stream

class Order(pa.DataFrameModel):
    product: T.StringType
    ordered_at: T.TimestampType

"""


def test_readme_join_and_its_test(spark: SparkSession) -> None:
    table, join = (
        _block(a, "python") for a in ("# Your own table", "A join is declared in the same way")
    )
    test = _block("brings two pytest fixtures", "python")
    code = table + ORDER + join + test
    names: dict[str, Any] = {}
    exec(compile(code, "files.md", "exec", dont_inherit=True), names)
    names["test_orders_get_the_price_of_their_time"](lambda node: TopologyTestDriver(node, spark=spark))


def test_named_files_and_targets_exist() -> None:
    for name in ("make demo", "make test", "make ui", "make bench", "make lint", "make docs"):
        assert name in README
        target = name.split()[1]
        assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
