# SPDX-License-Identifier: Apache-2.0
"""What accelerators and networks can do: tables with their sources, and what a cluster file declares."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from holmes_core.cluster.host import Cluster, ClusterSpec, Host
from holmes_core.cluster.nic import RDMA_KINDS
from holmes_core.cluster.topology import Topology
from holmes_core.cluster.value import Value
from holmes_core.config import HARDWARE_KEYS, HolmesConfig
from holmes_core.errors import ConfigError, did_you_mean

__all__ = [
    "GPUS",
    "ClusterHardware",
    "Gpu",
    "Hardware",
    "Link",
    "Measured",
    "find_gpu",
    "load_hardware",
    "nic_gbits",
    "topology_of_specs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Value):
    """One kind of accelerator.

    Args:
        name: As its maker calls it.
        memory: GiB.
        tflops: Peak of dense bf16 (fp16 where there is no bf16) matrix products, TFLOP/s, without sparsity.
        bandwidth: Of its memory, GB/s.
        link: To another GPU of the same host, GB/s in one direction (NVLink, Infinity Fabric, or PCIe).
    """

    name: str
    memory: float
    tflops: float
    bandwidth: float
    link: float


def _gpu(name: str, memory: float, tflops: float, bandwidth: float, link: float) -> Gpu:
    return Gpu(name=name, memory=memory, tflops=tflops, bandwidth=bandwidth, link=link)


# Sources: the makers' data sheets, dense rates (sheets often print those with sparsity, twice as many). NVLink figures
# there count both directions; here one. Looked up again in what others quote of them: B200 and GB200 (2250 and 2500
# TFLOP/s, 8 TB/s), H200 (141 GB, 989, 4.8 TB/s), H100-SXM (989, 3.35 TB/s), H100-NVL (835), H100-PCIe (756, 2 TB/s),
# A100 (312; 1555 and 2039 GB/s; NVLink 300 GB/s each way), V100 (125, 900 GB/s), L40S (362, 864 GB/s), L4 (121,
# 300 GB/s), A40 (149.7, 696 GB/s), A10 (125, 600 GB/s), T4 (65), MI300X (1307, 192 GB, 5.3 TB/s, 448 GB/s to the seven
# others together), MI250X (links of 50 GB/s: AMD's page on its architecture). The others, and the links of cards on
# PCIe, are the data sheets' alone.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("B200", 180, 2250, 8000, 900),  # NVIDIA DGX B200 data sheet: per GPU, NVLink 5
        _gpu("GB200", 186, 2500, 8000, 900),  # NVIDIA GB200 NVL72 data sheet, divided by 72
        _gpu("H200", 141, 989, 4800, 450),  # NVIDIA H200 data sheet, SXM
        _gpu("H100-SXM", 80, 989, 3350, 450),  # NVIDIA H100 data sheet
        _gpu("H100-NVL", 94, 835, 3900, 300),  # NVIDIA H100 data sheet; NVLink bridge
        _gpu("H100-PCIe", 80, 756, 2000, 64),  # NVIDIA H100 PCIe product brief; PCIe 5 x16
        _gpu("H800-SXM", 80, 989, 3350, 200),  # H100 with NVLink 400 GB/s
        _gpu("H20", 96, 148, 4000, 450),  # NVIDIA H20 data sheet
        _gpu("GH200", 96, 989, 4000, 450),  # NVIDIA GH200 data sheet, HBM3
        _gpu("A100-80GB", 80, 312, 2039, 300),  # NVIDIA A100 data sheet, SXM4
        _gpu("A100-40GB", 40, 312, 1555, 300),  # NVIDIA A100 data sheet, SXM4
        _gpu("A100-PCIe", 80, 312, 1935, 32),  # NVIDIA A100 data sheet; PCIe 4 x16
        _gpu("A800-SXM", 80, 312, 2039, 200),  # A100 with NVLink 400 GB/s
        _gpu("V100-32GB", 32, 125, 900, 150),  # NVIDIA V100 data sheet, SXM2, fp16
        _gpu("V100-16GB", 16, 125, 900, 150),  # NVIDIA V100 data sheet, SXM2, fp16
        _gpu("L40S", 48, 362, 864, 32),  # NVIDIA L40S data sheet
        _gpu("L4", 24, 121, 300, 32),  # NVIDIA L4 data sheet
        _gpu("A40", 48, 150, 696, 32),  # NVIDIA A40 data sheet
        _gpu("A30", 24, 165, 933, 32),  # NVIDIA A30 data sheet
        _gpu("A10", 24, 125, 600, 32),  # NVIDIA A10 data sheet
        _gpu("T4", 16, 65, 320, 16),  # NVIDIA T4 data sheet, fp16
        _gpu("RTX-A6000", 48, 155, 768, 32),  # NVIDIA RTX A6000 data sheet
        _gpu("RTX-4090", 24, 165, 1008, 32),  # NVIDIA Ada whitepaper: fp16 with fp32 accumulation
        _gpu("RTX-3090", 24, 71, 936, 32),  # NVIDIA GA102 whitepaper: fp16 with fp32 accumulation
        _gpu("MI300X", 192, 1307, 5300, 448),  # AMD Instinct MI300X data sheet
        _gpu("MI250X", 64, 191.5, 1638, 50),  # AMD Instinct MI250X data sheet; one of its two dies: a device each
    )
}
_SHORT = {"h100": "H100-SXM", "h800": "H800-SXM", "a100": "A100-80GB", "a800": "A800-SXM", "v100": "V100-32GB",
          "a6000": "RTX-A6000", "4090": "RTX-4090", "3090": "RTX-3090", "a10080g": "A100-80GB",
          "a10040g": "A100-40GB"}  # fmt: skip

# Gbit/s of one port with four lanes, as the InfiniBand roadmap names the generations; and Ethernet by its name.
_GENERATIONS = {"sdr": 8, "ddr": 16, "qdr": 32, "fdr": 54, "edr": 100, "hdr100": 100, "hdr": 200, "ndr200": 200,
                "ndr": 400, "xdr": 800}  # fmt: skip
#: Gbit/s of one port where the cluster file does not say: a common port of each kind.
_USUAL = {"infiniband": 200, "roce": 200, "omnipath": 100, "efa": 100, "slingshot": 200, "iwarp": 25}
_USUAL_ETHERNET = 25
#: Seconds until the first byte arrives: RDMA verbs, TCP in one building.
RDMA_LATENCY, SOCKET_LATENCY = 10e-6, 60e-6
_EXAMPLE = "{name: a, kind: infiniband, hosts: ['a[1-4]'], gpu: A100-80GB, gpus: 8, nics: 4, nic_rate: 200}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Value):
    """What is declared or measured of the way between two clusters, or between hosts or ranks of one.

    Args:
        between: The clusters' names; empty inside a cluster.
        rate: Gbit/s that one host was measured to send to another; None: the usual part of the slower Ethernet port.
        total: Gbit/s of all traffic between the two together, as measured; None: not limited.
        latency: Seconds.
    """

    between: tuple[str, ...] = ()
    rate: float | None = None
    total: float | None = None
    latency: float = SOCKET_LATENCY


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Value):
    """What one accelerator of a cluster was measured to take for the model's own block.

    Args:
        block_flops: Of the measured block's forward pass, one sample; blocks of other sizes take in proportion.
        forward: Seconds of its forward pass for each sample.
        backward: The same of its backward pass.
        forward_fixed: Seconds of a forward pass besides, however small the micro-batch.
        backward_fixed: The same of a backward pass.
        head_forward: Seconds per sample of embedding, head and loss.
        head_backward: The same of their backward pass.
        head_fixed: Seconds of that backward pass besides, however small the micro-batch.
        around: Seconds of a forward pass outside of blocks, head and loss, on every stage.
        operation: Seconds of one small tensor operation, called from Python.
        optimizer: Seconds of an optimizer step per parameter; 0: worked out from the memory's bandwidth.
        copied: Seconds to copy a byte of gradients or parameters in memory.
        host_factors: How many times as long each host takes; empty: all alike.
        local: Between two ranks of a host; None: the GPU's link.
        fabric: Between two hosts of the cluster; None: the ports' rates.
    """

    block_flops: float
    forward: float
    backward: float
    forward_fixed: float = 0.0
    backward_fixed: float = 0.0
    head_forward: float = 0.0
    head_backward: float = 0.0
    head_fixed: float = 0.0
    around: float = 0.0
    operation: float = 0.0
    optimizer: float = 0.0
    copied: float = 0.0
    host_factors: tuple[float, ...] = ()
    local: Link | None = None
    fabric: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHardware(Value):
    """What the hosts of one cluster have.

    Args:
        name: The cluster.
        kind: Its network, one of CLUSTER_KINDS.
        hosts: Accelerators of each host.
        gpu: What they are.
        speed: TFLOP/s that one of them reaches in training, where measured; None: peak times a usual efficiency.
        nics: RDMA ports of a host that carry training traffic.
        nic_rate: Gbit/s of one of them.
        ethernet_rate: Gbit/s of the one Ethernet port that carries traffic to other clusters.
        measured: What the model's own block takes here, instead of peak, efficiency and the ports' rates.
        usable: Bytes that one rank may use; None: a usual part of the GPU's memory.
    """

    name: str
    kind: str
    hosts: tuple[int, ...]
    gpu: Gpu
    speed: float | None = None
    nics: int = 1
    nic_rate: float
    ethernet_rate: float
    measured: Measured | None = None
    usable: int | None = None

    @property
    def ranks(self) -> int:
        """Accelerators of the cluster."""
        return sum(self.hosts)

    @property
    def rdma(self) -> bool:
        """Whether its hosts reach each other by RDMA."""
        return self.kind in RDMA_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(Value):
    """All clusters of a job, and what joins them.

    Args:
        clusters: In the order of the file.
        links: Between pairs of clusters, where something is declared.
        assumptions: What the file does not say and was assumed.
    """

    clusters: tuple[ClusterHardware, ...]
    links: tuple[Link, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Accelerators of the job."""
        return sum(cluster.ranks for cluster in self.clusters)

    def link(self, a: str, b: str) -> Link:
        """Return what is declared of the way between two clusters, or the default."""
        return next((link for link in self.links if {a, b} == set(link.between)), Link(between=(a, b)))


def find_gpu(name: str, *, where: str = "gpu") -> Gpu:
    """Return the accelerator with a name, however it is spelled (``A100-80GB``, ``a100 80gb``, ``NVIDIA H100``).

    Raises:
        ConfigError: It is not in the table.
    """

    def key(text: str) -> str:
        return re.sub(r"nvidia|amd|tesla|geforce|instinct|[^a-z0-9]", "", text.lower())

    by_key = {key(known): gpu for known, gpu in GPUS.items()} | {short: GPUS[full] for short, full in _SHORT.items()}
    if (found := by_key.get(key(name))) is not None:
        return found
    raise ConfigError(
        seen=f"gpu {name!r}{did_you_mean(name, GPUS)}",
        where=where,
        means=f"the table has: {', '.join(GPUS)}",
        do="use one of them, or give memory (GiB) and speed (TFLOP/s that training reaches) instead of gpu",
    )


def nic_gbits(value: object, *, where: str) -> float:
    """Return Gbit/s: a number, a text like ``200gbit``, or a generation like ``hdr``.

    Raises:
        ConfigError: It is no rate.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    text = str(value).strip().lower().removesuffix("/s").replace(" ", "")
    if text in _GENERATIONS:
        return float(_GENERATIONS[text])
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])?(?:bit|b|be|gbe)?", text)
    rate = float(found[1]) * {"k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3, None: 1.0}[found[2]] if found else 0.0
    if rate <= 0:
        raise ConfigError(
            seen=f"rate {value!r}", where=where, do=f"write Gbit/s, 200mbit, or one of: {', '.join(_GENERATIONS)}"
        )
    return rate


def load_hardware(path: str) -> tuple[tuple[ClusterSpec, ...], Hardware]:
    """Read a cluster file: the clusters as the job reads them, and what it declares of their hardware.

    Raises:
        ConfigError: The file cannot be read, or a value is wrong.
    """
    specs = HolmesConfig.load({"cluster_file": path}, env={}).clusters or ()
    with open(path, encoding="utf-8") as file:
        data = yaml.safe_load(file)
    names = [spec.name or f"cluster{index}" for index, spec in enumerate(specs)]
    assumed: list[str] = []
    clusters = tuple(
        _cluster(entry, spec, name, f"file {path}, cluster {name!r}", assumed)
        for entry, spec, name in zip(data["clusters"], specs, names, strict=True)
    )
    links = tuple(_link(entry, names, f"file {path}, links[{i}]") for i, entry in enumerate(data.get("links") or ()))
    named = tuple(
        ClusterSpec(name=name, kind=spec.kind, hosts=spec.hosts, ranks=spec.ranks)
        for name, spec in zip(names, specs, strict=True)
    )
    return named, Hardware(clusters=clusters, links=links, assumptions=tuple(assumed))


def topology_of_specs(specs: Sequence[ClusterSpec], hardware: Hardware) -> Topology:
    """Number the ranks of declared hosts: host by host, in the order of the file."""
    clusters, at = [], 0
    for spec, found in zip(specs, hardware.clusters, strict=True):
        hosts = []
        for name, size in zip(spec.hosts or (f"localhost/{spec.name}",), found.hosts, strict=True):
            hosts.append(Host(name=name, ranks=spec.ranks or tuple(range(at, at + size))))
            at += size
        clusters.append(Cluster(name=spec.name, kind=spec.kind, hosts=tuple(hosts)))
    return Topology(clusters=tuple(clusters))


def _cluster(entry: Any, spec: ClusterSpec, name: str, where: str, assumed: list[str]) -> ClusterHardware:
    given = {key: entry[key] for key in HARDWARE_KEYS if entry.get(key) is not None}
    numbers = {key: _number(given, key, where) for key in ("memory", "tflops", "speed", "link", "bandwidth")}
    if "gpu" in given:
        gpu = find_gpu(str(given["gpu"]), where=f"{where}.gpu")
    elif numbers["memory"] and (numbers["speed"] or numbers["tflops"]):
        tflops = numbers["tflops"] or numbers["speed"] or 0.0
        gpu = Gpu(name="declared", memory=numbers["memory"], tflops=tflops, bandwidth=1000, link=16)
    else:
        assumed.append(f"{name}: gpu A100-80GB (the cluster file names none)")
        gpu = GPUS["A100-80GB"]
    changes = {key: value for key, value in numbers.items() if value and key != "speed"}
    if changes:
        gpu = Gpu.from_json({**gpu.to_json(), **changes})
    hosts = _hosts(given, spec, name, where, assumed)
    nic_rate = nic_gbits(given["nic_rate"], where=f"{where}.nic_rate") if "nic_rate" in given else None
    if "ethernet_rate" in given:
        ethernet = nic_gbits(given["ethernet_rate"], where=f"{where}.ethernet_rate")
    else:
        ethernet = float(_USUAL_ETHERNET)
        assumed.append(f"{name}: {ethernet:g} Gbit/s Ethernet per host")
    nics = int(_number(given, "nics", where) or 1)
    if spec.kind in RDMA_KINDS and nic_rate is None:
        nic_rate = float(_USUAL[spec.kind])
        assumed.append(f"{name}: {nics} x {nic_rate:g} Gbit/s {spec.kind} per host")
    return ClusterHardware(
        name=name,
        kind=spec.kind,
        hosts=hosts,
        gpu=gpu,
        speed=numbers["speed"],
        nics=nics,
        nic_rate=nic_rate or ethernet,
        ethernet_rate=ethernet,
    )


def _hosts(given: Mapping[str, Any], spec: ClusterSpec, name: str, where: str, assumed: list[str]) -> tuple[int, ...]:
    if spec.ranks:  # part of one machine
        return (len(spec.ranks),)
    gpus = given.get("gpus")
    if isinstance(gpus, list):
        if len(gpus) != len(spec.hosts) or not all(isinstance(n, int) and n > 0 for n in gpus):
            do = f"give one number, or one for each of the {len(spec.hosts)} hosts"
            raise ConfigError(seen=f"gpus {gpus!r}", where=f"{where}.gpus", do=do)
        return tuple(gpus)
    if gpus is None:
        assumed.append(f"{name}: 8 gpus per host")
    count = 8 if gpus is None else int(_number(given, "gpus", where) or 0)
    return (count,) * len(spec.hosts)


def _link(entry: Any, names: Sequence[str], where: str) -> Link:
    example = "{between: [a, b], rate: 10, latency: 0.001}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("between"), list):
        raise ConfigError(seen=f"{entry!r}", where=where, do=f"write {example}")
    for key in entry:
        if key not in ("between", "rate", "total", "latency"):
            hint = did_you_mean(str(key), ("between", "rate", "total", "latency"))
            raise ConfigError(seen=f"unknown key {key!r}{hint}", where=where, do=f"write {example}")
    between = entry["between"]
    if len(between) != 2 or between[0] == between[1] or not set(between) <= set(names):
        raise ConfigError(seen=f"between {between!r}", where=where, do=f"name two of: {', '.join(names)}")
    rates = {
        key: nic_gbits(entry[key], where=f"{where}.{key}") for key in ("rate", "total") if entry.get(key) is not None
    }
    latency = _number(entry, "latency", where)
    return Link(
        between=tuple(between),
        rate=rates.get("rate"),
        total=rates.get("total"),
        latency=SOCKET_LATENCY if latency is None else latency,
    )


def _number(given: Mapping[str, Any], key: str, where: str) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        do = f"give {key} a positive number; for example {_EXAMPLE}"
        raise ConfigError(seen=f"{key} {value!r}", where=f"{where}.{key}", do=do)
    return float(value)
