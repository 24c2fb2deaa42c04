"""What assets may be called: a name is a directory of the warehouse and part of names in Dagster."""

from __future__ import annotations

import re

from vt_dagster.errors import TopologyError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_AN_ASSET = frozenset({"attempts", "log", "quarantine", "view"})
"""The folders of an asset's own tables: none of them can be on the way to another asset."""
_LONGEST = 100
"""A name is part of names of directories, files, ops and checks, which may have some 200 characters."""


def require_name(name: str, kind: str) -> None:
    """A name becomes a directory of the warehouse and part of a Dagster name.

    Raises:
        TopologyError: it is none.
    """
    if not _NAME.fullmatch(name):
        raise TopologyError(
            f"{name!r} is not a name for a {kind}: use letters, digits and underscores, not starting "
            "with a digit"
        )
    if len(name) > _LONGEST:
        raise TopologyError(
            f"{name[:20]!r}… is not a name for a {kind}: it has {len(name)} characters, use at most "
            f"{_LONGEST}"
        )


def require_path(path: str, kind: str) -> list[str]:
    """The parts of an asset's path in a warehouse, ``shop/eu/prices``: its key in Dagster.

    Raises:
        TopologyError: it is none, for example since it leads into the folder of another asset.
    """
    parts = path.split("/")
    for part in parts:
        require_name(part, kind)
        if len(parts) > 1 and part in _OF_AN_ASSET:
            raise TopologyError(
                f"{path!r} is not a name for a {kind}: {part!r} is a folder of an asset's own tables; "
                "give it another key prefix or name"
            )
    return parts


class Called:
    """What kinds of operators are called, in the names of their ops."""

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """Those of this class: what it says in ``called``, else its own name, like ``map_values``."""
        own = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        return vars(cls).get("called", (own,))

    @property
    def word(self) -> str:
        """Which of them this one is called."""
        return self.words()[0]
