#!/bin/bash
#SBATCH --job-name=train_fsdp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --output=logs/train_fsdp/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue
# What does it cost with FSDP? Any number of nodes and GPUs; --batch-size is per GPU.
source "$SLURM_SUBMIT_DIR/sbatch_files/common.sh" || exit

launch train_fsdp.py --learning-rate 5e-5 --lr-warmup-steps 100 --training-steps 100 \
  --set-seed 42 --sequence-length 4096 --batch-size 1 "$@"
