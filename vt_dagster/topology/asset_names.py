"""Names of assets: a name is a directory of the warehouse and part of names in Dagster."""

from __future__ import annotations

import re

from vt_dagster.errors import TopologyError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_AN_ASSET = frozenset({"attempts", "log", "quarantine", "view"})
"""Folders of an asset's own tables: the path of another asset must not lead through one."""
_LONGEST = 100
"""A name is part of directory, file, op and check names, which are limited to some 200 characters."""


def require_name(name: str, kind: str) -> None:
    """Raises TopologyError for a name that cannot be a directory and part of a Dagster name."""
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
    """Returns the parts of an asset's path in a warehouse, ``shop/eu/prices``: its Dagster key.

    Raises:
        TopologyError: an invalid path, for example one inside the folder of another asset.
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
    """Names of operator kinds, used in the names of their ops."""

    @classmethod
    def words(cls) -> tuple[str, ...]:
        """Returns the names of this class: ``called``, else the class name as ``map_values``."""
        own = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        return vars(cls).get("called", (own,))

    @property
    def word(self) -> str:
        """The name of this operator's kind, one of ``words``."""
        return self.words()[0]
