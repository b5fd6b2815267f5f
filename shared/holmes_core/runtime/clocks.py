# SPDX-License-Identifier: Apache-2.0
"""How far apart the clocks of hosts are, from the times that datagrams carry: for people who compare their logs."""

from __future__ import annotations

__all__ = ["Clocks"]

_ENOUGH = 10  # datagrams; the fastest of them has hardly waited anywhere
_SKEW = 1.0  # seconds that confuse a reader of logs
_ROUNDING = 1e-3  # seconds; a round trip is shorter only where a clock was set in between


class Clocks:
    """Compares this host's clock with others', as NTP does (RFC 5905, 8): by datagrams of both ways.

    A datagram's time of arrival less its time of sending is its delay plus the difference of the clocks, and a delay is
    never negative. So the least of one way is a bound from above, the least of the other one from below, however slow
    the network is and however unequal its two ways; both together are a round trip.

    Args:
        host: This host's name.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._seen: dict[str, tuple[int, float]] = {}
        self._told: set[str] = set()

    def least(self, host: str) -> float | None:
        """Least of arrival here less sending there, in seconds; None before enough datagrams came."""
        count, least = self._seen.get(host, (0, 0.0))
        return least if count >= _ENOUGH else None

    def heard(self, host: str, sent: float, now: float, back: float | None = None) -> str:
        """Take note of a datagram.

        Args:
            host: Who sent it.
            sent: When, by that host's clock, in seconds since 1970.
            now: When it came, by this host's clock.
            back: That host's `least` of this one's datagrams, if it has heard enough of them.

        Returns:
            What to say, once per host; usually nothing.
        """
        count, least = self._seen.get(host, (0, float("inf")))
        self._seen[host] = (count + 1, min(least, now - sent))
        here = self.least(host)
        if here is None or back is None or host in self._told or here + back < -_ROUNDING:
            return ""
        lowest, highest = -here, back  # that clock less this one
        if lowest < _SKEW and highest > -_SKEW:
            return ""
        self._told.add(host)
        way = "behind" if highest < 0 else "ahead of"
        return (
            f"holmes: the clock of host {host} is {abs(lowest + highest) / 2:.1f} s {way} that of {self._host} "
            f"(measured to {max(0.0, highest - lowest) / 2:.2g} s): times in their logs do not compare; keep clocks in "
            "step (chronyc tracking, timedatectl)"
        )
