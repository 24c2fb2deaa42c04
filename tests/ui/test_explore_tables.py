"""Pages of ``vt-dagster explore`` in a browser: tables sort and filter, and fit on a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, write_deltalake
from playwright.sync_api import Browser, Page, expect

from tests.log_writer import MICROS, LogWriter, document, moment
from tests.ui.conftest import exploring
from vt_dagster.topology.specification import FilterSpec

pytestmark = pytest.mark.browser

PHONE = {"width": 390, "height": 844}
VALUES = [2.25, 10.123456789, None, 10.123456781, -3.5]
"""The values of the rows by offset; two of them are shown alike."""
WIDE = 20
"""The number of additional columns."""


def written_wide(warehouse: Path) -> None:
    """Writes a stream with many columns, of which one has numbers and nulls."""
    names = ["k", "v", *(f"column_{n}" for n in range(WIDE))]
    rows: list[dict[str, Any]] = [
        {
            "k": f"key {place % 2}",
            "v": value,
            **{f"column_{n}": place * n for n in range(WIDE)},
            "timestamp": moment(place),
            "partition": 0,
            "offset": place,
            "is_tombstone": False,
            "is_latest": True,
            "recorded_at": moment(100),
        }
        for place, value in enumerate(VALUES)
    ]
    said = document("wide", 1, MICROS, {0: len(rows)}, {0: MICROS + 240_000_000}, kind="stream")
    said["shape"]["columns"] = names
    table = pa.Table.from_pylist(rows)
    table = table.set_column(
        table.column_names.index("partition"), "partition", table["partition"].cast(pa.int32())
    )
    about = CommitProperties(custom_metadata={"userMetadata": json.dumps({"vt_dagster": said})})
    write_deltalake(str(warehouse / "wide" / "log"), table, commit_properties=about)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a ``vt-dagster explore``."""
    root = tmp_path_factory.mktemp("tables")
    prices = LogWriter(root, "prices_of_products_in_each_shop_by_the_hour")
    for run in range(1, 3):
        records = [("apple", f"value {n}", 60 * n + run) for n in range(40)]
        prices.run([*records, ("pear", None, 7)], recorded=2000 * run)
    made_by = FilterSpec(source=prices.name, predicate="v < 2")
    cheap = LogWriter(root, "cheap", made_by=made_by, logs={prices.name: f"log of {prices.name}"})
    cheap.run([("apple", "1", 0), ("pear", "2", 0)], recorded=3)
    written_wide(root)
    with exploring(str(root)) as found:
        yield found


@pytest.fixture
def page(address: str, browser: Browser) -> Iterator[Page]:
    """A page on which the browser must report no error."""
    trouble: list[str] = []
    page = browser.new_page(base_url=address)
    page.set_default_timeout(10_000)
    page.on("console", lambda said: trouble.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    yield page
    page.close()
    assert trouble == []


def records(page: Page) -> list[str]:
    """Returns the places of the visible rows."""
    found = page.locator(".records tbody tr:visible th").all_inner_texts()
    return [one.split()[0] for one in found]


def test_table_sorts_by_column(page: Page) -> None:
    """The exact numbers decide the order, even if the shown ones are equal. Nulls are last. A third
    click restores the original order."""
    page.goto("/table/wide")
    assert records(page) == ["0:4", "0:3", "0:2", "0:1", "0:0"]
    head = page.get_by_role("columnheader", name="v", exact=True)
    button = head.get_by_role("button")
    button.click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    assert records(page) == ["0:4", "0:0", "0:3", "0:1", "0:2"]
    assert page.locator(".records td[title='10.123456789']").inner_text() == "10.1235"
    button.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    assert records(page) == ["0:1", "0:3", "0:0", "0:4", "0:2"]
    other = page.get_by_role("columnheader", name="column_3", exact=True)
    other.get_by_role("button").click()
    expect(head).not_to_have_attribute("aria-sort", "descending")
    assert records(page) == ["0:0", "0:1", "0:2", "0:3", "0:4"]
    for _ in range(2):
        other.get_by_role("button").click()
    expect(page.locator("[aria-sort]")).to_have_count(0)
    assert records(page) == ["0:4", "0:3", "0:2", "0:1", "0:0"]


def test_sizes_and_lengths_sort_by_value(page: Page) -> None:
    page.goto("/")
    sizes = page.locator(".tables tbody td:nth-child(5)")
    wanted = sorted(int(str(one.get_attribute("data-sort"))) for one in sizes.all())
    page.get_by_role("button", name="size", exact=True).click()
    assert [int(str(one.get_attribute("data-sort"))) for one in sizes.all()] == wanted
    page.goto("/lateness/prices_of_products_in_each_shop_by_the_hour")
    rows = page.locator("#choices tbody th")
    lengths = rows.all_inner_texts()
    page.get_by_role("button", name="history retention").click()
    assert rows.all_inner_texts() == lengths
    page.get_by_role("button", name="history retention").click()
    assert rows.all_inner_texts() == lengths[::-1]


def test_table_filters_by_words(page: Page) -> None:
    page.goto("/table/wide")
    text = page.get_by_label("filter these 5 rows")
    text.fill("KEY 1  10.12")
    assert records(page) == ["0:3", "0:1"]
    expect(page.get_by_text("2 shown")).to_be_visible()
    page.get_by_role("button", name="time", exact=True).click()  # the same rows, sorted
    assert records(page) == ["0:1", "0:3"]
    text.fill("")
    assert len(records(page)) == 5


def test_filter_survives_slider_move(page: Page) -> None:
    page.goto("/key/prices_of_products_in_each_shop_by_the_hour?key=apple")
    text = page.get_by_label("filter these 2 rows")
    values = page.locator("table.values tbody tr:visible")
    text.fill("v value")
    expect(values).to_have_count(1)
    as_of = page.get_by_label("as of, within the drawing")
    as_of.focus()
    as_of.press("Home")
    expect(page.locator("#answer h2")).to_contain_text("As of 20")
    as_of.press("PageUp")
    expect(page.locator("#answer h2")).not_to_contain_text("As of 2023")
    expect(values).to_have_count(1)
    expect(text).to_have_value("v value")


MEASURE = """() => {
  const outside = [], box = (one) => one.getBoundingClientRect();
  for (const one of document.querySelectorAll("body *:not(.skip)")) {
    const { left, right, width } = box(one);
    if (width && !one.closest(".scroll *") && (left < -1 || right > innerWidth + 1)) {
      outside.push(`${one.tagName} ${one.getAttribute("class")} ${left} to ${right}`);
    }
  }
  const labels = [...document.querySelectorAll(".timeline .tick, .costs text, .lane p")], over = [];
  labels.forEach((one, i) => labels.slice(i + 1).forEach((other) => {
    const a = box(one), b = box(other);
    if (a.left < b.right && b.left < a.right && a.top < b.bottom - 1 && b.top < a.bottom - 1) {
      over.push(`${one.textContent} over ${other.textContent}`);
    }
  }));
  const gone = [];
  for (const one of document.querySelectorAll(".scroll:has(table)")) {
    one.scrollLeft = 1e6;
    const row = one.querySelector("tbody tr"), cells = [...row.cells], { left, right } = box(one);
    const first = box(cells[0]), last = box(cells.pop());
    if (first.left < left - 1 || last.right > right + 1 || last.left < first.right - 1) {
      gone.push(row.textContent);
    }
  }
  return { outside, over, gone, labels: labels.length };
}"""
"""Finds elements outside the window that are not in a scrolling box, labels of drawings that overlap,
and tables whose first or last column is not visible after scrolling to the right end."""


@pytest.mark.parametrize("script", [True, False])
def test_tables_fit_on_phone(address: str, browser: Browser, script: bool) -> None:
    """Everything fits with JavaScript and without it."""
    context = browser.new_context(base_url=address, viewport=PHONE, java_script_enabled=script)  # pyright: ignore[reportArgumentType]
    page, name = context.new_page(), "prices_of_products_in_each_shop_by_the_hour"
    for place, labels in (
        ("/", 0),
        ("/table/wide", 0),
        (f"/key/{name}?key=apple", 5),
        ("/key/wide?key=key+1", 5),
        (f"/row/{name}?offset=0:3", 0),
        (f"/lateness/{name}?grace=5m,10m,15m,20m,25m,30m,35m,40m,45m,50m,55m,100m,110m,130m", 18),
        (f"/compare?one={name}&other=cheap", 0),
    ):
        page.goto(place)
        assert page.locator("[type=search]").count() == (script and page.locator("tbody").count())
        found = page.evaluate(MEASURE)
        seen = {name: found[name] for name in ("outside", "over", "gone")}
        assert seen == {"outside": [], "over": [], "gone": []}, (place, seen)
        assert found["labels"] >= labels, place
    context.close()
