# SPDX-License-Identifier: Apache-2.0
"""How far apart the clocks of hosts are, from the times that datagrams carry: for people who compare their logs."""

from __future__ import annotations

__all__ = ["Clocks"]

_ENOUGH = 10  # datagrams; the fastest of them has hardly waited anywhere
_SKEW = 1.0  # seconds that confuse a reader of logs


class Clocks:
    """Compares this host's clock with others'.

    A datagram's time of arrival less its time of sending is the difference of the clocks and its delay, which is
    never negative: the smallest of many is near the difference.

    Args:
        host: This host's name.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._seen: dict[str, tuple[int, float]] = {}

    def heard(self, host: str, sent: float, now: float) -> str:
        """Take note of a datagram.

        Args:
            host: Who sent it.
            sent: When, by that host's clock, in seconds since 1970.
            now: When it came, by this host's clock.

        Returns:
            What to say, once per host; usually nothing.
        """
        count, least = self._seen.get(host, (0, float("inf")))
        least = min(least, now - sent)
        self._seen[host] = (count + 1, least)
        if count + 1 != _ENOUGH or abs(least) < _SKEW:
            return ""
        way = "behind" if least > 0 else "ahead of"
        return (
            f"holmes: the clock of host {host} is {abs(least):.1f} s {way} that of {self._host}: times in their logs "
            "do not compare; keep clocks in step (chronyc tracking, timedatectl)"
        )
