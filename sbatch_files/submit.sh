#!/bin/bash
# Submit an experiment: sbatch_files/submit.sh NAME [sbatch options] [-- script options]
# Makes the log folder (where it is missing, Slurm runs nothing and says nothing), asks Slurm whether
# the job could run at all, submits it, and prints its id and the log to follow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ ${1:-} != --help ]] || {
  sed -n '1d; s/^# \{0,1\}//p; /^set /q' sbatch_files/submit.sh
  exit
}
launcher=sbatch_files/${1:-}.sh
grep -qs '^#SBATCH' "$launcher" || {
  names=$(grep -l '^#SBATCH' sbatch_files/*.sh | xargs -n 1 basename --suffix=.sh | xargs)
  echo "submit.sh: error: NAME must be one of: $names" >&2
  exit 2
}
shift
options=()
while (($#)) && [[ $1 != -- ]]; do
  options+=("$1")
  shift
done
shift $(($# > 0))

output=$(sed -n 's/^#SBATCH --output=//p' "$launcher")
for index in "${!options[@]}"; do
  case ${options[index]} in
    -o | --output) output=${options[index + 1]} ;;
    --output=*) output=${options[index]#*=} ;;
  esac
done
mkdir -p "$(dirname "$output")"
sbatch --test-only "${options[@]}" "$launcher" "$@" || {
  echo "submit.sh: error: Slurm does not take this job, see above; nothing was submitted" >&2
  exit 1
}
job=$(sbatch --parsable "${options[@]}" "$launcher" "$@")
job=${job%%;*} # JOB;CLUSTER in a federation
echo "Submitted job $job. Its log:"
path=$(scontrol --oneliner show job "$job" | grep -o 'StdOut=[^ ]*')
path=${path#StdOut=}
echo "tail -F ${path#"$PWD"/}"
