#!/bin/bash
# Started by srun once per node: looks at the node, then runs its ranks. node.sh SCRIPT FLAGS...
set -euo pipefail

# A signal that comes before the ranks listen must not end them. It is repeated (common.sh).
trap '' USR1
python=$FSDP_VENV/bin/python
[[ -x $python ]] || {
  echo "node.sh: error: no $python on $(hostname): make env (in a container: make env-container)" >&2
  exit 2
}
num_ranks=1
[[ $1 != train_fsdp.py ]] || num_ranks=${RANKS_PER_NODE:-$SLURM_GPUS_ON_NODE}
plan=() # the same on all nodes
((SLURM_NODEID)) || plan=("$@")
num_gpus=$num_ranks
[[ -z ${RANKS_PER_NODE:-} ]] || num_gpus=0
WORLD_SIZE=$((SLURM_NNODES * num_ranks)) GROUP_WORLD_SIZE=$SLURM_NNODES "$python" preflight.py "$num_gpus" "${plan[@]}"
[[ $1 == train_fsdp.py ]] || exec "$python" "$@"

rendezvous=(--standalone)
((SLURM_NNODES == 1)) || rendezvous=(
  --nnodes "$SLURM_NNODES" --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID"
  --rdzv-endpoint "$HEAD_NODE:$((10000 + SLURM_JOB_ID % 20000))"
)
num_threads=$((${SLURM_CPUS_PER_TASK:-1} / num_ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((num_threads ? num_threads : 1))}
"$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "$num_ranks" "$@" &
agent=$!
# Past torchrun: older versions die of USR1, newer ones pass it on and kill the ranks after 30 s, in
# the middle of a save.
trap 'pkill -USR1 --parent "$agent" || :' USR1 TERM
while kill -0 "$agent" 2>/dev/null; do
  wait "$agent" || : # a signal interrupts it
done
wait "$agent"
