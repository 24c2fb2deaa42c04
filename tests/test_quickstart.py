"""A newcomer's first hour: the wheel in an empty environment, a table in Python, then in YAML."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.distributions import ROOT, distributions
from vt_dagster.spark.jars import resolve_jars

pytestmark = [pytest.mark.endurance, pytest.mark.network, pytest.mark.timeout(2_400)]

FIRST = (ROOT / "docs" / "start" / "files.md").read_text(encoding="utf-8")
PRICES = "product,price,at\napple,1.0,2026-01-31T10:00:00Z\napple,1.2,2026-01-31T14:00:00Z\n"
LATE_PRICE = "product,price,at\npear,2.5,2026-01-31T16:00:00Z\n"
ANOTHER_ORDER = "order_id,product,ordered_at\n6,apple,2026-01-31T18:00:00Z\n"

TEST = """
from prices import prices

def test_a_late_price_is_a_version_of_its_own(topology):
    driver = topology(prices)
    driver.pipe("prices", {"product": "apple", "price": 1.0, "at": 0},
                {"product": "apple", "price": 2.0, "at": 9_000})
    driver.pipe("prices", {"product": "apple", "price": 1.5, "at": 5_000})
    assert driver.store("prices").get("apple", as_of=6_000)["price"] == 1.5
    assert driver.store("prices").get("apple")["price"] == 2.0
"""
CHECK = """

import dagster as dg

@dg.asset_check(asset="prices", description="no price is above 100")
def prices_are_plausible(prices):
    dear = [row.asDict() for row in prices.where("price > 100").collect()]
    about = {"offending_rows": len(dear)}
    if dear:
        rows = [dg.TableRecord({k: str(v) for k, v in row.items()}) for row in dear]
        about["sample"] = dg.MetadataValue.table(rows)
    return dg.AssetCheckResult(passed=not dear, metadata=about)

defs = dg.Definitions.merge(defs, dg.Definitions(asset_checks=[prices_are_plausible]))
"""


class Newcomer:
    """A user with an empty Python environment and a terminal."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.bin = home / "env" / "bin"

    def types(self, command: str, fails: bool = False, where: Path | None = None) -> str:
        """Runs a command and returns its output; the command must succeed, or fail if ``fails``."""
        program, *arguments = command.split()
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        ours = self.bin / program
        done = subprocess.run(
            [str(ours) if ours.exists() else program, *arguments],
            cwd=where or self.home,
            env={
                **clean,
                "DAGSTER_HOME": str(self.home / "dagster_home"),
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "COLUMNS": "200",
                # A separate Spark server, with the jars that are already downloaded.
                "XDG_CACHE_HOME": str(self.home / "cache"),
                "VT_DAGSTER_JARS": str(resolve_jars()[0].parent),
            },
            capture_output=True,
            text=True,
            timeout=600,
        )
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == fails, f"{command} exited with {done.returncode}:\n{said}"
        return said

    def lands(self, name: str, text: str, folder: str = "landing/prices") -> Path:
        path = self.home / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """An environment with the wheel installed, and without this checkout on its path."""
    home = tmp_path_factory.mktemp("newcomer")
    wheel, _ = distributions()
    subprocess.run([sys.executable, "-m", "venv", str(home / "env")], check=True, timeout=300)
    (home / "dagster_home").mkdir()
    someone = Newcomer(home)
    someone.types(f"pip install --quiet --disable-pip-version-check {wheel}[dg] pytest")
    yield someone
    someone.types("vt-dagster spark stop")


@pytest.mark.parametrize("flavour", ["", " --yaml"])
def test_project_from_first_page(newcomer: Newcomer, flavour: str) -> None:
    """The steps of the documentation's first page work (the web interface is not tested)."""
    name = "first_yaml" if flavour else "first"
    newcomer.types(f"vt-dagster init {name}{flavour}")
    project = newcomer.home / name
    said = newcomer.types("make run", where=project)
    assert "new rows of priced_orders: 4" in said
    said = newcomer.types("make look", where=project)
    assert re.findall(r"price=[\d.]+", said)[:3] == ["price=1.0", "price=1.2", "price=1.4"]
    assert "1 passed" in newcomer.types("make test", where=project)
    said = newcomer.types("make check", where=project)
    assert re.search(r"prices_are_plausible +│ passed", said)
    assert "failed" not in said

    # A late price and one more order: the waiting order is released, with the price of its time.
    newcomer.lands("2.csv", LATE_PRICE, f"{name}/data/landing/prices")
    newcomer.lands("2.csv", ANOTHER_ORDER, f"{name}/data/landing/orders")
    newcomer.types("make run", where=project)
    said = newcomer.types("vt-dagster explain priced_orders --key pear", where=project)
    assert re.search(r"order_id=5 .* price=2\.5", said)


def test_first_table_in_python(newcomer: Newcomer) -> None:
    code = re.search(r"# Your own table in 15 lines\s+```python[^\n]*\n(.*?)```", FIRST, re.DOTALL)
    assert code is not None
    module = newcomer.home / "prices.py"
    module.write_text(code.group(1))
    newcomer.lands("1.csv", PRICES)
    newcomer.types("dg launch -f prices.py --assets prices")
    get = "vt-dagster get prices --key apple --as-of 2026-01-31T12:00:00Z --warehouse warehouse"
    assert re.search(r"price +1\.0\n", newcomer.types(get))

    # A test of the table, with the fixture of the pytest plugin.
    (newcomer.home / "test_prices.py").write_text(TEST)
    assert "1 passed" in newcomer.types("pytest -q -p no:cacheprovider test_prices.py")

    # Land a bad record, read the message, correct the record.
    broken = newcomer.lands("2.csv", "product,price,at\napple,-3,2026-02-01T10:00:00Z\n")
    said = newcomer.types("dg launch -f prices.py --assets prices", fails=True)
    assert "nothing was committed" in said
    assert "price greater_than_or_equal_to(0): 1 record, for example" in said
    broken.write_text("product,price,at\napple,1.3,2026-02-01T10:00:00Z\n")
    newcomer.types("dg launch -f prices.py --assets prices")

    # The sensor requests the files that no run has consumed.
    assert "no new csv files" in newcomer.types("dagster sensor preview prices_sensor -f prices.py")
    newcomer.lands("3.csv", "product,price,at\napple,300,2026-02-02T10:00:00Z\n")
    said = newcomer.types("dagster sensor preview prices_sensor -f prices.py")
    assert "3.csv" in said
    assert "2.csv" not in said
    newcomer.types("dagster sensor start prices_sensor -f prices.py")
    assert "[RUNNING]" in newcomer.types("dagster sensor list -f prices.py")
    newcomer.types("dg launch -f prices.py --assets prices")

    # A check in CI fails, then passes again.
    module.write_text(code.group(1) + CHECK)
    said = newcomer.types("vt-dagster check prices -f prices.py --junit red.xml", fails=True)
    assert re.search(r"prices_are_plausible +│ failed +│ +1 │", said)
    assert "no price is above 100" in said
    assert "300.0" in said
    suites = ElementTree.parse(newcomer.home / "red.xml").getroot()
    assert suites.attrib["failures"] == "1"
    newcomer.lands("4.csv", "product,price,at\napple,3,2026-02-03T10:00:00Z\n")
    newcomer.types("dg launch -f prices.py --assets prices")
    said = newcomer.types("vt-dagster check prices -f prices.py --junit green.xml")
    assert "failed" not in said
    suites = ElementTree.parse(newcomer.home / "green.xml").getroot()
    assert (suites.attrib["failures"], suites.attrib["errors"]) == ("0", "0")
    assert int(suites.attrib["tests"]) > 5


def test_first_table_in_yaml(newcomer: Newcomer) -> None:
    project = newcomer.home / "shop"
    (project / "shop" / "defs").mkdir(parents=True)
    (project / "shop" / "__init__.py").write_text("")
    (project / "shop" / "defs" / "__init__.py").write_text("")
    (project / "shop" / "definitions.py").write_text(
        "from pathlib import Path\n\n"
        "from dagster import definitions, load_from_defs_folder\n\n\n"
        "@definitions\n"
        "def defs():\n"
        "    return load_from_defs_folder(path_within_project=Path(__file__).parent)\n"
    )
    (project / "pyproject.toml").write_text(
        '[project]\nname = "shop"\nversion = "0.1.0"\n\n'
        '[tool.dg]\ndirectory_type = "project"\n\n[tool.dg.project]\nroot_module = "shop"\n'
    )
    listed = newcomer.types("dg list components --json", where=project)
    assert "vt_dagster.components.TopologyComponent" in listed
    newcomer.types("dg scaffold defs vt_dagster.components.TopologyComponent prices", where=project)
    defs = project / "shop" / "defs" / "prices" / "defs.yaml"
    newcomer.types("dg check yaml", where=project)
    newcomer.types("dg check defs", where=project)

    newcomer.lands("1.csv", PRICES, "shop/data/landing/prices")
    newcomer.types("dg launch -m shop.definitions --assets prices", where=project)
    get = "vt-dagster get prices --key apple --as-of 2026-01-31T12:00:00Z"
    assert re.search(r"price +1\.0\n", newcomer.types(get, where=project))
    assert "failed" not in newcomer.types("vt-dagster check -m shop.definitions", where=project)

    # Break the YAML, read the message, correct the YAML.
    whole = defs.read_text()
    line = 1 + [("history_retention" in text) for text in whole.splitlines()].index(True)
    defs.write_text(whole.replace("history_retention", "retention"))
    said = newcomer.types("dg check yaml", fails=True, where=project)
    assert re.search(rf"defs\.yaml:{line}\b", said)
    assert "'retention' was unexpected" in said
    said = newcomer.types("dg check defs", fails=True, where=project)
    assert "'retention' was unexpected" in said  # dg checks the YAML first; loading says more
    assert re.search(rf"defs\.yaml:{line}\b", said)
    validate = "dagster definitions validate -m shop.definitions"
    said = newcomer.types(validate, fails=True, where=project)
    assert "'retention' is not known here; did you mean 'history_retention'?" in said
    assert re.search(rf"defs\.yaml:{line}\b", said)
    defs.write_text(whole.replace("30d", "30 days"))
    said = newcomer.types("dg check defs", fails=True, where=project)
    assert "expected a length of time like 7d, 1h30m or 250ms" in said
    assert re.search(rf"defs\.yaml:{line}\b", said)
    defs.write_text(whole)
    newcomer.types("dg check defs", where=project)
