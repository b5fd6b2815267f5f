# SPDX-License-Identifier: Apache-2.0
"""Inventories of machines one only has the outputs of: several tools' texts about one host, put together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from holmes_core.cluster.assemble import assemble
from holmes_core.cluster.facts import HostFacts, PortFacts
from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.sources.ibstat import is_ibstat, is_ibstatus, read_ibstat, read_ibstatus
from holmes_core.cluster.sources.nccl_xml import is_nccl_xml, read_nccl_xml
from holmes_core.cluster.sources.tables import (
    is_addresses,
    is_ibdev2netdev,
    is_show_gids,
    is_topo_matrix,
    read_addresses,
    read_ibdev2netdev,
    read_show_gids,
    read_topo_matrix,
)
from holmes_core.errors import ConfigError

__all__ = ["SOURCES", "inventory_from_files", "inventory_from_texts", "merge"]

_T = TypeVar("_T")
#: What a text is, how it is recognised, how it is read.
SOURCES: Mapping[str, tuple[Callable[[str], bool], Callable[[str], HostFacts]]] = {
    "NCCL topology XML": (is_nccl_xml, read_nccl_xml),
    "ibstat": (is_ibstat, read_ibstat),
    "ibstatus": (is_ibstatus, read_ibstatus),
    "show_gids": (is_show_gids, read_show_gids),
    "ibdev2netdev": (is_ibdev2netdev, read_ibdev2netdev),
    "nvidia-smi topo -m": (is_topo_matrix, read_topo_matrix),
    "ip -br addr": (is_addresses, read_addresses),
}


def inventory_from_files(paths: Sequence[Path], *, host: str = "") -> Inventory:
    """Read files about one host: tools' outputs in any order and mixture, or one inventory written as JSON.

    Args:
        paths: The files.
        host: The host's name; empty takes it from the first file's name (``a1.ibstat.txt`` is about ``a1``).

    Raises:
        ConfigError: A file cannot be read, or is nothing that is known.
    """
    texts = {str(path): _text(path) for path in paths}
    if not texts:
        raise ConfigError(seen="no file", where="inventory_from_files", do="name at least one file")
    for path, text in texts.items():
        if text.lstrip().startswith("{"):
            if len(texts) > 1:
                do = "give it alone: an inventory is complete"
                raise ConfigError(seen="an inventory next to other files", where=path, do=do)
            return _from_json(text, path, host)
    return inventory_from_texts(texts, host=host or paths[0].name.split(".")[0])


def inventory_from_texts(texts: Mapping[str, str], *, host: str) -> Inventory:
    """Put tools' outputs about one host together.

    Args:
        texts: Where each came from (for messages) -> what the tool printed.
        host: The host's name.

    Raises:
        ConfigError: A text is no output that is known.
    """
    facts = merge(_facts(text, where) for where, text in texts.items())
    assumed = [port for port in facts.ports if _says_nothing_about_kind(port)]
    for port in assumed:
        port.link_layer = "InfiniBand"
    if assumed:
        names = ", ".join(dict.fromkeys(port.device for port in assumed))
        facts.warnings.append(f"{names}: the link layer is in none of the inputs, taken as InfiniBand; add ibstat")
    return assemble(host, facts)


def merge(parts: Iterable[HostFacts]) -> HostFacts:
    """Join facts about one host: what one source leaves open another fills in; the first word counts."""
    ports: dict[tuple[str, int], PortFacts] = {}
    found = HostFacts(states_told=False)
    nets: dict[str, object] = {}
    for part in parts:
        for port in part.ports:
            _fill(ports.setdefault((port.device, port.port), port), port)
        for net in part.nets:
            _fill(nets.setdefault(net.name, net), net)
            if nets[net.name] is net:
                found.nets.append(net)
        for number, gpu in enumerate(part.gpus):
            if number == len(found.gpus):
                found.gpus.append(gpu)
            else:
                _fill(found.gpus[number], gpu)
                found.gpus[number].distances.update(gpu.distances)
        found.warnings += part.warnings
    found.ports = list(ports.values())
    return found


def _fill(into: object, other: object) -> None:
    for field in dataclasses.fields(other):  # type: ignore[arg-type]
        if getattr(into, field.name) in ("", None, ()):
            setattr(into, field.name, getattr(other, field.name))


def _says_nothing_about_kind(port: PortFacts) -> bool:
    return not (port.kind or port.link_layer or port.pci_class or port.driver or port.vendor or port.problem)


def _facts(text: str, where: str) -> HostFacts:
    for matches, read in SOURCES.values():
        if matches(text):
            return _named(partial(read, text), where)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "(empty)")
    raise ConfigError(
        seen=f"no output that is known; it begins with {first[:80]!r}",
        where=where,
        do=f"give the output of: {', '.join(SOURCES)}; or an inventory from `holmes detect --json`",
    )


def _named(read: Callable[[], _T], where: str) -> _T:
    """Read; an error also says in which file."""
    try:
        return read()
    except ConfigError as error:
        place = f"{where}, {error.where}" if error.where else where
        raise ConfigError(seen=error.seen, where=place, means=error.means, do=error.do) from error


def _from_json(text: str, where: str, host: str) -> Inventory:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            seen=f"no valid JSON: {error}", where=where, do="write it with `holmes detect --json`"
        ) from error
    found = _named(lambda: Inventory.from_json(data), where)
    return dataclasses.replace(found, host=host) if host else found


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            seen=f"cannot be read: {error.strerror or error}", where=str(path), do="name a file that exists"
        ) from error
    # PowerShell and some editors save UTF-16.
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return data.decode(encoding, errors="replace")
