"""Dagster's own pages, as a user sees them: lineage, an asset, its checks, its plots, a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.ui.conftest import FLAGS
from tests.ui.small_demo import DAMAGED

pytestmark = [pytest.mark.browser, pytest.mark.slow]

expect.set_options(timeout=30_000)


@pytest.fixture
def page(server: str, chromium: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1500, "height": 950}, base_url=server)
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def test_walk_from_the_lineage_to_an_asset_its_plots_checks_and_ops(
    page: Page, screenshots: Path
) -> None:
    """By clicks alone, as a newcomer goes."""
    page.goto("/asset-groups")
    graph = page.locator("foreignObject, svg g")
    groups = ("sources", "joined", "published")
    boxes = [graph.get_by_text(group, exact=True).first for group in groups]
    for box in boxes:
        expect(box).to_be_visible()
    page.screenshot(path=screenshots / "lineage.png")
    places = [found["x"] for box in boxes if (found := box.bounding_box())]
    assert len(places) == 3
    assert places == sorted(places), "the groups read from left to right"
    boxes[1].dblclick()
    graph.get_by_text(re.compile("^flights_w")).first.click()  # a long name is cut in its middle
    page.get_by_text("View in Asset Catalog").click()

    expect(page.get_by_text("Every flight with the weather at its airport")).to_be_visible()
    expect(page.get_by_text("operations", exact=True).first).to_be_visible()
    expect(page.get_by_text("Delta Lake").first).to_be_visible()
    expect(page.get_by_text("wind_speed", exact=True).first).to_be_visible()
    expect(page.get_by_text("Wind speed, mph (from weather.wind_speed)")).to_be_visible()
    page.screenshot(path=screenshots / "asset.png")
    page.get_by_text("Plots", exact=True).first.scroll_into_view_if_needed()
    page.get_by_text("Plots", exact=True).first.click()
    for name in ("records_late", "records_waiting", "seconds", "dagster/row_count"):
        expect(page.get_by_text(name, exact=True).first).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible()
    page.screenshot(path=screenshots / "plots.png")

    page.get_by_role("tab", name="Checks").click()
    for check in ("every_record_is_accounted_for", "timestamps_do_not_decrease"):
        expect(page.get_by_text(check, exact=True).first).to_be_visible()
    expect(page.get_by_text("Succeeded", exact=True)).to_have_count(2)
    page.screenshot(path=screenshots / "checks.png")

    page.get_by_role("tab", name="Overview").first.click()  # the check has a tab of this name too
    page.goto("/asset-groups")  # one node an asset, whatever its run does
    expect(page.get_by_text("flights_with_weather", exact=True).first).to_be_visible()


def test_pictures_of_a_run(page: Page, screenshots: Path) -> None:
    for number, name in enumerate(("timeline", "lateness")):
        page.goto("/assets/flights_with_weather?view=events")
        page.get_by_text("[Show Markdown]").nth(number).click()
        picture = page.locator(f'img[alt="{name}"]')
        expect(picture).to_be_visible()
        assert picture.evaluate("image => image.naturalWidth") == 720
        page.screenshot(path=screenshots / f"{name}.png")


def test_a_failing_check_shows_the_rows(page: Page, screenshots: Path) -> None:
    page.goto(f"/assets/{DAMAGED}?view=checks&checkDetail=one_row_per_key")
    expect(page.get_by_text("no key has two current rows")).to_be_visible()
    expect(page.get_by_text("Failed", exact=True).first).to_be_visible()
    expect(page.get_by_text("offending_rows").first).to_be_visible()
    moments = page.get_by_text("2013-01-01 00:00:00", exact=True)
    expect(moments).to_have_count(6)  # three keys, twice each
    page.screenshot(path=screenshots / "check.png")


@pytest.mark.timeout(900)
def test_materialize(page: Page, screenshots: Path) -> None:
    """A click launches a run of what has landed; it succeeds, and its log and numbers are there."""
    page.goto("/assets/weather?view=overview")
    expect(page.get_by_text("remembers what was true when")).to_be_visible()
    page.get_by_role("button", name="Materialize").first.click()
    expect(page.get_by_text("Launched run")).to_be_visible()
    page.get_by_text("View", exact=True).last.click()
    page.wait_for_url("**/runs/**")
    expect(page.get_by_text("Success", exact=True).first).to_be_visible(timeout=600_000)
    page.get_by_placeholder("Filter").first.fill("committed")
    expect(page.get_by_text("weather: committed batch 3 (log version 2)").first).to_be_visible()
    page.screenshot(path=screenshots / "run.png")
    page.goto("/assets/weather?view=events")
    expect(page.get_by_text("Materialized in run").first).to_be_visible()
    expect(page.get_by_text("records_applied", exact=True).first).to_be_visible()
