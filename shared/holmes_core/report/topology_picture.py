# SPDX-License-Identifier: Apache-2.0
"""A picture of a job's networks: clusters, their hosts, every rail and GPU, and the Ethernet that joins them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.nic import RDMA_KINDS, Nic
from holmes_core.cluster.topology import Topology
from holmes_core.errors import ConfigError

__all__ = ["draw_topology"]

_COLOURS = {
    "infiniband": "#2563a8",
    "roce": "#1b8a5a",
    "omnipath": "#7b4ea3",
    "efa": "#c76b00",
    "slingshot": "#a3324b",
    "ethernet": "#6b7280",
}
_LOST, _INK, _FAINT, _PAPER = "#c62828", "#1f2937", "#6b7280", "#f5f6f8"
_MOST_HOSTS = 10  # drawn in all, about; the rest is a number
_MOST_GPUS = 8  # of one row
_WIDTH, _GAP, _MARGIN = 2.0, 0.3, 0.35  # of a host, between hosts, in a cluster; inches


def draw_topology(topology: Topology, path: Path) -> None:
    """Draw the clusters of a job.

    Args:
        topology: The clusters; hosts with inventories are drawn with their NICs.
        path: The file to write; its ending says which format (.png, .svg, .pdf).

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(seen="matplotlib is not installed", where="--picture", do="pip install matplotlib") from error
    most = max(2, _MOST_HOSTS // len(topology.clusters))
    columns = [min(len(cluster.hosts), most) for cluster in topology.clusters]
    widths = [max(count * (_WIDTH + _GAP) - _GAP, 3.4) + 2 * _MARGIN for count in columns]
    width, height = sum(widths) + 0.5 * (len(widths) - 1) + 0.8, 5.1
    # A figure of its own, without pyplot: no window, no state shared with the user's plots.
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    axes.text(0.4, height - 0.36, _title(topology), fontsize=12, fontweight="bold", color=_INK, va="center")
    left = 0.4
    for cluster, cluster_width, count in zip(topology.clusters, widths, columns, strict=True):
        _draw_cluster(axes, cluster, left, cluster_width, cluster.hosts[:count])
        left += cluster_width + 0.5
    _draw_ethernet(axes, topology, width)
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            seen=f"the picture cannot be written: {error}", where=str(path), do="write to a .png, .svg or .pdf file"
        ) from error


def _title(topology: Topology) -> str:
    hosts = sum(len(cluster.hosts) for cluster in topology.clusters)
    clusters = len(topology.clusters)
    return (
        f"{clusters} cluster{'s' * (clusters > 1)}, {hosts} host{'s' * (hosts > 1)}, "
        f"{topology.world_size} rank{'s' * (topology.world_size > 1)}"
    )


def _draw_cluster(axes: Any, cluster: Cluster, left: float, width: float, shown: Sequence[Host]) -> None:
    colour = _COLOURS.get(cluster.kind, _FAINT)
    _box(axes, left, 0.95, width, 3.5, face=_PAPER, edge=colour, line=1.4)
    axes.text(left + 0.18, 4.22, cluster.name, fontsize=10.5, fontweight="bold", color=colour, va="center")
    _text(axes, left + width - 0.18, 4.22, cluster.reason, width - 0.3 - 0.1 * len(cluster.name), align="right")
    fast = cluster.kind in RDMA_KINDS
    if fast:
        _box(axes, left + 0.18, 3.62, width - 0.36, 0.3, face=colour, edge=colour)
        axes.text(left + width / 2, 3.765, _fabric_label(cluster), fontsize=9, color="white", ha="center", va="center")
    used = len(shown) * (_WIDTH + _GAP) - _GAP
    start = left + (width - used) / 2
    for number, host in enumerate(shown):
        _draw_host(axes, host, cluster, start + number * (_WIDTH + _GAP), colour)
    if len(cluster.hosts) > len(shown):
        more = f"and {len(cluster.hosts) - len(shown)} more"
        axes.text(left + width - 0.18, 1.12, more, fontsize=8.5, color=_INK, ha="right", va="center")


def _fabric_label(cluster: Cluster) -> str:
    rates = [sum((nic.rate or 0.0) * nic.members for nic in _rails(host)) for host in cluster.hosts]
    if not any(rates):
        return cluster.kind
    low, high = min(rates), max(rates)
    return f"{cluster.kind}, {f'{low:g}' if low == high else f'{low:g} to {high:g}'} Gbit/s per host"


def _draw_host(axes: Any, host: Host, cluster: Cluster, left: float, colour: str) -> None:
    inventory = host.inventory
    _box(axes, left, 1.35, _WIDTH, 1.75, face="white", edge="#c3c8d0")
    axes.text(left + _WIDTH / 2, 2.48, _shorten(host.name, 22), fontsize=9.5, color=_INK, ha="center", va="center")
    ranks = f"rank {host.ranks[0]}" if len(host.ranks) == 1 else f"ranks {host.ranks[0]}-{host.ranks[-1]}"
    axes.text(left + _WIDTH / 2, 2.25, ranks, fontsize=8, color=_FAINT, ha="center", va="center")
    if inventory is None:
        return
    fast = cluster.kind in RDMA_KINDS
    # Every rail is a square on the upper edge with its line to the fabric; one that is lost is crossed out.
    lost = [nic for nic in inventory.nics if nic.kind in RDMA_KINDS and not nic.usable][: inventory.missing_rails]
    marks: list[tuple[Nic, bool]] = [(nic, True) for nic in _rails(host)] + [(nic, False) for nic in lost]
    step = min(0.24, (_WIDTH - 0.2) / max(len(marks), 1))
    first = left + _WIDTH / 2 - step * (len(marks) - 1) / 2
    for number, (nic, good) in enumerate(marks):
        x = first + number * step
        if good and fast:
            axes.plot([x, x], [3.1, 3.62], color=colour, linewidth=_line(nic), solid_capstyle="butt", zorder=1)
        size = min(0.16, step * 0.72)
        _box(
            axes,
            x - size / 2,
            3.1 - size / 2,
            size,
            size,
            face=colour if good else "white",
            edge=colour if good else _LOST,
        )
        if not good:
            axes.text(x, 3.095, "x", fontsize=7, color=_LOST, ha="center", va="center", zorder=4)
    if marks:
        names = _names([nic.device for nic, good in marks if good])
        words = [names] if names else []
        if inventory.missing_rails:
            words.append(f"{inventory.missing_rails} lost")
        label = _shorten(", ".join(words), 30)
        axes.text(left + _WIDTH / 2, 2.84, label, fontsize=7, color=_LOST if lost else colour, ha="center", va="center")
    _draw_gpus(axes, len(inventory.accelerators), left)
    nic_ = inventory.nic(inventory.ethernet)
    if nic_ is not None:
        _draw_uplink(axes, nic_, left + _WIDTH / 2)


def _draw_gpus(axes: Any, count: int, left: float) -> None:
    if not count:
        axes.text(left + _WIDTH / 2, 1.9, "no GPU seen", fontsize=7.5, color=_FAINT, ha="center", va="center")
        return
    shown = min(count, _MOST_GPUS)
    first = left + _WIDTH / 2 - 0.21 * (shown - 1) / 2
    for number in range(shown):
        _box(axes, first + number * 0.21 - 0.08, 1.86, 0.16, 0.16, face="#dfe3e9", edge="#9aa3af")
    word = f"{count} GPU{'s' * (count > 1)}"
    axes.text(left + _WIDTH / 2, 1.72, word, fontsize=7.5, color=_FAINT, ha="center", va="center")


def _draw_uplink(axes: Any, nic: Nic, x: float) -> None:
    axes.plot([x, x], [0.62, 1.35], color=_COLOURS["ethernet"], linewidth=_line(nic), solid_capstyle="butt", zorder=1)
    _box(axes, x - 0.08, 1.27, 0.16, 0.16, face=_COLOURS["ethernet"], edge=_COLOURS["ethernet"])
    rate = "" if nic.rate is None else f", {nic.rate * nic.members:g} Gbit/s"
    text = f"{nic.netdev}{rate}"
    axes.text(x, 1.53, _shorten(text, 30), fontsize=7, color=_FAINT, ha="center", va="center")


def _draw_ethernet(axes: Any, topology: Topology, width: float) -> None:
    from holmes_core.plan.network import ethernet_interfaces

    hosts = [host for cluster in topology.clusters for host in cluster.hosts]
    _, how = ethernet_interfaces(hosts)
    _box(axes, 0.4, 0.32, width - 0.8, 0.3, face=_COLOURS["ethernet"], edge=_COLOURS["ethernet"])
    label = "Ethernet between clusters" + (f": {how}" if how and len(hosts) > 1 else "")
    axes.text(width / 2, 0.465, label, fontsize=9, color="white", ha="center", va="center")


def _rails(host: Host) -> Sequence[Nic]:
    return host.inventory.rail_nics if host.inventory is not None else ()


def _line(nic: Nic) -> float:
    """Line width: a tenfold rate is one and a half times as wide."""
    from math import log10

    return 0.8 + 0.9 * log10(max(nic.rate or 10.0, 1.0)) if nic.rate else 1.2


def _names(devices: Sequence[str]) -> str:
    return ", ".join(devices) if len(devices) <= 2 else f"{devices[0]} ... {devices[-1]} ({len(devices)})"


def _box(
    axes: Any, left: float, bottom: float, width: float, height: float, *, face: str, edge: str, line: float = 0.9
) -> None:
    from matplotlib.patches import FancyBboxPatch

    round_ = min(0.06, height / 4, width / 4)
    axes.add_patch(
        FancyBboxPatch(
            (left + round_, bottom + round_),
            width - 2 * round_,
            height - 2 * round_,
            boxstyle=f"round,pad={round_},rounding_size={round_}",
            facecolor=face,
            edgecolor=edge,
            linewidth=line,
            zorder=0.5 if face == _PAPER else 2,
        )
    )


def _text(axes: Any, x: float, y: float, text: str, width: float, *, align: str) -> None:
    """Write small text, cut to a width in inches (about 15 characters fit into one)."""
    axes.text(x, y, _shorten(text, int(width * 15)), fontsize=7.5, color=_FAINT, ha=align, va="center")


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: max(length - 3, 0)].rstrip() + "..."
