"""The pages of ``vt-dagster explore`` on the worked example, as a user sees and moves them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.ui.conftest import FLAGS

pytestmark = [pytest.mark.browser, pytest.mark.slow]

expect.set_options(timeout=30_000)
FLIGHT = "carrier=B6 flight=219 month=1 day=10"
"""It left JFK in the week whose weather came a month late."""
DOCS = Path(__file__).parents[2] / "docs" / "images"


@pytest.fixture(scope="module")
def address(environment: dict[str, str]) -> Iterator[str]:
    """Of a ``vt-dagster explore`` on the instance's warehouse."""
    command = [str(Path(sys.executable).parent / "vt-dagster"), "explore", "--port", "0"]
    where = environment["VT_DAGSTER_DATA"]  # so that pictures show no path of this machine
    process = subprocess.Popen(
        [*command, "warehouse"], cwd=where, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def page(address: str, chromium: str) -> Iterator[Page]:
    """A page; nothing that a browser complains of may happen on it."""
    trouble: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1250, "height": 900}, base_url=address)
        page.set_default_timeout(30_000)
        page.on("console", lambda said: trouble.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        yield page
        browser.close()
    assert trouble == []


@pytest.fixture
def shot(screenshots: Path, page: Page) -> Callable[[str], None]:
    """Keeps a picture; where ``VT_DAGSTER_DOCS_IMAGES`` is set among those of the documentation too."""

    def take(name: str) -> None:
        page.screenshot(path=screenshots / f"explore-{name}.png")
        if os.environ.get("VT_DAGSTER_DOCS_IMAGES"):
            DOCS.mkdir(parents=True, exist_ok=True)
            shutil.copy(screenshots / f"explore-{name}.png", DOCS)

    return take


def test_from_a_flight_to_the_weather_as_it_was_known(page: Page, shot: Callable[[str], None]) -> None:
    """Find a flight, see its explanation, follow it upstream, and move to before a late observation."""
    page.goto("/")
    expect(page.get_by_role("row", name=re.compile("^weather "))).to_contain_text("versioned table")
    shot("tables")
    page.get_by_role("link", name="flights_with_weather", exact=True).click()
    page.get_by_label("column=value").fill(FLIGHT)
    page.get_by_role("button", name="Find").click()
    expect(page.locator("#left-out")).to_have_text("1 of 1 that are there.")
    page.locator("tbody tr th a").click()

    boxes = page.locator(".upstream .name")
    expect(boxes).to_have_text(["flights_with_weather", "flights", "weather"])
    expect(page.locator("dl.rules dt").filter(has_text="corrected")).to_be_visible()
    expect(page.locator("rect.answer")).to_have_count(1)
    expect(page.locator("rect.now")).to_have_count(1)
    shot("row")
    page.locator(".timeline a").filter(has=page.locator("rect.now")).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("weather 0:")
    page.get_by_role("link", name="History of its key").click()

    answer = page.locator("#answer")
    expect(answer).to_contain_text("True from 2013-01-10")
    assert page.locator(".mark.late").count() > 10
    shot("key")
    known = page.get_by_label("as known at, by runs")
    known.focus()
    known.press("ArrowLeft")  # the last run: the same is known
    known.press("ArrowLeft")
    expect(answer).to_contain_text("as known at")
    expect(answer).to_contain_text("True from 2013-01-07 23:00:00Z to 2013-01-15 00:00:00Z")
    assert page.locator(".mark.late:not(.unknown)").count() == 1  # the legend's
    assert "known=" in page.url
    shot("key-as-known")
    as_of = page.get_by_label("as of, within the drawing")
    as_of.focus()
    as_of.press("Home")
    expect(answer).not_to_contain_text("True from 2013-01-07 23:00:00Z")


def test_a_record_is_followed_upstream_by_clicks(page: Page, shot: Callable[[str], None]) -> None:
    page.goto("/row/flights_with_weather?offset=0:100")
    page.locator(".upstream a").filter(has_text="flights").nth(1).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("flights 0:")
    expect(page.get_by_text("flights-2013-01.jsonl")).to_be_visible()


def test_the_grace_line_is_dragged(page: Page, shot: Callable[[str], None]) -> None:
    """By mouse and by keys, and the numbers follow."""
    page.goto("/lateness/flights_with_weather")
    cost = page.locator("#cost")
    expect(cost).to_contain_text("6 h (declared)")
    line, target = page.locator("#grace circle"), page.locator(".costs .point.wrong").first
    start, end = line.bounding_box(), target.bounding_box()
    assert start is not None
    assert end is not None
    page.mouse.move(start["x"] + 5, start["y"] + 5)
    page.mouse.down()
    page.mouse.move(end["x"] + 30, end["y"] + 20, steps=5)
    page.mouse.move(end["x"] + 5, end["y"] + 20, steps=3)
    page.mouse.up()
    expect(cost).to_contain_text(re.compile(r"^0 s: [\d,]+ of [\d,]+ wrong"))
    expect(page.locator("#choices tr.chosen th")).to_have_text("0 s")
    shot("lateness")
    slider = page.get_by_label("grace period", exact=True)
    slider.focus()
    slider.press("End")
    expect(cost).to_contain_text("7 d:")


def test_by_keyboard_alone(page: Page, shot: Callable[[str], None]) -> None:
    page.goto("/key/weather?key=JFK")
    ticks = page.locator(".timeline .tick")
    whole = ticks.first.text_content()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('timeline')"):
            break
    page.keyboard.press("+")
    expect(ticks.first).not_to_have_text(whole or "")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("0")
    expect(ticks.first).to_have_text(whole or "")


def test_narrow_and_dark(page: Page, shot: Callable[[str], None]) -> None:
    page.set_viewport_size({"width": 380, "height": 800})
    page.emulate_media(color_scheme="dark")
    for place in ("/", "/table/weather", "/key/weather?key=JFK", "/lateness/flights_with_weather"):
        page.goto(place)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 380, f"{place} is {wide} wide"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark == "rgb(20, 23, 27)"
    shot("narrow")
