# SPDX-License-Identifier: Apache-2.0
"""What the links of a lab really do: TCP throughput and round trip of each, against the rate in the spec.

    sudo .venv/bin/python benchmarks/lab_rates.py                 # recipes/lab/two-clusters.yaml
    sudo .venv/bin/python benchmarks/lab_rates.py my-lab.yaml --seconds 5

One stream per link and direction, nothing else running. CPU quotas are left out: a quota would limit the sender before
the link does. Prints versions and the machine, so that a result can be compared with another.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from holmes_core import __version__
from holmes_core.errors import HolmesError
from holmes_core.lab.network import interface_mtu
from holmes_core.lab.session import Lab
from holmes_core.lab.spec import LabHost, LabSpec
from holmes_core.lab.spec_file import load_spec
from holmes_core.lab.tables import format_rate

ROOT = Path(__file__).resolve().parents[1]

RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5001))
print("ready", flush=True)
connection, _ = listener.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(200):
    connection.send(connection.recv(1))
buffer, count, start, marks = bytearray(1 << 20), 0, time.monotonic(), []
while size := connection.recv_into(buffer):
    count += size
    marks.append((time.monotonic() - start, count))
# The first half second fills queues and buckets.
after = [mark for mark in marks if mark[0] > 0.5]
print((after[-1][1] - after[0][1]) * 8 / (after[-1][0] - after[0][0]))
"""
SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5001), timeout=10)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(200):
    start = time.perf_counter()
    connection.send(b"x")
    connection.recv(1)
    trips.append(time.perf_counter() - start)
print(sorted(trips)[100])
end, data = time.monotonic() + float(sys.argv[2]), bytes(1 << 20)
while time.monotonic() < end:
    connection.sendall(data)
"""


def measure(lab: Lab, sender: str, receiver: str, address: str, seconds: float) -> tuple[float, float]:
    """Return (bit/s of payload, median round trip in seconds) of one TCP stream."""
    python = [sys.executable, "-I", "-S", "-c"]
    server = lab.start(receiver, [*python, RECEIVE, address], output=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    client = lab.start(sender, [*python, SEND, address, str(seconds)], output=subprocess.PIPE)
    sent = client.communicate(timeout=seconds + 30)[0].decode()
    received = server.communicate(timeout=30)[0].decode()
    return float(received), float(sent)


def links(spec: LabSpec) -> list[tuple[str, LabHost, LabHost, str, int | None]]:
    """Return (name, from, to, address, rate in the spec) for one pair of hosts per kind of link, both directions."""
    found = []
    by_cluster = [[host for host in spec.hosts if host.cluster_index == i] for i in range(len(spec.clusters))]
    for hosts in by_cluster:
        if len(hosts) > 1 and hosts[0].rdma_address:
            a, b = hosts[:2]
            found += [("rdma", x, y, y.rdma_address, x.cluster.rdma_rate) for x, y in ((a, b), (b, a))]
    for here, there in pairwise(by_cluster):
        a, b = here[0], there[0]
        ends = (a.cluster.ethernet_rate, b.cluster.ethernet_rate, a.cluster.uplink_rate, b.cluster.uplink_rate)
        rate = min((rate for rate in ends if rate is not None), default=None)
        found += [("ethernet", x, y, y.ethernet_address, rate) for x, y in ((a, b), (b, a))]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lab", nargs="?", type=Path, default=ROOT / "recipes" / "lab" / "two-clusters.yaml")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each stream (default: %(default)s)")
    args = parser.parse_args(argv)
    tool = subprocess.run(["ip", "-V"], capture_output=True, text=True, check=False).stdout.strip()
    print(f"holmes {__version__}, Python {platform.python_version()}, Linux {platform.release()}, {tool}")
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.2f}; {args.lab}, {args.seconds:g} s per stream\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(("link", "from", "to", "spec", "payload", "of spec", "possible", "round trip")):
        table.add_column(name, justify="right" if number > 2 else "left")
    try:
        spec = load_spec(args.lab)
        free = LabSpec(clusters=tuple(replace(cluster, cpu=None) for cluster in spec.clusters))
        with Lab.up(free, name="rates-") as lab:
            for name, sender, receiver, address, rate in links(free):
                got, trip = measure(lab, sender.name, receiver.name, address, args.seconds)
                share = "-" if rate is None else f"{got / rate:.3f}"
                mtu = interface_mtu(sender, name)
                possible = f"{(mtu - 52) / (mtu + 14):.3f}"  # the shaper counts headers of Ethernet, IP and TCP, too
                cells = (format_rate(rate), f"{got / 1e6:.1f} Mbit/s", share, possible, f"{trip * 1e6:.0f} us")
                table.add_row(name, sender.name, receiver.name, *cells)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
