"""What a run has done so far, told while it is at work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_ALWAYS = ("in", "applied", "out")


class Progress:
    """Tells each step of a run when it is done, and how long it took.

    Args:
        name: of the asset; each line begins with it.
        tell: takes a line; None = nobody listens.
    """

    def __init__(self, name: str, tell: Callable[[str], None] | None = None) -> None:
        self._name, self._tell = name, tell
        self._since = time.monotonic()

    def done(self, what: str) -> None:
        """A step is done, and the next one begins."""
        now = time.monotonic()
        if self._tell is not None:
            self._tell(f"{self._name}: {what} ({now - self._since:.1f} s)")
        self._since = now


def in_words(counts: Mapping[str, int]) -> str:
    """Counts of a commit as a person reads them, without what there was none of."""
    return ", ".join(
        f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items() if n or name in _ALWAYS
    )
