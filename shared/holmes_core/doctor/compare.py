# SPDX-License-Identifier: Apache-2.0
"""Checks over several hosts of a job: what must be equal, and is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holmes_core.cluster.fabric import fabric_warnings, group_hosts
from holmes_core.cluster.hca_list import exact_hcas, lint_hcas
from holmes_core.cluster.nic import Inventory
from holmes_core.doctor.finding import Finding
from holmes_core.errors import ConfigError
from holmes_core.plan.environment import check_environment

__all__ = ["compare_hosts"]


def compare_hosts(inventories: Sequence[Inventory]) -> Iterator[Finding]:
    """Compare the hosts of a job.

    Args:
        inventories: One per host, names unique.
    """
    yield from _fabrics(inventories)
    yield from _one_list(inventories)
    yield from _mtu(inventories)
    yield from _variables(inventories)


def _fabrics(inventories: Sequence[Inventory]) -> Iterator[Finding]:
    try:
        clusters = group_hosts(inventories)
    except ConfigError as error:
        yield _refused("hosts", error)
        return
    yield Finding(
        id="clusters",
        severity="note",
        seen="; ".join(f"{one.name}: {', '.join(one.hosts)}" for one in clusters),
        means="; ".join(dict.fromkeys(one.reason for one in clusters if one.reason)) or "one network",
        likelihood=20,
    )
    for text in fabric_warnings(inventories, clusters):
        yield Finding(
            id="fabric",
            severity="warning",
            seen=text,
            means="a group is as fast as its slowest member, and hosts that fell back join it over Ethernet only",
            do="run `holmes doctor` on the host that is named; leave it out until it is repaired",
            likelihood=76,
        )


def _one_list(inventories: Sequence[Inventory]) -> Iterator[Finding]:
    """One NCCL_IB_HCA for hosts whose rails have different names."""
    right = {one.host: exact_hcas(one) for one in inventories if exact_hcas(one)}
    given = {one.host: dict(one.environment).get("NCCL_IB_HCA", "") for one in inventories}
    values = {given[host] for host in right}
    if len(set(right.values())) > 1:
        shown = "; ".join(f"{host}: NCCL_IB_HCA='{value}'" for host, value in list(right.items())[:8])
        same = len(values) == 1 and values != {""}
        wrong = [one.host for one in inventories if given[one.host] and lint_hcas(given[one.host], one).problems]
        yield Finding(
            id="hca-list-per-host",
            severity="error" if same and wrong else "note",
            seen=(
                f"one NCCL_IB_HCA={next(iter(values))} for all hosts"
                if same
                else "rails have different names on the hosts"
            ),
            means="the same card is called differently on these hosts: one list for all selects storage or "
            "management cards somewhere, and rails pair wrongly",
            do=f"give each host its own list (Holmes does): {shown}",
            where=tuple(f"host {host}" for host in wrong[:4]),
            likelihood=85,
        )


def _mtu(inventories: Sequence[Inventory]) -> Iterator[Finding]:
    for what, kinds in (("rails", ("roce",)), ("Ethernet interfaces", ("ethernet",))):
        sizes: dict[int, list[str]] = {}
        for one in inventories:
            nics = one.rail_nics if what == "rails" else [nic for nic in one.nics if nic.netdev == one.ethernet]
            for nic in nics:
                if nic.mtu and nic.kind in kinds:
                    sizes.setdefault(nic.mtu, []).append(one.host)
        if len(sizes) > 1:
            yield Finding(
                id="mtu",
                severity="warning",
                seen=f"MTU of the {what} differs between hosts: "
                + "; ".join(f"{size} on {', '.join(dict.fromkeys(hosts))}" for size, hosts in sizes.items()),
                means="large packets of one end are dropped by the other where nothing tells it: connections start "
                "and hang",
                do="set one MTU on all hosts and switches of the network; test with `ping -M do -s SIZE PEER`",
                likelihood=74,
            )


def _variables(inventories: Sequence[Inventory]) -> Iterator[Finding]:
    try:
        check_environment(inventories, device_type="cuda")
    except ConfigError as error:
        yield _refused("environment", error)


def _refused(name: str, error: ConfigError) -> Finding:
    return Finding(
        id=name,
        severity="error",
        seen=error.seen,
        means=error.means or "a job would be refused",
        do=error.do,
        where=(error.where,) if error.where else (),
        likelihood=86,
    )
