#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# One job out of several SLURM allocations: each srun task becomes a rank of the whole job.
#
#   export FIRST_RANK=0 FIRST_NODE=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=29500     # in the first allocation
#   export FIRST_RANK=2 FIRST_NODE=2 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=29500     # in the second
#   srun --ntasks-per-node=1 sh join_allocations.sh python train.py
#
# FIRST_RANK and FIRST_NODE: how many ranks and hosts the allocations before this one have, in an order you choose.
set -eu
: "${FIRST_RANK:?}" "${FIRST_NODE:?}" "${WORLD_SIZE:?}" "${MASTER_ADDR:?}" "${MASTER_PORT:?}" "${SLURM_PROCID:?not under srun}"

export RANK=$((FIRST_RANK + SLURM_PROCID)) NODE_RANK=$((FIRST_NODE + SLURM_NODEID)) LOCAL_RANK="$SLURM_LOCALID"
export LOCAL_WORLD_SIZE="${SLURM_NTASKS_PER_NODE:-1}"

# Libraries that find SLURM's variables take this allocation for the whole job.
for name in $(env | sed -n 's/^\(SLURM_[A-Za-z0-9_]*\)=.*/\1/p'); do unset "$name"; done
exec "$@"
