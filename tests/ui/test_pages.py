"""Pages as a user sees them: those of Dagster (lineage, an asset, its checks and plots, a run), and
those of ``vt-dagster explore``. They are in one file, so that the instance is built once."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from assets.landing import write_landing
from tests.demo_subset import EXPLORE
from tests.ui.damaged_table import DAMAGED

pytestmark = [pytest.mark.browser, pytest.mark.slow]

expect.set_options(timeout=30_000)
FLIGHT = "carrier=B6 flight=219 month=2 day=5"
"""The flight left JFK in the week whose weather came a month late."""
DOCS = Path(__file__).parents[2] / "docs" / "images"


@pytest.fixture(scope="module")
def dagster(server: str, browser: Browser) -> BrowserContext:
    """One browser context for all tests, so that Dagster's scripts are loaded once."""
    return browser.new_context(viewport={"width": 1500, "height": 950}, base_url=server)


@pytest.fixture
def page(dagster: BrowserContext) -> Iterator[Page]:
    page = dagster.new_page()
    page.set_default_timeout(60_000)
    yield page
    page.close()


@pytest.fixture
def docs_shot(screenshots: Path) -> Callable[[Page, str], None]:
    """Takes a screenshot. If ``VT_DAGSTER_DOCS_IMAGES`` is set, copies it to the documentation too."""

    def take(page: Page, name: str) -> None:
        page.screenshot(path=screenshots / f"{name}.png")
        if os.environ.get("VT_DAGSTER_DOCS_IMAGES"):
            DOCS.mkdir(parents=True, exist_ok=True)
            shutil.copy(screenshots / f"{name}.png", DOCS)

    return take


def test_navigate_from_lineage_to_asset_plots_checks_and_ops(page: Page, screenshots: Path) -> None:
    """The walk uses only clicks, as a new user does."""
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
    graph.get_by_text(re.compile("^flights_w")).first.click()  # a long name is shortened in its middle
    page.get_by_text("View in Asset Catalog").click()

    expect(page.get_by_text("Every flight with the weather at its airport")).to_be_visible()
    expect(page.get_by_text("operations", exact=True).first).to_be_visible()
    expect(page.get_by_text("Delta Lake").first).to_be_visible()
    expect(page.get_by_text("wind_speed", exact=True).first).to_be_visible()
    expect(page.get_by_text("Wind speed, mph (from weather.wind_speed)")).to_be_visible()
    history = page.get_by_text(re.compile(r"^\d+/\d+/\d{4}$"))  # the part that is loaded last
    expect(history.first).to_be_visible()
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

    page.goto("/asset-groups")  # one node per asset, whatever its run does
    expect(page.get_by_text("flights_with_weather", exact=True).first).to_be_visible()


def test_graph_steps_are_shown(page: Page, docs_shot: Callable[[Page, str], None]) -> None:
    """The graph of ``assets/grace.py`` has a user's op between the grace buffer and the join."""
    page.goto("/locations/assets.definitions/graphs/flights_with_weather/flights_with_weather")
    page.get_by_role("button", name="Expand graph").click()
    steps = ("read_flights", "grace_buffer", "waiting_by_airport", "stream_table_join", "write_flights")
    for seen in steps:  # long names are shortened
        expect(page.get_by_text(re.compile(f"^{seen}")).first).to_be_visible()
    docs_shot(page, "graph")


def test_run_numbers_are_shown_without_click(
    page: Page, screenshots: Path, docs_shot: Callable[[Page, str], None]
) -> None:
    """The pages of an asset show its numbers, lateness and timeline, in our order; the log of a run
    shows only the first two."""
    in_numbers = page.get_by_text(re.compile("^records: 7,823 in [+=] .* stream time: 2013-03-29 "))
    lateness = page.get_by_text(
        re.compile("^lateness of .* records behind stream time: .* grace period 6 hours$")
    )
    legend = page.get_by_text(re.compile(r"\d+ of 7,\d\d\d records of this run\. o: a record at its"))
    page.goto("/assets/flights_with_weather?view=events")
    for seen in (in_numbers, lateness, legend, page.locator("pre").filter(has_text="EWR")):
        expect(seen.first).to_be_visible()
    wanted = ["at_a_glance", "vt_dagster/explore", "records_in", "records_late", "stream_time"]
    wanted += ["at_a_glance_timeline", "at_a_glance_lateness", "dagster/uri", "positions"]
    names = page.locator("table td:first-child")
    assert [name for name in names.all_inner_texts() if name in wanted] == wanted
    docs_shot(page, "run")

    page.goto("/assets/flights_with_weather?view=overview")
    link = page.get_by_role("link", name="Explore its keys and rows")
    expect(link).to_have_attribute("href", f"{EXPLORE}/table/flights_with_weather")
    for seen in (in_numbers, lateness, legend):
        expect(seen.first).to_be_attached()
    legend.first.scroll_into_view_if_needed()
    expect(legend.first).to_be_visible()
    assert [name for name in names.all_inner_texts() if name in wanted[:6]] == wanted[:6]
    page.screenshot(path=screenshots / "overview.png")

    page.goto("/assets/flights_with_weather?view=events")
    page.get_by_text("Materialized in run").locator("..").get_by_role("link").first.click()
    page.get_by_placeholder("Filter").first.fill("flights_with_weather at_a_glance")
    expect(in_numbers.first).to_be_visible()
    page.screenshot(path=screenshots / "log.png")


def test_full_pictures_open_by_click(page: Page, screenshots: Path) -> None:
    for number, name in enumerate(("timeline", "lateness")):
        page.goto("/assets/flights_with_weather?view=events")
        page.get_by_text("[Show Markdown]").nth(number).click()
        picture = page.locator(f'img[alt="{name}"]')
        expect(picture).to_be_visible()
        assert picture.evaluate("image => image.naturalWidth") == 720
        page.screenshot(path=screenshots / f"{name}.png")


def test_failing_check_shows_rows(page: Page, screenshots: Path) -> None:
    page.goto(f"/assets/{DAMAGED}?view=checks&checkDetail=one_row_per_key")
    expect(page.get_by_text("no key has two current rows")).to_be_visible()
    expect(page.get_by_text("Failed", exact=True).first).to_be_visible()
    expect(page.get_by_text("offending_rows").first).to_be_visible()
    moments = page.get_by_text("2013-01-01 00:00:00", exact=True)
    expect(moments).to_have_count(6)  # three keys, twice each
    page.screenshot(path=screenshots / "check.png")


# -- vt-dagster explore: before the last test, which adds a run ------------------------------------


@pytest.fixture
def explorer(explore: str, browser: Browser) -> Iterator[Page]:
    """A page of ``vt-dagster explore``, on which the browser must report no error."""
    trouble: list[str] = []
    page = browser.new_page(viewport={"width": 1250, "height": 900}, base_url=explore)
    page.set_default_timeout(30_000)
    page.on("console", lambda said: trouble.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    yield page
    page.close()
    assert trouble == []


@pytest.fixture
def shot(docs_shot: Callable[[Page, str], None], explorer: Page) -> Callable[[str], None]:
    """Takes a screenshot of the explorer's page."""
    return lambda name: docs_shot(explorer, f"explore-{name}")


def test_explore_flight_to_weather_as_known(explorer: Page, shot: Callable[[str], None]) -> None:
    """Finds a flight, opens its explanation, follows it upstream, and moves to before a late record."""
    explorer.goto("/")
    expect(explorer.get_by_role("row", name=re.compile("^weather "))).to_contain_text("versioned table")
    shot("tables")
    explorer.get_by_role("link", name="flights_with_weather", exact=True).click()
    explorer.get_by_label("column=value").fill(FLIGHT)
    explorer.get_by_role("button", name="Find").click()
    expect(explorer.locator("#left-out")).to_have_text("1 of 1 that is there.")
    explorer.locator("tbody tr th a").click()

    boxes = explorer.locator(".upstream .name")
    expect(boxes).to_have_text(["flights_with_weather", "flights", "weather"])
    expect(explorer.locator("dl.rules dt").filter(has_text="corrected")).to_be_visible()
    expect(explorer.locator("rect.answer")).to_have_count(1)
    expect(explorer.locator("rect.now")).to_have_count(1)
    shot("row")
    explorer.locator(".timeline a").filter(has=explorer.locator("rect.now")).click()
    expect(explorer.get_by_role("heading", level=1)).to_contain_text("weather 0:")
    explorer.get_by_role("link", name="History of its key").click()

    answer = explorer.locator("#answer")
    expect(answer).to_contain_text("True from 2013-02-05")
    assert explorer.locator(".mark.late").count() > 10
    shot("key")
    known = explorer.get_by_label("as known at, by runs")
    known.focus()
    known.press("ArrowLeft")  # as known at the last run: the same
    known.press("ArrowLeft")
    expect(answer).to_contain_text("as known at")
    expect(answer).to_contain_text("True from 2013-02-03 23:00:00 to 2013-02-11 00:00:00")
    assert explorer.locator(".mark.late:not(.unknown)").count() == 1  # the legend's
    assert "known=" in explorer.url
    shot("key-as-known")
    as_of = explorer.get_by_label("as of, within the drawing")
    as_of.focus()
    as_of.press("Home")
    expect(answer).not_to_contain_text("True from 2013-02-03 23:00:00")


def test_explore_follows_record_upstream(explorer: Page) -> None:
    explorer.goto("/row/flights_with_weather?offset=0:100")
    explorer.locator(".upstream a").filter(has_text="flights").nth(1).click()
    expect(explorer.get_by_role("heading", level=1)).to_contain_text("flights 0:")
    expect(explorer.get_by_text("flights-2013-01.jsonl")).to_be_visible()


def test_explore_drags_grace_line(explorer: Page, shot: Callable[[str], None]) -> None:
    """The mouse and keys move the line, and the numbers follow."""
    explorer.goto("/lateness/flights_with_weather")
    cost = explorer.locator("#cost")
    expect(cost).to_contain_text("6 h (declared)")
    line, target = explorer.locator("#grace circle"), explorer.locator(".costs .point.wrong").first
    start, end = line.bounding_box(), target.bounding_box()
    assert start is not None
    assert end is not None
    explorer.mouse.move(start["x"] + 5, start["y"] + 5)
    explorer.mouse.down()
    explorer.mouse.move(end["x"] + 30, end["y"] + 20, steps=5)
    explorer.mouse.move(end["x"] + 5, end["y"] + 20, steps=3)
    explorer.mouse.up()
    expect(cost).to_contain_text(re.compile(r"^0 s: [\d,]+ of [\d,]+ wrong"))
    expect(explorer.locator("#choices tr.chosen th")).to_have_text("0 s")
    expect(explorer.locator(".costs .declared")).to_be_visible()  # at the line's first position
    shot("lateness")
    slider = explorer.get_by_label("grace period", exact=True)
    slider.focus()
    slider.press("End")
    expect(cost).to_contain_text("7 d:")


def test_explore_by_keyboard_only(explorer: Page) -> None:
    explorer.goto("/key/weather?key=JFK")
    ticks = explorer.locator(".timeline .tick")
    whole = ticks.first.text_content()
    for _ in range(20):
        explorer.keyboard.press("Tab")
        if explorer.evaluate("document.activeElement.classList.contains('timeline')"):
            break
    explorer.keyboard.press("+")
    expect(ticks.first).not_to_have_text(whole or "")
    explorer.keyboard.press("ArrowLeft")
    explorer.keyboard.press("0")
    expect(ticks.first).to_have_text(whole or "")


def test_explore_narrow_and_dark(explorer: Page, shot: Callable[[str], None]) -> None:
    explorer.set_viewport_size({"width": 380, "height": 800})
    explorer.emulate_media(color_scheme="dark")
    for place in ("/", "/table/weather", "/key/weather?key=JFK", "/lateness/flights_with_weather"):
        explorer.goto(place)
        wide = explorer.evaluate("document.documentElement.scrollWidth")
        assert wide <= 380, f"{place} is {wide} wide"
        dark = explorer.evaluate("getComputedStyle(document.body).backgroundColor")
        assert dark == "rgb(20, 23, 27)"
    shot("narrow")


@pytest.mark.endurance
@pytest.mark.timeout(900)
def test_materialize_by_click(
    dev: str, environment: dict[str, str], browser: Browser, screenshots: Path
) -> None:
    """A click launches a run that consumes the landed files. The run succeeds, and the pages show its
    log and numbers."""
    write_landing(Path(environment["VT_DAGSTER_DATA"]) / "landing", (4,))
    page = browser.new_page(viewport={"width": 1500, "height": 950}, base_url=dev)
    page.goto("/assets/weather?view=overview")
    expect(page.get_by_text("keeps the history of each key for")).to_be_visible()
    page.get_by_role("button", name="Materialize").first.click()
    expect(page.get_by_text("Launched run")).to_be_visible()
    page.get_by_text("View", exact=True).last.click()
    page.wait_for_url("**/runs/**")
    expect(page.get_by_text("Success", exact=True).first).to_be_visible(timeout=600_000)
    page.get_by_placeholder("Filter").first.fill("committed")
    expect(page.get_by_text("weather: committed batch 3 (log version 2)").first).to_be_visible()
    page.screenshot(path=screenshots / "materialized.png")
    page.goto("/assets/weather?view=events")
    expect(page.get_by_text("Materialized in run").first).to_be_visible()
    expect(page.get_by_text("records_applied", exact=True).first).to_be_visible()
    page.close()
