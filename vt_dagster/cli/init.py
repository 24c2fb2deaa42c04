"""``vt-dagster init``: a project that runs at once, from the texts in ``project``."""

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
{where} is a project of Dagster: two sources in data/landing, a join, a check and a test.
  cd {where}
  make run     take in what has landed; starts a Spark server, which stays: the next run is warm
  make look    a table's history, and why a row is as it is
  make test    the project's test
  make check   all checks on what is committed
  make ui      Dagster's pages on http://localhost:3000
  make stop    end the Spark server
"""


def init(
    name: Annotated[str, typer.Argument(help="Of the project, its directory and its Python package.")],
    yaml: Annotated[
        bool, typer.Option("--yaml", help="Tables in a defs.yaml instead of Python.")
    ] = False,
) -> None:
    """Make a project with data, a join, a check, a test and a Makefile, that runs at once."""
    _check(name)
    where = Path(name)
    for folder in ("any", "yaml" if yaml else "python"):
        _write(_TEMPLATES / folder, where, name)
    typer.echo(_NEXT.format(where=where), nl=False)


def _check(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise DefinitionsError(
            "the name of a project must be that of a Python package, in small letters, digits and _, "
            f"for example my_shop; got {name!r}: choose another one"
        )
    if Path(name).exists():
        raise DefinitionsError(
            f"expected a name that is free in {Path.cwd()}, got {name!r}, which is there already: "
            "choose another one, or remove it"
        )
    if find_spec(name) is not None:
        raise DefinitionsError(
            f"expected a name that no Python package has, got {name!r}, which can be imported here "
            "and would be hidden by the project: choose another one"
        )


def _write(template: Path, to: Path, name: str) -> None:
    """A folder of templates: ``NAME`` is the project's name, in their names and texts."""
    to.mkdir(exist_ok=True)
    for one in template.iterdir():
        made = to / one.name.replace(_PLACE, name).removesuffix(".txt")
        if one.is_dir():
            _write(one, made, name)
        else:
            made.write_text(one.read_text(encoding="utf-8").replace(_PLACE, name), encoding="utf-8")
