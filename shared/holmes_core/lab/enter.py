# SPDX-License-Identifier: Apache-2.0
"""Become a process of a lab host, then the given program. Run as a file of its own, with the standard library only.

    python -I -S enter.py '{"netns": ..., "hostname": ..., "hosts": ..., "groups": [...], "parent": PID}' CMD ARGS ...

Not a function for `preexec_fn`: between fork and exec of a process with threads only little is safe. `os.setns` and
`os.unshare` are newer than the oldest supported Python, so the C library is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys

__all__ = ["enter", "main"]

_NEWNS, _NEWUTS, _NEWNET = 0x00020000, 0x04000000, 0x40000000
_BIND, _REC, _SLAVE = 4096, 16384, 1 << 19
_PDEATHSIG = 1
# Bytes of a socket's buffer: least, at first, most. A CPU quota stops a host's processes for 10 ms at a time, which no
# real host does; what arrives or leaves meanwhile must fit (3 MB at 2.5 Gbit/s), or the pause would stop the link, too.
_BUFFERS = "4096 4194304 16777216"


def enter(*, netns: str, hostname: str, hosts: str, groups: list[str], parent: int) -> None:
    """Move this process into a lab host.

    Args:
        netns: File of its network namespace.
        hostname: Its name.
        hosts: File that it sees as /etc/hosts.
        groups: Directories of cgroups to join.
        parent: The process with which this one ends, also when that is killed; 0 for none.

    Raises:
        OSError: Something is missing or not allowed; says what.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    if parent:
        check(libc.prctl(_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")
        if os.getppid() != parent:  # it ended before the line above
            raise OSError(0, "the process that started this one is gone")
    for group in groups:
        with open(os.path.join(group, "cgroup.procs"), "w") as procs:
            procs.write(str(os.getpid()))
    namespace = os.open(netns, os.O_RDONLY)
    check(libc.setns(namespace, _NEWNET), f"setns {netns}")
    os.close(namespace)
    for name in ("tcp_rmem", "tcp_wmem"):
        # /proc/sys is read-only in some containers: the job is slower there.
        with contextlib.suppress(OSError), open(f"/proc/sys/net/ipv4/{name}", "w") as buffers:
            buffers.write(_BUFFERS)
    check(libc.unshare(_NEWNS | _NEWUTS), "unshare")
    check(libc.mount(b"none", b"/", None, _REC | _SLAVE, None), "mount --make-rslave /")
    check(libc.mount(hosts.encode(), b"/etc/hosts", None, _BIND, None), "mount --bind /etc/hosts")
    # The /sys that is there shows the interfaces of the namespace in which it was mounted. Where a container forbids
    # this, programs still see the right ones through sockets.
    libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    check(libc.sethostname(hostname.encode(), len(hostname.encode())), "sethostname")


def main(words: list[str]) -> None:
    """Enter the host that the first word describes and run the rest; never returns."""
    place, command = json.loads(words[0]), words[1:]
    try:
        enter(**place)
    except OSError as error:
        print(f"holmes lab: cannot enter host {place['hostname']}: {error}", file=sys.stderr)
        sys.exit(126)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"holmes lab: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
