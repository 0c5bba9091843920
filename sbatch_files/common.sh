# shellcheck shell=bash
# What the launchers share: `launch SCRIPT FLAGS...` runs a script on the nodes of this job and ends
# the job with its status. Slurm runs a copy of the launcher, which finds this file through
# SLURM_SUBMIT_DIR: submit from the root of the repository (submit.sh does).
#
# Read from the environment:
#   FSDP_ENVIRONMENT  container of the steps where srun knows --environment (ngc_pt_jan; empty: none)
#   FSDP_VENV         Python environment (.venv; in the container .venv-container)
#   RANKS_PER_NODE    ranks per node on nodes without GPUs (else: one for each of the job's GPUs)
#   NCCL_DEBUG        INFO: one file per rank in logs/nccl/JOB; the job log gets their summary
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

MAX_STALLED_RESTARTS=3
log=$(readlink "/proc/$$/fd/1")
log_start=$(stat --format=%s "$log") # a requeued job appends
step='' asked_to_stop='' cancelled=''

# The signal of --signal comes once, maybe before the ranks listen: repeat it until they are gone.
on_usr1() {
  asked_to_stop=yes
  [[ -z $step ]] || (while kill -USR1 "$step"; do sleep 10; done) >/dev/null 2>&1 &
}
trap on_usr1 USR1
# scancel and the time limit send TERM, to the ranks as well: let srun pass their last lines on, and
# never requeue what was cancelled.
trap 'cancelled=yes' TERM

refuse() {
  echo "$SLURM_JOB_NAME: error: $*" >&2
  exit 2
}

launch() {
  local status=0 container=() hosts transport
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  echo "Job $SLURM_JOB_ID ($SLURM_JOB_NAME), restart ${SLURM_RESTART_COUNT:-0}, begins $(date -Is)"
  echo "Hosts: ${hosts[*]}"
  [[ $1 == train_fsdp.py || ${#hosts[@]} == 1 ]] || refuse "$1 runs on one node, not ${#hosts[@]}"
  [[ -n ${RANKS_PER_NODE:-} || -n ${SLURM_GPUS_ON_NODE:-} ]] ||
    refuse "no GPU in this job: ask for --gpus-per-node, or set RANKS_PER_NODE to run on CPUs"
  # A name, because vanilla srun has no such option.
  local environment=${FSDP_ENVIRONMENT-ngc_pt_jan}
  if [[ -n $environment && $(srun --help 2>&1) == *--environment=* ]]; then
    container=("--environment=$environment")
    export FSDP_VENV=${FSDP_VENV:-.venv-container}
  fi
  export HEAD_NODE=${hosts[0]} FSDP_VENV=${FSDP_VENV:-.venv}
  export NCCL_DEBUG=${NCCL_DEBUG-INFO} NCCL_DEBUG_SUBSYS=${NCCL_DEBUG_SUBSYS-INIT,NET}
  export NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE-logs/nccl/$SLURM_JOB_ID/%h.%p}
  mkdir -p "logs/nccl/$SLURM_JOB_ID"
  # Since 22.05 srun does not inherit it, and one core would have to feed all GPUs of a node.
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

  srun --kill-on-bad-exit=1 "${container[@]}" bash sbatch_files/node.sh "$@" &
  step=$!
  while kill -0 "$step" 2>/dev/null; do
    wait "$step" || : # a signal interrupts it
  done
  wait "$step" || status=$?
  transport=$(grep -aoh 'Using network .*' "logs/nccl/$SLURM_JOB_ID/"* 2>/dev/null | sort | uniq -c || :)
  echo "NCCL transport of the ranks: ${transport:-none, NCCL was not used}"
  echo "Job $SLURM_JOB_ID ends $(date -Is), status $status"
  if is_preempted && is_requeue_wanted; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$status"
}

# Whether the signal came, and the run of this attempt says that it stopped for it.
is_preempted() {
  [[ -n $asked_to_stop && -z $cancelled && $(tail --bytes="+$((log_start + 1))" "$log" |
    grep -a 'End: {' | tail --lines=1) == *'"status": "preempted"'* ]]
}

# Whether --requeue was asked for, and one of the last three restarts got further than those before.
is_requeue_wanted() {
  local reached last last_step=0 stalled=0
  [[ $(scontrol --oneliner show job "$SLURM_JOB_ID") == *' Requeue=1 '* ]] || return 1
  reached=$(grep -aoE '(Step: |"steps_done": )[0-9]+' "$log" | grep -oE '[0-9]+$' | sort -n | tail -n 1)
  last=$(grep -aoE 'Requeued at step [0-9]+, [0-9]+ restarts' "$log" | tail -n 1 || :)
  if [[ -n $last ]]; then
    read -r _ _ _ last_step stalled _ <<<"${last/,/}"
    stalled=$((reached > last_step ? 0 : stalled + 1))
  fi
  if ((stalled >= MAX_STALLED_RESTARTS)); then
    echo "Not requeued: $stalled restarts did not get beyond step $reached"
    return 1
  fi
  echo "Requeued at step $reached, $stalled restarts without progress"
}
