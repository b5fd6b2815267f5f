# SPDX-License-Identifier: Apache-2.0
"""Which RDMA devices of a host are rails (carry training traffic) and which serve storage or management."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holmes_core.cluster.files import natural
from holmes_core.cluster.nic import RDMA_KINDS, Nic, NicKind
from holmes_core.cluster.pci import DISTANCES, by_address

__all__ = ["Rails", "choose_rails", "spread"]

# A device with less than this share of the fastest one's rate is no rail.
_SIMILAR = 0.9
_SWITCH, _SOCKET = DISTANCES.index("PXB"), DISTANCES.index("PHB")
_FAR = len(DISTANCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rails:
    """The choice.

    Args:
        devices: The rails in order.
        kind: Their kind; ``ethernet`` if there are none.
        missing: Devices that should be rails and cannot be used.
        notes: Device -> why a usable device is no rail, or what is odd about one.
        identities: Device -> what pairs it with the same rail of other hosts.
    """

    devices: tuple[str, ...] = ()
    kind: NicKind = "ethernet"
    missing: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    identities: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Device:
    name: str
    kind: NicKind
    ports: list[Nic]
    model: str
    card: str
    distances: list[int]  # to each GPU

    @property
    def usable(self) -> bool:
        return any(port.usable for port in self.ports)

    @property
    def present(self) -> list[Nic]:
        """Ports with a link: in use, or waiting for a subnet manager, a device file, an address."""
        return [p for p in self.ports if p.usable or p.state in ("active", "armed", "init")]

    @property
    def port_rate(self) -> float | None:
        return max((port.rate for port in self.present if port.rate), default=None)

    @property
    def rate(self) -> float | None:
        return sum(port.rate * port.members for port in self.present if port.rate) or None

    @property
    def nearest(self) -> tuple[int, int]:
        """Distance to the nearest GPU, and that GPU."""
        return min(((distance, gpu) for gpu, distance in enumerate(self.distances)), default=(_FAR, 0))


def choose_rails(
    nics: Sequence[Nic],
    *,
    models: Mapping[str, str],
    cards: Mapping[str, str],
    distances: Sequence[Mapping[str, str]],
) -> Rails:
    """Choose the rails of a host.

    Per kind: one device for each wire (a virtual function and its physical one share it), then those next to a GPU
    where any is, then those about as fast as the fastest. Of the kinds the one with the most bandwidth, InfiniBand
    first among equals; links that are up but not usable count, so that an InfiniBand host whose subnet manager is
    away does not train on its storage network.

    Args:
        nics: All ports with their verdicts.
        models: Device -> what equal cards have in common; empty if unknown.
        cards: Device -> what the ports of one card have in common.
        distances: For each GPU: device -> distance.

    Returns:
        The choice, with reasons.
    """
    devices = _devices(nics, models, cards, distances)
    notes: dict[str, str] = {}
    choices = []
    for kind in RDMA_KINDS:
        present = [device for device in devices if device.kind == kind and device.present]
        fitting = _fast(_near(_one_per_wire(present, notes), notes), notes)
        if fitting:
            choices.append((sum(device.rate or 0.0 for device in fitting), kind, fitting))
    choices.sort(key=lambda choice: -choice[0])  # stable: InfiniBand first among equals
    choice = next(
        (one for one in choices if any(d.usable for d in one[2]) and one[0] >= choices[0][0] / 2),
        choices[0] if choices else None,
    )
    if choice is None:
        down = [device for device in devices if device.kind in RDMA_KINDS]
        down = [device for device in down if device.kind == down[0].kind]
        return Rails(missing=tuple(dict(zip([d.card for d in down], [d.name for d in down], strict=True)).values()))
    _, kind, fitting = choice
    for _, other, others in choices:
        if other != kind:
            notes.update({d.name: f"not a rail: the {kind} devices carry the training traffic" for d in others})
    missing = [device.name for device in fitting if not device.usable] + _lost(devices, fitting, kind)
    rails = [device for device in fitting if device.usable]
    if not rails:
        return Rails(missing=tuple(missing), notes=notes)
    identities = _identities(rails)
    rails.sort(key=lambda device: _order(device, identities[device.name]))
    return Rails(
        devices=tuple(device.name for device in rails),
        kind=kind,
        missing=tuple(missing),
        notes=notes,
        identities=identities,
    )


def spread(rails: Sequence[str], distances: Sequence[Mapping[str, str]]) -> list[str]:
    """Give each GPU one of its nearest rails, so that equally near ones are used evenly.

    Args:
        rails: The rails in order.
        distances: For each GPU: device -> distance.

    Returns:
        One device per GPU; empty text where there are no rails.
    """
    used: Counter[str] = Counter()
    found = []
    for near in distances:
        best = min(rails, key=lambda rail: (_steps(near.get(rail, "")), used[rail], rails.index(rail)), default="")
        used[best] += 1
        found.append(best)
    return found


def _steps(distance: str) -> int:
    return DISTANCES.index(distance) if distance in DISTANCES else _FAR


def _devices(
    nics: Sequence[Nic],
    models: Mapping[str, str],
    cards: Mapping[str, str],
    distances: Sequence[Mapping[str, str]],
) -> list[_Device]:
    found: dict[tuple[str, NicKind], _Device] = {}
    for nic in nics:
        if nic.kind in RDMA_KINDS:
            device = found.setdefault(
                (nic.device, nic.kind),
                _Device(
                    name=nic.device,
                    kind=nic.kind,
                    ports=[],
                    model=models.get(nic.device, ""),
                    card=cards.get(nic.device, nic.device),
                    distances=[_steps(near.get(nic.device, "")) for near in distances],
                ),
            )
            device.ports.append(nic)
    return list(found.values())


def _one_per_wire(devices: Sequence[_Device], notes: dict[str, str]) -> list[_Device]:
    """Of a physical function and its virtual ones keep one: usable before not, physical before virtual."""
    wires: dict[str, list[_Device]] = {}
    for device in devices:
        port = device.ports[0]
        wires.setdefault(port.physical_function or port.pci or device.name, []).append(device)
    kept = []
    for wire in wires.values():
        wire.sort(key=lambda device: (not device.usable, bool(device.ports[0].physical_function)))
        # Without a virtual function among them they are devices of their own that happen to share an address.
        virtual = any(device.ports[0].physical_function for device in wire)
        kept += wire[:1] if virtual else wire
        notes.update({d.name: f"not a rail: shares the wire of {wire[0].name}" for d in (wire[1:] if virtual else ())})
    return kept


def _near(devices: Sequence[_Device], notes: dict[str, str]) -> list[_Device]:
    """Where devices sit next to GPUs, keep each GPU's nearest; and what a GPU without such a device has nearest."""
    best = min((device.nearest[0] for device in devices), default=_FAR)
    if best > _SOCKET:
        return list(devices)
    reach = _SWITCH if best <= _SWITCH else _SOCKET
    closest = [min(device.distances[gpu] for device in devices) for gpu in range(len(devices[0].distances))]
    kept = [
        device
        for device in devices
        if any(distance == least <= reach for distance, least in zip(device.distances, closest, strict=True))
    ]
    for gpu, least in enumerate(closest):
        if least < min(device.distances[gpu] for device in kept):
            kept += [device for device in devices if device.distances[gpu] == least and device not in kept]
    for device in devices:
        if device not in kept:
            where = DISTANCES[device.nearest[0]] if device.nearest[0] < _FAR else "unknown"
            text = f"not a rail: nearest to no GPU ({where} at best), others are; storage or management"
            notes[device.name] = text
    return kept


def _fast(devices: Sequence[_Device], notes: dict[str, str]) -> list[_Device]:
    """Keep the devices about as fast as the fastest, and slow ones that are all a GPU has next to it."""
    top_port = max((d.port_rate or 0.0 for d in devices), default=0.0)
    top = max((d.rate or 0.0 for d in devices), default=0.0)
    same_model = {d.model for d in devices if (d.rate or 0.0) == top}
    fast = [
        d
        for d in devices
        if d.port_rate is None
        or (d.port_rate >= _SIMILAR * top_port and ((d.rate or 0.0) >= _SIMILAR * top or d.model in same_model))
    ]
    kept = list(fast)
    for device in devices:
        if device in fast:
            continue
        alone = any(
            distance <= _SWITCH and all(other.distances[gpu] > _SWITCH for other in fast)
            for gpu, distance in enumerate(device.distances)
        )
        rate, best = device.port_rate or 0.0, top_port
        if alone:
            kept.append(device)
            notes[device.name] = f"slow rail: {rate:g} Gbit/s, others have {best:g}"
        elif rate < _SIMILAR * best:
            notes[device.name] = f"not a rail: {rate:g} Gbit/s next to {best:g}; storage or management"
        else:
            notes[device.name] = "not a rail: another model with fewer ports; storage or management"
    return [device for device in devices if device in kept]


def _lost(devices: Sequence[_Device], fitting: Sequence[_Device], kind: NicKind) -> list[str]:
    """Find cards without any link that look like the rails: same kind and model, as near to a GPU."""
    alive = {device.card for device in devices if device.present}
    models = {device.model for device in fitting}
    near_gpu = all(device.nearest[0] <= _SWITCH for device in fitting)
    lost: dict[str, str] = {}
    for device in devices:
        fits = device.kind == kind and not device.present and device.card not in alive and device.model in models
        if fits and not device.ports[0].physical_function and (not near_gpu or device.nearest[0] <= _SWITCH):
            lost.setdefault(device.card, device.name)
    return list(lost.values())


def _identities(rails: Sequence[_Device]) -> dict[str, str]:
    """Pair by network where each rail has its own, else by the physical function: positions of VFs mean nothing."""
    for of in (_network, lambda device: device.ports[0].physical_function or device.ports[0].pci):
        found = {device.name: of(device) for device in rails}
        if all(found.values()) and len(set(found.values())) == len(rails):
            return found
    return dict.fromkeys((device.name for device in rails), "")


def _network(device: _Device) -> str:
    port = next((port for port in device.ports if port.usable), device.ports[0])
    if port.subnet_prefix and port.kind != "roce":
        return port.subnet_prefix
    return str(ipaddress.ip_interface(port.addresses[0]).network) if port.addresses else ""


def _order(device: _Device, identity: str) -> tuple[object, ...]:
    port = device.ports[0]
    network = identity if "/" in identity else ""
    return device.nearest, natural(network), by_address(port.physical_function or port.pci), natural(device.name)
