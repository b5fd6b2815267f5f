# SPDX-License-Identifier: Apache-2.0
"""Read yaml files of a configuration and of its clusters, so that each error can name a line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from holmes_core.config_values import refuse
from holmes_core.errors import ConfigError, did_you_mean

__all__ = ["read_clusters_of_file", "read_yaml"]


def read_yaml(path: str | Path, *, section: str = "", named_by: str = "") -> tuple[dict[str, Any], dict[str, int]]:
    """Return a yaml mapping (or the section of it, where there is one) and the line of each of its keys.

    Args:
        path: Of the file.
        section: The key under which the mapping may lie.
        named_by: Who named the file, in words.

    Raises:
        ConfigError: It cannot be read, is not a mapping, or has a key twice.
    """
    where = f"file {path}" + (f" (named by {named_by})" if named_by else "")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, TypeError) as error:
        do = "correct the path, or make the file readable on every host"
        raise ConfigError(seen=f"cannot read: {error}", where=where, do=do) from None
    try:
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        do = "correct the yaml; names with brackets or colons need quotes: 'node[1-4]'"
        raise ConfigError(seen=f"not yaml: {error}", where=where, do=do) from None
    if isinstance(data, dict) and section in data:
        node = next(value for key, value in node.value if key.value == section)
        data = data[section]
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(seen=f"a {type(data).__name__}", where=where, do="write 'key: value' lines, like 'pp: 2'")
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if lines.setdefault(key.value, line) != line:
            seen = f"key {key.value!r} occurs twice, on lines {lines[key.value]} and {line}"
            raise ConfigError(seen=seen, where=where, do="keep one of them")
    return data, lines


def read_clusters_of_file(path: object, origin: str) -> Any:
    """Return what a cluster file has under `clusters`.

    Args:
        path: Of the yaml file.
        origin: Who named it, in words.

    Raises:
        ConfigError: It cannot be read, or has other keys.
    """
    if not isinstance(path, (str, os.PathLike)):
        refuse("cluster_file", path, "the path of a yaml file")
    data, lines = read_yaml(str(path), named_by=origin)
    for key in data:
        if key not in ("clusters", "links"):
            hint = did_you_mean(str(key), ["clusters", "links"])
            where = f"file {path}, line {lines[str(key)]}"
            do = "use only the keys 'clusters' and 'links'"
            raise ConfigError(seen=f"unknown key {key!r}{hint}", where=where, do=do)
    if not data.get("clusters"):
        do = "write clusters: [{name: a, kind: infiniband, hosts: [n1, n2]}, ...]"
        raise ConfigError(seen="no key 'clusters'", where=f"file {path}", do=do)
    return data["clusters"]
