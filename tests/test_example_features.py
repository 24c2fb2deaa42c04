"""The training set of the features example, with and without the data leak."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("few_rows")

README = Path(__file__).parents[1] / "examples" / "features" / "README.md"


def test_example_output_matches_its_page(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EXAMPLE_DATA", str(tmp_path / "features"))
    monkeypatch.setenv("COLUMNS", "200")
    example = importlib.import_module("examples.features.__main__")
    example.main()
    said = capsys.readouterr().out
    page = re.search(r"```text\n.*?\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert page is not None
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if "│" in line
    ]
    assert [" ".join(row).split() for row in rows] == [
        line.split() for line in page.group(1).splitlines()
    ]
    assert re.search(r"manifest: .+\.json", said)
