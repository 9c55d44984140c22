#!/bin/bash
# A job on several nodes by Slurm: one torchrun on each node starts a rank for each of its GPUs.
#
#   sbatch examples/slurm.sh                              # the plain loop on 2 nodes of 8 GPUs
#   sbatch --nodes 4 examples/slurm.sh my_program.py      # another program, other numbers: options of sbatch win over those below
#
# Prints what rank 0 of the program prints (into slurm-JOBID.out). The program needs no change for several nodes: zs.shard sees which
# ranks are on one host, and sends each byte between hosts once for all of them.
#SBATCH --job-name=zeroshard
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
set -euo pipefail

# Ranks meet at the first node of the job. The port is made of the job's number, so that two jobs on a node do not meet.
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
port=$((20000 + SLURM_JOB_ID % 10000))

# If a rank fails, the others name it within seconds, and srun ends the whole job. To resume, save with zs.save and submit it again.
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:$port" --rdzv-id "$SLURM_JOB_ID" \
    "${@:-examples/plain_loop.py}"
