# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on: what was seen, where, what it means, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["ConfigError", "HolmesError", "did_you_mean"]


class HolmesError(RuntimeError):
    """An error in the one shape Holmes uses everywhere.

    Args:
        seen: What was observed, with names and numbers.
        where: The place: a field, a file and line, a rank.
        means: Why this cannot go on.
        do: What the user can do about it.
    """

    def __init__(self, *, seen: str, do: str, where: str | None = None, means: str | None = None) -> None:
        RuntimeError.__init__(self, seen)
        self.seen = seen
        self.where = where
        self.means = means
        self.do = do

    def __str__(self) -> str:
        """Return the text a user reads, one labelled part per line."""
        parts = (("seen", self.seen), ("where", self.where), ("means", self.means), ("do", self.do))
        indent = "\n" + " " * 7
        return "\n".join(f"{label + ':':<6} {text.replace(chr(10), indent)}" for label, text in parts if text)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by parts (keyword-only arguments are unknown to BaseException's own pickling)."""
        return _rebuild, (type(self), self.seen, self.where, self.means, self.do)


class ConfigError(HolmesError, ValueError):
    """What the user asked for is wrong, contradictory or impossible on this machine."""


def _rebuild(kind: type[HolmesError], seen: str, where: str | None, means: str | None, do: str) -> HolmesError:
    return kind(seen=seen, where=where, means=means, do=do)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the option nearest to a word, or an empty string."""
    by_lower = {option.lower(): option for option in options}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""
