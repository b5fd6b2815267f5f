# SPDX-License-Identifier: Apache-2.0
"""A lab that is up: start processes on its hosts, read its counters, take it down."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from holmes_core.errors import ConfigError, HolmesError, did_you_mean
from holmes_core.lab import network
from holmes_core.lab.cgroups import add_cpu_group, delete_cpu_group, find_cpu_hierarchy
from holmes_core.lab.network import Traffic
from holmes_core.lab.spec import LabHost, LabSpec
from holmes_core.lab.state import LabState, claim, list_labs, processes_in, remove, remove_leftovers, store
from holmes_core.lab.sysfs_tree import write_dev, write_sysfs

__all__ = ["MASTER_PORT", "Lab", "why_not"]

MASTER_PORT = 29500
_NAME_LENGTH = 40
_ENTER = Path(__file__).with_name("enter.py")
# What a launcher or a scheduler outside the lab has set: a process inside must not believe it.
_OUTSIDE = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
            "MASTER_PORT", "HOLMES_HOST", "HOLMES_SYSFS", "HOLMES_DEV")  # fmt: skip
_OUTSIDE_PREFIXES = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_", "PMI_")


def why_not() -> str:
    """Return why this process cannot build labs here, in one sentence; empty if it can.

    What a container allows shows only when it is tried: takes some hundredths of a second.
    """
    if sys.platform != "linux":
        return f"a lab needs Linux (network namespaces), this is {sys.platform}"
    if os.geteuid() != 0:
        return "a lab needs root: run it with sudo"
    for tool in ("ip", "tc", "bridge"):
        if shutil.which(tool) is None:
            return f"a lab needs iproute2: there is no `{tool}` (apt-get install iproute2)"
    name = f"holmes-try-{os.getpid()}-{secrets.token_hex(2)}"
    try:
        network.add_namespace(name)
        try:
            network.try_features(name)
        finally:
            network.delete_namespace(name)
    except HolmesError as error:
        return f"a lab cannot be built here: {error.seen}"
    return ""


class Lab:
    """A running lab. Use `Lab.up` or `Lab.attach`; as a context manager it is taken down at the end.

    Attributes:
        state: Its name, spec and parts.
    """

    def __init__(self, state: LabState) -> None:
        self.state = state

    @classmethod
    def up(cls, spec: LabSpec, *, name: str = "", keep: bool = False) -> Lab:
        """Build a lab.

        Args:
            spec: What to build.
            name: Unique on this machine; made up if empty. A name that ends in ``-`` is completed.
            keep: The lab outlives this process, until it is taken down by name.

        Raises:
            ConfigError: The name is taken or not possible, or this process cannot build labs here.
            HolmesError: A step failed; nothing is left behind.
        """
        if reason := why_not():
            raise ConfigError(seen=reason, where="holmes lab", do="run the lab on a Linux machine, as root")
        remove_leftovers()
        name = name or "lab-"
        state = claim(_checked(f"{name}{secrets.token_hex(2)}" if name.endswith("-") else name), spec, owned=not keep)
        try:
            return cls(_build(state))
        except BaseException:
            remove(state)
            raise

    @classmethod
    def attach(cls, name: str) -> Lab:
        """Return a lab that is up.

        Raises:
            ConfigError: There is none of this name.
        """
        labs = {state.name: state for state in list_labs() if not state.abandoned}
        if name not in labs:
            there = f"there are: {', '.join(labs)}" if labs else "no lab is up"
            raise ConfigError(seen=f"no lab {name!r}{did_you_mean(name, labs)}; {there}", do="holmes lab up FILE")
        return cls(labs[name])

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    @property
    def name(self) -> str:
        """Its name."""
        return self.state.name

    @property
    def spec(self) -> LabSpec:
        """What it was built from."""
        return self.state.spec

    def host(self, name: str) -> LabHost:
        """Return a host by name.

        Raises:
            ConfigError: There is none.
        """
        hosts = {host.name: host for host in self.spec.hosts}
        if name not in hosts:
            raise ConfigError(
                seen=f"no host {name!r}{did_you_mean(name, hosts)}",
                where=f"lab {self.name}",
                do=f"name one of: {', '.join(hosts)}",
            )
        return hosts[name]

    def sysfs(self, host: str) -> Path:
        """Return the directory that stands for /sys on a host."""
        return self._files(host) / "sys"

    def counters(self) -> dict[str, dict[str, Traffic]]:
        """Return host name -> interface -> bytes since the lab came up, all read at one moment."""
        return network.read_traffic(self.spec, self.state.switch)

    def processes(self, host: str) -> list[int]:
        """Return the processes that run on a host."""
        return processes_in(self.state.namespaces[self.host(host).name])

    def environment(self, host: str, local_rank: int | None = None) -> dict[str, str]:
        """Return the variables that a process of a job gets on a host, in addition to the caller's.

        Args:
            host: Its name.
            local_rank: Which of the host's processes; None leaves out what only a rank has (torchrun sets it).
        """
        place = self.host(host)
        variables = {
            "MASTER_ADDR": self.spec.hosts[0].ethernet_address,
            "MASTER_PORT": str(MASTER_PORT),
            "NODE_RANK": str(place.index),
            "HOLMES_HOST": place.name,
            "HOLMES_SYSFS": str(self.sysfs(host)),
            "HOLMES_DEV": str(self._files(host) / "dev"),
            "HOLMES_LAB": self.name,
        }
        if local_rank is not None:
            variables |= {
                "RANK": str(place.first_rank + local_rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(self.spec.world_size),
                "LOCAL_WORLD_SIZE": str(place.cluster.ranks_per_host),
            }
        return variables

    def start(
        self,
        host: str,
        command: Sequence[str],
        *,
        local_rank: int | None = None,
        env: Mapping[str, str] | None = None,
        output: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host. It is killed when the thread that started it ends, at the latest with the lab.

        Args:
            host: Its name.
            command: Program and arguments.
            local_rank: Which of the job's processes on this host it is; None for none of them.
            env: More variables, over all others.
            output: Where stdout and stderr go, as `subprocess.Popen` takes it; None inherits.
        """
        place = self.host(host)
        outside = {
            name: value
            for name, value in os.environ.items()
            if name not in _OUTSIDE and not name.startswith(_OUTSIDE_PREFIXES)
        }
        threads = max(1, int((place.cluster.cpu or 1) / place.cluster.ranks_per_host))
        defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads)}
        enter = {
            "netns": f"/run/netns/{self.state.namespaces[place.name]}",
            "hostname": place.name,
            "hosts": str(self._files(host) / "hosts"),
            "groups": [path for name, path in self.state.groups if name == place.name],
            "parent": os.getpid(),
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_ENTER), json.dumps(enter), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=defaults | outside | self.environment(host, local_rank) | dict(env or {}),
            start_new_session=True,  # Ctrl-C reaches the command line, which ends the ranks in order
        )

    def down(self) -> None:
        """End all processes of the lab and remove everything of it. Safe to repeat."""
        remove(self.state)

    def _files(self, host: str) -> Path:
        return self.state.directory / host


def _checked(name: str) -> str:
    if not name.replace("-", "").isalnum() or not name.isascii() or len(name) > _NAME_LENGTH or name[0] == "-":
        do = f"use at most {_NAME_LENGTH} letters, digits and '-', not '-' first"
        raise ConfigError(seen=f"lab name {name!r}", do=do)
    return name


def _build(state: LabState) -> LabState:
    state = _add_quotas(state)
    for name in (state.switch, *state.namespaces.values()):
        network.add_namespace(name)
    network.build_network(state.spec, state.switch, state.namespaces)
    for host in state.spec.hosts:
        files = state.directory / host.name
        files.mkdir()
        write_sysfs(files / "sys", state.spec, host)
        write_dev(files / "dev", host)
        (files / "hosts").write_text(_hosts_file(state.spec, host))
    return state


def _add_quotas(state: LabState) -> LabState:
    wanted = {host.name: host.cluster.cpu for host in state.spec.hosts if host.cluster.cpu is not None}
    if not wanted:
        return state
    cores = os.cpu_count() or 1
    if sum(wanted.values()) > cores * 1.001:
        warnings.warn(
            f"the lab's hosts may use {sum(wanted.values()):g} cores together, this machine has {cores}: one host's "
            "waiting is then filled by another's computing, and times look better than they are",
            stacklevel=4,
        )
    hierarchy = find_cpu_hierarchy()
    try:
        if hierarchy is None:
            raise OSError("no cgroup hierarchy with the cpu controller is mounted")
        names = {host: f"holmes-{state.name}.{host}" for host in wanted}
        # Written down first: what is killed half-way must be found again.
        state = store(state, groups=[(host, str(hierarchy[1] / name)) for host, name in names.items()])
        for host, name in names.items():
            add_cpu_group(name, wanted[host], hierarchy)
    except OSError as error:
        warnings.warn(
            f"no CPU quota per host ({error}): one host's waiting is filled by another's computing, and times look "
            "better than they are",
            stacklevel=4,
        )
        for _, path in state.groups:
            delete_cpu_group(Path(path))
        state = store(state, groups=[])
    return state


def _hosts_file(spec: LabSpec, host: LabHost) -> str:
    lines = ["127.0.0.1 localhost"]
    if spec.faults_of(host.name, "loopback-name"):
        lines.append(f"127.0.1.1 {host.name}")
    lines += [f"{other.ethernet_address} {other.name}" for other in spec.hosts]
    if spec.faults_of(host.name, "loopback-name"):
        lines.remove(f"{host.ethernet_address} {host.name}")
    return "\n".join(lines) + "\n"
