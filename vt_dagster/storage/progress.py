"""Progress lines of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_ALWAYS = ("in", "applied", "out")


class Progress:
    """Reports each finished step of a run and its duration.

    Args:
        name: the asset; each line begins with it.
        tell: receives each line; None = lines are dropped.
    """

    def __init__(self, name: str, tell: Callable[[str], None] | None = None) -> None:
        self._name, self._tell = name, tell
        self._since = time.monotonic()

    def done(self, what: str) -> None:
        """Reports a finished step, and starts the clock of the next one."""
        now = time.monotonic()
        if self._tell is not None:
            self._tell(f"{self._name}: {what} ({now - self._since:.1f} s)")
        self._since = now


def in_words(counts: Mapping[str, int]) -> str:
    """Returns the counts of a commit as text; zeros are left out, except for in, applied and out."""
    return ", ".join(
        f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items() if n or name in _ALWAYS
    )
