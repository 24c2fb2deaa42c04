"""Dagster's own pages, as a user sees them: lineage, an asset, its checks, its plots, a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.ui.conftest import FLAGS

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


def test_lineage_reads_from_left_to_right(page: Page, screenshots: Path) -> None:
    page.goto("/asset-groups")
    groups = ("sources", "joined", "published")
    boxes = [page.locator("foreignObject, svg g").get_by_text(g, exact=True).first for g in groups]
    for box in boxes:
        expect(box).to_be_visible()
    page.screenshot(path=screenshots / "lineage.png")
    places = [found["x"] for box in boxes if (found := box.bounding_box())]
    assert len(places) == 3
    assert places == sorted(places)


def test_asset(page: Page, screenshots: Path) -> None:
    page.goto("/assets/flights_with_weather?view=overview")
    expect(page.get_by_text("Every flight with the weather at its airport")).to_be_visible()
    expect(page.get_by_text("operations", exact=True).first).to_be_visible()
    expect(page.get_by_text("Delta Lake").first).to_be_visible()
    expect(page.get_by_text("wind_speed", exact=True).first).to_be_visible()
    page.screenshot(path=screenshots / "asset.png")
    page.goto("/assets/flights_with_weather?view=events")
    for name in ("timeline", "lateness"):
        picture = page.locator(f'img[alt="{name}"]').first
        expect(picture).to_be_visible()
        assert picture.evaluate("image => image.naturalWidth") == 720
    page.screenshot(path=screenshots / "pictures.png")
