#!/usr/bin/env bash
# The three questions, in minutes: what fits (a search within 3 GiB), is FSDP correct (the same model,
# seed and global batch trained without FSDP and then with it, and the losses compared from the two
# job logs), and what does it cost (a table and figures of the two logs). CPU and gloo where there is
# no GPU. Run by `make demo`.
set -euo pipefail
cd "$(dirname "$0")"
PATH="$PWD/.venv/bin:$PATH"

num_gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
num_ranks=$((num_gpus == 1 ? 1 : 2))
global_batch=2
if ((num_gpus == 0)); then num_threads=$(nproc); else num_threads=4; fi

# fp32, so that the two losses may differ by rounding only.
flags=(
  --scaling-strategy all --scaling-factor 1 --model-dtype fp32 --compute-dtype fp32
  --sequence-length 256 --training-steps 20 --lr-warmup-steps 5 --learning-rate 3e-4
  --logging-frequency 1 --set-seed 42 --collective-timeout-s 600
)
no_fsdp=logs/demo/no_fsdp.out
fsdp=logs/demo/fsdp.out
mkdir -p logs/demo
rm -f "$no_fsdp" "$fsdp" logs/demo/what_fits.out

echo "== What fits? The largest factor of \`all\` that trains within 3 GiB"
OMP_NUM_THREADS=$num_threads python load_model_no_fsdp.py --mode train --memory-limit-gib 3 \
  --sequence-length 256 --log-file logs/demo/what_fits.out | grep -v ': {'

echo "== Without FSDP: one process, batch $global_batch"
OMP_NUM_THREADS=$num_threads \
  python train.py "${flags[@]}" --batch-size $global_batch --log-file $no_fsdp

echo "== With FSDP: $num_ranks rank(s), batch $((global_batch / num_ranks)) each"
threads_per_rank=$((num_threads / num_ranks > 0 ? num_threads / num_ranks : 1))
OMP_NUM_THREADS=$threads_per_rank \
  torchrun --standalone --nproc-per-node $num_ranks train_fsdp.py "${flags[@]}" \
  --batch-size $((global_batch / num_ranks)) --log-file $fsdp

echo "== Are the losses equal?"
python loss_ablation.py --fsdp-logs $fsdp --no-fsdp-logs $no_fsdp --output-dir plots/demo

echo "== What does it cost? (On a CPU the ranks share its cores: only GPUs tell.)"
python plots.py --logs logs/demo --output-dir plots/demo
python -c '
import pandas
table = pandas.read_csv("plots/demo/results.csv")
names = {"log": "log", "gpus": "ranks", "tokens_per_s_median": "tokens/s per rank", "peak_gib": "peak GiB"}
print(table[list(names)].rename(columns=names).round(2).to_string(index=False))'
