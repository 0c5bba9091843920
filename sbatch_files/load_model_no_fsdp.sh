#!/bin/bash
#SBATCH --job-name=load_model_no_fsdp
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=logs/load_model_no_fsdp/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --no-requeue
# What fits? The largest model that one GPU holds, or trains (--mode train), without FSDP.
source "$SLURM_SUBMIT_DIR/sbatch_files/common.sh" || exit

launch load_model_no_fsdp.py "$@"
