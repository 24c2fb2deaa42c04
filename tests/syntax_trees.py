"""The project's source files, parsed once for the tests that inspect them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files(*folders: str) -> list[Path]:
    """The Python files below folders of the project, as paths relative to its root."""
    return sorted(p.relative_to(ROOT) for f in folders for p in (ROOT / f).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file; the path is relative to the project's root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's syntax tree."""
    return tuple(ast.walk(tree(path)))
