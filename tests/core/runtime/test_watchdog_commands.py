# SPDX-License-Identifier: Apache-2.0
"""The end of a rank's commands may be seen twice: with the rank's own end, and by itself."""

from __future__ import annotations

import os
import selectors

from holmes_core.runtime.watchdog_process import Watchdog


def test_the_end_of_commands_is_read_once() -> None:
    watchdog = object.__new__(Watchdog)
    watchdog.commands, writer = os.pipe()
    watchdog.selector = selectors.DefaultSelector()
    watchdog.selector.register(watchdog.commands, selectors.EVENT_READ)
    watchdog._buffer, watchdog.commands_closed, watchdog.closed_at = b"", False, 0.0
    os.close(writer)
    for _ in range(2):
        watchdog._read_commands()
    assert watchdog.commands_closed
    watchdog.selector.close()
    os.close(watchdog.commands)
