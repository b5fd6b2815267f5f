# SPDX-License-Identifier: Apache-2.0
"""From facts to an Inventory: a verdict per port, the rails, the interface for everything else, and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from holmes_core.cluster.facts import HostFacts, NetFacts, PortFacts
from holmes_core.cluster.gid import choose_gid, subnet_prefix
from holmes_core.cluster.interfaces import choose_ethernet, net_verdict
from holmes_core.cluster.kind import STATE_ASSUMED, nic_kind, odd_physical_state, port_state, port_verdict
from holmes_core.cluster.nic import RDMA_KINDS, Accelerator, Inventory, Nic
from holmes_core.cluster.rails import Rails, choose_rails, spread

__all__ = ["assemble"]


def assemble(host: str, facts: HostFacts, *, environment: Mapping[str, str] | None = None) -> Inventory:
    """Judge what was read about a host.

    Args:
        host: Its name in the job.
        facts: What was read, from sysfs or from tools' output.
        environment: The variables that NCCL, gloo and libfabric read.

    Returns:
        The inventory.
    """
    nets = {net.name: net for net in facts.nets}
    _pair_cxi(facts.ports, facts.nets)
    ports = [_port(port, nets, states_told=facts.states_told) for port in facts.ports]
    distances = [gpu.distances for gpu in facts.gpus]
    software = {port.device for port in facts.ports if port.software}
    rails = choose_rails(
        [nic for nic in ports if nic.device not in software],
        models={p.device: " ".join((p.vendor, p.model or p.hca_type)).strip() for p in facts.ports},
        cards={p.device: p.card or p.device for p in facts.ports},
        distances=distances,
    )
    ports = [_with_note(nic, rails) for nic in ports]
    # A port that cannot do RDMA may have an interface that carries sockets well: then it is listed on its own, too.
    shown = {nic.netdev for nic in ports if nic.usable or (nic.netdev in nets and not net_verdict(nets[nic.netdev])[0])}
    others = [_interface(net) for net in facts.nets if net.name not in shown]
    rail_netdevs = {nic.netdev for nic in ports if nic.netdev and nic.device in (*rails.devices, *rails.missing)}
    ethernet = choose_ethernet(
        facts.nets, rail_netdevs=rail_netdevs, rdma_netdevs={nic.netdev for nic in ports if nic.netdev}
    )
    accelerators = tuple(
        Accelerator(
            index=index,
            pci=gpu.pci,
            numa=gpu.numa,
            name=gpu.name,
            distances=tuple(gpu.distances.items()),
            nearest=nearest,
        )
        for index, (gpu, nearest) in enumerate(zip(facts.gpus, spread(rails.devices, distances), strict=True))
    )
    warnings = [*facts.warnings, *_port_warnings(facts.ports, ports, rails), *_host_warnings(ports, ethernet, nets)]
    return Inventory(
        host=host,
        nics=(*ports, *others),
        accelerators=accelerators,
        rails=rails.devices,
        kind=rails.kind,
        ethernet=ethernet,
        missing_rails=len(rails.missing),
        warnings=tuple(dict.fromkeys(warnings)),
        environment=tuple(sorted((environment or {}).items())),
    )


def _port(facts: PortFacts, nets: Mapping[str, NetFacts], *, states_told: bool) -> Nic:
    kind, state = nic_kind(facts), port_state(facts.state)
    netdevs = [_top(name, nets) for name in facts.netdevs]
    net = next((nets[name] for name in netdevs if name in nets), None)
    index, gid_problem = None, ""
    if kind == "roce":
        local = {address.split("/")[0] for one in nets.values() for address in one.addresses or ()}
        index, gid_problem = choose_gid(facts.gids, net.addresses or () if net is not None else (), local)
        owner = next((gid.netdev for gid in facts.gids if gid.index == index and gid.netdev), "")
        if owner:  # a VLAN's entry: sockets have to use the VLAN, too
            netdevs.insert(0, owner)
            net = nets.get(owner, net)
    usable, reason = port_verdict(facts, kind, state, gid_problem=gid_problem, state_told=states_told)
    down = net is not None and net.up is False
    if usable and kind == "roce" and net is not None and down:  # InfiniBand does without its interface
        usable, reason = False, f"its interface {net.name} is down"
    bond = _bond(net, nets)
    rate, members = facts.rate, 1
    if bond is not None and len(bond.members) > 1:
        members = len(bond.members) if bond.shares_load else 1
        rate = bond.speed or rate
        reason = reason or (
            f"bond of {members}" if bond.shares_load else f"active-backup bond of {len(bond.members)}: one at a time"
        )
    elif kind in ("roce", "slingshot") and net is not None and net.speed:
        rate = net.speed  # virtual functions report a fixed rate
    return Nic(
        device=facts.device,
        port=facts.port,
        kind=kind,
        rate=rate,
        members=members,
        state=state,
        physical_state=facts.physical_state,
        netdev=net.name if net is not None else netdevs[0] if netdevs else "",
        addresses=net.addresses or () if net is not None and not down else (),
        mtu=net.mtu if net is not None else None,
        gids=facts.gids,
        gid_index=index,
        subnet_prefix=subnet_prefix(facts.gids) if kind in ("infiniband", "omnipath") else "",
        pci=facts.pci,
        numa=facts.numa,
        driver=facts.driver,
        physical_function=facts.physical_function,
        usable=usable,
        reason=reason,
    )


def _top(name: str, nets: Mapping[str, NetFacts]) -> str:
    """A bonded function's own interface carries nothing: its bond does."""
    net = nets.get(name)
    master = nets.get(net.master) if net is not None else None
    return master.name if master is not None and master.what == "bond" else name


def _bond(net: NetFacts | None, nets: Mapping[str, NetFacts]) -> NetFacts | None:
    """Return the bond behind an interface: itself, or the one below a VLAN."""
    if net is None or net.what == "bond":
        return net
    return next((nets[parent] for parent in net.parents if parent in nets and nets[parent].what == "bond"), None)


def _interface(net: NetFacts) -> Nic:
    usable, reason = net_verdict(net)
    shared = net.what == "bond" and net.shares_load
    return Nic(
        device=net.name,
        kind="ethernet",
        rate=net.speed,
        members=len(net.members) if shared and len(net.members) > 1 else 1,
        state="active" if net.up else "down" if net.up is False else "unknown",
        netdev=net.name,
        addresses=net.addresses or () if net.up is not False else (),
        mtu=net.mtu,
        pci=net.pci,
        numa=net.numa,
        driver=net.driver,
        usable=usable,
        reason=reason,
    )


def _with_note(nic: Nic, rails: Rails) -> Nic:
    note = rails.notes.get(nic.device, "")
    if note and nic.usable:
        also = "" if nic.reason == STATE_ASSUMED else nic.reason
        nic = replace(nic, reason="; ".join(filter(None, (note, also))))
    return replace(nic, rail=rails.identities.get(nic.device, ""))


def _pair_cxi(ports: Sequence[PortFacts], nets: Sequence[NetFacts]) -> None:
    """Give Slingshot NICs their interfaces: by PCI address, else in order if there are just as many equal ones."""
    lone = [port for port in ports if port.kind == "slingshot" and not port.netdevs]
    for port in lone:
        port.netdevs = tuple(net.name for net in nets if net.pci and net.pci == port.pci)
    lone = [port for port in lone if not port.netdevs]
    claimed = {name for port in ports for name in port.netdevs}
    free = [net for net in nets if net.speed and net.name not in claimed and net.what in ("", "physical")]
    fastest = [net for net in free if net.speed == max(one.speed or 0.0 for one in free)]
    if len(lone) == len(fastest):
        for port, net in zip(lone, fastest, strict=True):
            port.netdevs = (net.name,)


def _port_warnings(facts: Sequence[PortFacts], nics: Sequence[Nic], rails: Rails) -> list[str]:
    found = []
    if rails.devices and rails.missing:
        total = len(rails.devices) + len(rails.missing)
        why = {nic.device: nic.reason for nic in nics}
        lost = "; ".join(f"{name}: {why[name]}" for name in rails.missing)
        found.append(f"degraded: {len(rails.devices)} of {total} rails usable ({lost})")
    elif rails.missing:
        by_reason: dict[str, list[str]] = {}
        for nic in nics:
            if nic.device in rails.missing:
                by_reason.setdefault(nic.reason, []).append(nic.device)
        for reason, names in by_reason.items():
            found.append(f"RDMA hardware that cannot be used, traffic goes over Ethernet: {', '.join(names)}: {reason}")
    for one in facts:
        if one.problem and one.device not in rails.missing:
            found.append(f"{one.device}: {one.problem}")
        if odd_physical_state(one.physical_state):
            found.append(f"{one.device} port {one.port}: odd physical state {one.physical_state!r}")
    slow = [f"{name} ({note})" for name, note in rails.notes.items() if note.startswith("slow rail")]
    if slow:
        found.append(f"unequal rails: {', '.join(slow)}")
    bonded = [nic for nic in nics if nic.device in rails.devices and nic.members > 1]
    if bonded and rails.kind == "roce":
        found.append(
            f"{bonded[0].device} is a bond of {bonded[0].members}: one queue pair uses one member; set "
            "NCCL_IB_QPS_PER_CONNECTION to 2 or more (with NCCL_IB_SPLIT_DATA_ON_QPS=0) to use more of it"
        )
    return found


def _host_warnings(nics: Sequence[Nic], ethernet: str, nets: Mapping[str, NetFacts]) -> list[str]:
    found = []
    if not ethernet and nets:
        found.append("no interface can carry traffic to other hosts: none is up with a global address")
    elif ethernet in nets:
        net = nets[ethernet]
        if net.addresses and all(":" in address for address in net.addresses):
            found.append(f"{ethernet} has IPv6 addresses only: NCCL needs NCCL_SOCKET_FAMILY=AF_INET6")
        rail = next((nic for nic in nics if nic.netdev == ethernet and nic.kind in RDMA_KINDS), None)
        if rail is not None:
            found.append(f"{ethernet} is the only way to other hosts and belongs to {rail.device}, a {rail.kind} port")
    return found
