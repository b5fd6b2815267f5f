# SPDX-License-Identifier: Apache-2.0
"""Readers of the logs of NCCL, gloo, c10d, torchrun, libfabric, UCX, the kernel and SLURM."""
