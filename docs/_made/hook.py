"""What MkDocs makes of markers like ``<!-- made: scenarios windows -->``, and of files outside docs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import tables  # noqa: E402
from drawings import drawing  # noqa: E402
from scenarios import scenarios  # noqa: E402

MADE = re.compile(r"<!-- made: (\w+) ?(.*?) -->")
ELSEWHERE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks/index.md": "bench/README.md",
    "benchmarks/large_site.md": "bench/large_site.md",
    "benchmarks/tried.md": "bench/tried.md",
    "benchmarks/ratios.svg": "bench/ratios.svg",
    "faults.md": "tests/README.md",
    "develop/contributing.md": "CONTRIBUTING.md",
    "operators/format.md": "tests/conformance/FORMAT.md",
    "examples/features.md": "examples/features/README.md",
    "examples/kafka.md": "examples/kafka/README.md",
    "examples/payments.md": "examples/payments/README.md",
    "examples/sql.md": "examples/sql/README.md",
    "examples/warehouse.md": "examples/warehouse/README.md",
    "pictures/asset.png": "tests/ui/screenshots/asset.png",
    "pictures/check.png": "tests/ui/screenshots/check.png",
}
"""Pages and pictures that lie beside what they tell of, with the address that they have here."""

PARTS: dict[str, Callable[[str], str]] = {
    "scenarios": lambda about: scenarios(about.split()[0], about.split()[1:]),
    "drawing": drawing,
    "observed": tables.observed,
    "differences": tables.differences,
    "rules": lambda _: tables.rules(),
    "metrics": lambda _: tables.metrics(),
    "errors": lambda _: tables.errors(),
    "options": lambda _: tables.options(),
    "option_matrix": lambda _: tables.option_matrix(),
    "typed_ops": lambda _: tables.typed_ops(),
    "commands": lambda _: tables.commands(),
}
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\ssrc=[\"']?(https?:)?//"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|preload|icon))[^>]*href=[\"']?(https?:)?//"
)


def on_files(files: Files, config: Any) -> Files:
    for name, source in ELSEWHERE.items():
        path = ROOT / source
        if name.endswith(".md"):
            text = linked(path.read_text(encoding="utf-8"), source, name)
            files.append(File.generated(config, name, content=text))
        else:
            files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def linked(text: str, source: str, name: str) -> str:
    """Links of a file as they are from its page: into pages, else plain code."""
    pages = {there: here for here, there in ELSEWHERE.items()}
    up = "../" * name.count("/")

    def one(found: re.Match[str]) -> str:
        shown, to = found.groups()
        if re.match(r"https?:|#", to):
            return found.group(0)
        path, _, anchor = to.partition("#")
        full = (ROOT / source).parent.joinpath(path).resolve().relative_to(ROOT).as_posix()
        page = full.removeprefix("docs/") if full.startswith("docs/") else pages.get(full)
        if page is None:
            return f"`{full}`"
        return f"[{shown}]({up}{page}{'#' + anchor if anchor else ''})"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", one, text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def made(found: re.Match[str]) -> str:
        try:
            return PARTS[found.group(1)](found.group(2))
        except (KeyError, ValueError) as error:
            raise PluginError(f"{page.file.src_uri}: {found.group(0)}: {error}") from error

    return MADE.sub(made, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A page that loads something from another site is an error: the docs work without a network."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another site: {found.group(0)}")
    return output
