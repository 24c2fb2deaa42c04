"""``vt-dagster init``: creates a runnable project from the templates in ``project``."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from vt_dagster.errors import DefinitionsError

_TEMPLATES = Path(__file__).with_name("project")
_PLACE = "NAME"
_NEXT = """\
{where} is a Dagster project: two sources in data/landing, a join, a check and a test.
  cd {where}
  make run     process the files in data/landing; starts a Spark server that later runs reuse
  make look    show a table's history and explain a row
  make test    run the project's test
  make check   run all checks on the committed tables
  make ui      open Dagster's UI on http://localhost:3000
  make stop    stop the Spark server
"""


def init(
    name: Annotated[str, typer.Argument(help="Name of the project, its directory and its package.")],
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Declare tables in a defs.yaml, not in Python.")
    ] = False,
) -> None:
    """Create a project that runs at once, with data, a join, a check, a test and a Makefile."""
    _check(name)
    where = Path(name)
    for folder in ("any", "yaml" if yaml else "python"):
        _write(_TEMPLATES / folder, where, name)
    typer.echo(_NEXT.format(where=where), nl=False)


def _check(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise DefinitionsError(
            "the name of a project must be a Python package name in lower-case letters, digits and _, "
            f"for example my_shop; got {name!r}: choose another name"
        )
    if Path(name).exists():
        raise DefinitionsError(
            f"expected a name that is free in {Path.cwd()}, got {name!r}, which already exists: "
            "choose another name, or remove it"
        )
    if find_spec(name) is not None:
        raise DefinitionsError(
            f"expected a name that no Python package has, got {name!r}, which can be imported here "
            "and would be hidden by the project: choose another name"
        )


def _write(template: Path, to: Path, name: str) -> None:
    """Writes a folder of templates, with the project's name for ``NAME`` in file names and texts."""
    to.mkdir(exist_ok=True)
    for one in template.iterdir():
        made = to / one.name.replace(_PLACE, name).removesuffix(".txt")
        if one.is_dir():
            _write(one, made, name)
        else:
            made.write_text(one.read_text(encoding="utf-8").replace(_PLACE, name), encoding="utf-8")
