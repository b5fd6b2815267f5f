# SPDX-License-Identifier: Apache-2.0
"""Strategies that damage what was well formed: bytes of a file, values of a JSON document."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from([10**6, 10**18, 0.5]),
    st.floats(),
    st.text(max_size=6),
)
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(st.text(max_size=4), LEAVES, max_size=2)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a JSON document."""
    found = [path]
    if isinstance(document, dict):
        for key, value in document.items():
            found += places(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document[:6]):
            found += places(value, (*path, index))
    return found


@st.composite
def damaged_json(draw: st.DrawFn, documents: list[str], most: int = 3) -> str:
    """Well-formed JSON in which a few values are others, missing, doubled or swapped."""
    whole = json.loads(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(places(whole)))
        if not path:
            continue
        owner = whole
        for step in path[:-1]:
            owner = owner[step]
        last, how = path[-1], draw(st.sampled_from(["other", "other", "remove", "copy", "add"]))
        if how == "other":
            owner[last] = draw(VALUES)
        elif how == "remove":
            del owner[last]
        elif how == "copy":  # a value of another place, often of the right type
            source = whole
            for step in draw(st.sampled_from(places(whole))):
                source = source[step]
            owner[last] = copy.deepcopy(source)
        elif isinstance(owner, list):
            owner.append(copy.deepcopy(owner[last]))
        else:
            owner[draw(st.text(max_size=5))] = draw(VALUES)
    return json.dumps(whole)


@st.composite
def damaged_bytes(draw: st.DrawFn, contents: list[bytes]) -> bytes:
    """A file in which bytes are flipped, cut out, put in or missing at the end."""
    data = bytearray(draw(st.sampled_from(contents)))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 40))] = draw(st.binary(max_size=8))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)
