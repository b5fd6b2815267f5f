# SPDX-License-Identifier: Apache-2.0
"""Entry point of torch.backends."""


def activate() -> None:
    """Do nothing yet."""
