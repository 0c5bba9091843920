#!/bin/bash
#SBATCH --job-name=loss_ablation_no_fsdp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=logs/loss_ablation_no_fsdp/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue
# Is FSDP correct? The reference: one GPU adds up the global batch of the four of the other job.
source "$SLURM_SUBMIT_DIR/sbatch_files/common.sh" || exit

launch train.py --learning-rate 5e-5 --lr-warmup-steps 100 --training-steps 100 \
  --set-seed 42 --sequence-length 4096 --batch-size 1 --grad-accumulation-steps 4 \
  --logging-frequency 1 "$@"
