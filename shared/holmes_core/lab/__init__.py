# SPDX-License-Identifier: Apache-2.0
"""The lab: a real cluster with unequal networks on one Linux machine, from network namespaces."""
