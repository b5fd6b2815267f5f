# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that know no layout, as one file or written by all ranks at once."""

from __future__ import annotations

from holmes_core.runtime.checkpoint_latest import check_checkpoint, latest_checkpoint

__all__ = ["check_checkpoint", "latest_checkpoint"]
