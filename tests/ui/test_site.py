"""The documentation is built without warnings, and works offline from its directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.ui.conftest import ROOT

pytestmark = pytest.mark.browser


def built_by_make_docs() -> Path | None:
    """The site of ``make docs``, unless it failed or a file has changed since."""
    site = ROOT / "build" / "docs"
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    whole = site / ".whole"
    if not whole.exists() or not files or not all(file.exists() for file in files):
        return None
    changed = max(file.stat().st_mtime for file in files)
    return site if changed < whole.stat().st_mtime else None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, rebuilt if necessary; a warning, also of a broken link, fails the build."""
    if found := built_by_make_docs():
        return found
    made = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(made)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout + done.stderr == ""
    return made


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def test_site_works_offline(site: Path, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "operators" / "grace-period.html").as_uri())
    page.get_by_role("img", name="timeline of kip923-small-example-table-late").wait_for()
    page.keyboard.press("f")
    page.keyboard.type("history retention")
    found = page.locator(".md-search-result__item a").first
    found.wait_for()
    found.click()
    page.get_by_role("heading", level=1).wait_for()
    assert page.url.startswith(site.as_uri())
    assert Path(page.url.removeprefix("file://").partition("#")[0].partition("?")[0]).is_file()
    assert [url for url in asked if not url.startswith(("file:", "data:", "about:", "blob:"))] == []


@pytest.mark.parametrize("width", [400, 1400])
def test_pages_fit_window_width(site: Path, page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    for name in ("index", "concepts/time", "operators/index", "operators/windows", "compare"):
        page.goto((site / f"{name}.html").as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{name} is {wide} wide"
