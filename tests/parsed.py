"""The library's source, parsed once for the tests that look at it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files(*folders: str) -> list[Path]:
    """Python's files below folders of the project, from its root on."""
    return sorted(p.relative_to(ROOT) for f in folders for p in (ROOT / f).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """A file, from the project's root on, parsed."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file."""
    return tuple(ast.walk(tree(path)))
