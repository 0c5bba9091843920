#!/bin/bash
# What does it cost? Train every size on every number of GPUs, up to the first that is out of memory.
#   sbatch_files/submit_scaling.sh [options] [-- more flags of the training scripts]
#     --strategies all,n_layers   default: all
#     --factors 1,2,4             default: 1,2,4,6,8,9,10,12 and on to 24; n_layers: 1 to 24
#     --gpus 1,4,8                numbers of GPUs to train on with FSDP (default: 1; none: no)
#     --no-fsdp yes|no            also on one GPU without FSDP (default: yes)
#     --batch-sizes 1,2,4         per GPU, up to the first that is out of memory (default: 1); last may
#                                 come `largest`, with --local: the largest that should fit (at full speed)
#     --gpus-per-node 4           with Slurm
#     --folder FOLDER             of the logs (default: logs/scaling); a series with other flags needs
#                                 one of its own, because a finished point is not run again
#     --print                     show what would be run
#     --local --max-minutes M     run it here, one point after the other, for at most M minutes
# Exit status: 0 done or submitted; 1 a point failed; 2 bad input; 3 the minutes are over before all
# points are done; 130 or 143 a signal ended it, and the point at hand.
# With Slurm a point is a job that waits for the one before it to end well (afterok): the rest of a
# line falls away with the first that does not. Jobs of one point each fit between others and
# need little time (SBATCH_TIMELIMIT, SBATCH_ACCOUNT and SBATCH_PARTITION are honoured).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
  echo "submit_scaling.sh: error: $*" >&2
  exit 2
}

python=${FSDP_VENV:-.venv}/bin/python
strategies=all factors='' gpus=1 no_fsdp=yes batch_sizes=1 gpus_per_node=4 folder=logs/scaling
mode=slurm print='' max_minutes=''
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    --help)
      sed -n '1d; s/^# \{0,1\}//p; /^set /q' sbatch_files/submit_scaling.sh
      exit
      ;;
    --print) print=yes ;;
    --local) mode=local ;;
    --strategies | --factors | --gpus | --no-fsdp | --batch-sizes | --gpus-per-node | --folder | \
      --max-minutes)
      (($# > 1)) || refuse "$1 needs a value"
      name=${1#--}
      printf -v "${name//-/_}" %s "$2"
      shift
      ;;
    *) refuse "unknown option $1 (flags of the training scripts come after --)" ;;
  esac
  shift
done
shift $(($# > 0))
extra=("$@")
for list in "$factors" "${batch_sizes%,largest}" "${gpus/none/}"; do
  [[ $list =~ ^([1-9][0-9]*(,[1-9][0-9]*)*)?$ ]] || refuse "not a list of whole numbers: $list"
done
for number in "$gpus_per_node" "${max_minutes:-1}"; do
  [[ $number =~ ^[1-9][0-9]{0,8}$ ]] || refuse "not a whole number from 1: $number"
done
[[ $strategies =~ ^(all|n_layers)(,(all|n_layers))*$ ]] || refuse "unknown --strategies $strategies"
[[ $no_fsdp =~ ^(yes|no)$ ]] || refuse "--no-fsdp takes yes or no, not $no_fsdp"
for number in ${gpus//[!0-9]/ }; do
  [[ $mode == local || $number -le $gpus_per_node || $((number % gpus_per_node)) == 0 ]] ||
    refuse "$number GPUs do not fill nodes of $gpus_per_node"
done
[[ $mode == local || $batch_sizes != *largest ]] || refuse "--batch-sizes largest needs --local"
[[ $mode == slurm || -n $max_minutes ]] || refuse "--local needs --max-minutes"
[[ -x $python ]] || refuse "no $python: make env"

# completed, out_of_memory ... of a log; nothing where there is none.
status_of() {
  [[ ! -s $1 ]] || "$python" -c 'import sys, run_log; print(run_log.read_run(sys.argv[1]).status)' "$1"
}

# Run a point, or submit it behind the job $after. Sets status, and job where one was submitted.
run_point() { # line strategy factor batch
  local line=$1 name script=train_fsdp num_gpus=$1 num_nodes=1 log
  [[ $line != no_fsdp ]] || script=train_no_fsdp num_gpus=1
  name=$2_$3_batch_$4_gpus_${num_gpus}_${script#train_}
  log=$folder/$name.out
  local flags=(--scaling-strategy "$2" --scaling-factor "$3" --batch-size "$4" --training-steps 40
    --lr-warmup-steps 10 --set-seed 42 --sequence-length 4096 "${extra[@]}")
  if [[ $mode == slurm ]]; then
    # A job's log carries its id: a point that is asked for again must not touch that of a running job.
    log=$(find "$folder" -name "$name-*.out" 2>/dev/null | sort -V | tail -n 1 || :)
    ((num_gpus <= gpus_per_node)) || num_nodes=$((num_gpus / gpus_per_node))
    local command=(sbatch --parsable "--nodes=$num_nodes" "--gpus-per-node=$((num_gpus / num_nodes))"
      "--job-name=$name" "--output=$folder/%x-%j.out" ${after:+"--dependency=afterok:$after"}
      ${after:+--kill-on-invalid-dep=yes} "sbatch_files/$script.sh" "${flags[@]}")
  elif [[ $line == no_fsdp ]]; then
    local command=("$python" train.py "${flags[@]}" --log-file "$log")
  else
    local command=("$python" -m torch.distributed.run --standalone --nproc-per-node "$num_gpus"
      train_fsdp.py "${flags[@]}" --log-file "$log")
  fi
  status=$(status_of "$log")
  if [[ $status == completed || $status == out_of_memory ]]; then
    echo "$name: $status, not run again"
  elif [[ -n $print ]]; then
    echo "${command[*]}"
    status=submitted job=JOB_OF_$name
  elif [[ $mode == slurm ]]; then
    job=$("${command[@]}")
    status=submitted job=${job%%;*}
    echo "$name: job $job${after:+, after $after}"
  else
    run_here
  fi
}

# What the memory model says of the GPU at hand; nothing where there is none.
largest_batch() { # line strategy factor
  local script=train_fsdp.py ranks=$1
  [[ $1 != no_fsdp ]] || script=train.py ranks=1
  WORLD_SIZE=$ranks "$python" "$script" --scaling-strategy "$2" --scaling-factor "$3" \
    --sequence-length 4096 "${extra[@]}" --dry-run | sed -n 's/^largest batch size .* //p'
}

run_here() {
  local left=$((max_minutes * 60 - SECONDS))
  ((left > 0)) || out_of_time
  rm -f "$log"
  # In the background, because bash hears a signal only while it waits.
  timeout --kill-after=60 "$left" "${command[@]}" >/dev/null &
  child=$!
  wait "$child" || :
  child=''
  status=$(status_of "$log")
  echo "$name: ${status:-failed before the first line of its log}"
  [[ $status != completed && $status != out_of_memory ]] || return 0
  ((SECONDS < max_minutes * 60)) || out_of_time
  failed=1
}

# shellcheck disable=SC2329 # called by the traps
stop() { # EXIT_STATUS
  trap '' INT TERM HUP
  if [[ -n $child ]]; then
    kill "$child" || : # timeout tells the whole group of its command
    wait "$child" || :
  fi
  exit "$1"
}

out_of_time() {
  echo "$max_minutes minutes are over; the same command goes on from here"
  exit $((failed ? failed : 3))
}

failed=0 at_hand='' child=''
trap 'stop 130' INT
trap 'stop 143' TERM HUP
if [[ $mode == local && -z $print ]]; then
  at_hand=$("$python" -c 'import torch; print(torch.cuda.device_count() or "")')
fi
[[ -n $print ]] || mkdir -p "$folder" || refuse "--folder '$folder' cannot be made"
read -ra lines <<<"${gpus//,/ }"
[[ $gpus != none ]] || lines=()
[[ $no_fsdp != yes ]] || lines=(no_fsdp "${lines[@]}")
for strategy in ${strategies//,/ }; do
  sizes=${factors:-1,2,4,6,8,9,10,12,$(seq --separator=, 13 24)}
  [[ -n $factors || $strategy == all ]] || sizes=$(seq --separator=, 1 24)
  for line in "${lines[@]}"; do
    if [[ $line != no_fsdp && -n $at_hand && $line -gt $at_hand ]]; then
      echo "$line GPUs: only $at_hand here, not run"
      continue
    fi
    before='' # the job of the factor before, at its first batch size
    for factor in ${sizes//,/ }; do
      after=$before is_first=yes
      for batch in ${batch_sizes//,/ }; do
        job=''
        if [[ $batch == largest ]]; then
          batch=$(largest_batch "$line" "$strategy" "$factor")
          ((${batch:-0} > 1)) || continue # one row was run already
        fi
        run_point "$line" "$strategy" "$factor" "$batch"
        [[ -z $is_first ]] || before=$job first_status=$status
        [[ $status == completed || $status == submitted ]] || break
        after=$job is_first=''
      done
      [[ $first_status == completed || $first_status == submitted ]] || break
    done
  done
done
exit "$failed"
