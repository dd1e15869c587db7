#!/bin/bash
# sbatch slurm.sh: as many nodes as there are, from one to four, anew each time the job starts.
#SBATCH --job-name=train
#SBATCH --nodes=1-4
#SBATCH --ntasks-per-node=1
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Two minutes before the time is over, all processes save and end with status 75.
#SBATCH --signal=TERM@120

set -u
status=0
srun --kill-on-bad-exit=1 python train.py "checkpoints/{process}" || status=$?
if [ "$status" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
