#!/usr/bin/env bash
# A real Slurm on one machine, as root: munged, slurmctld, and two slurmd in network namespaces of
# their own (nid001, nid002) with four GPUs each that are links to /dev/null.
#   cluster.sh up|down DIR    DIR absolute, owned by root, writable by nobody else
#   cluster.sh plugin DIR on|off    whether sbatch and srun know --environment (environment.c)
# Names of networks are fixed: one cluster at a time.
set -euo pipefail
command=$1 dir=$2
here=$(dirname "$(realpath "$0")")
export SLURM_CONF=$dir/etc/slurm.conf
bridge=fsdpslurm0 net=10.213.0 controller=$(hostname -s)

up() {
  ! ip link show $bridge >/dev/null 2>&1 ||
    { echo "cluster.sh: another cluster is up; end it: cluster.sh down DIR" >&2; exit 2; }
  mkdir -p "$dir"/{etc,run/munge,log,state,dev,spool/nid001,spool/nid002}
  for i in 0 1 2 3; do ln -sfn /dev/null "$dir/dev/gpu$i"; done
  (umask 077 && head -c 1024 /dev/urandom >"$dir/etc/munge.key")
  write_configuration
  gcc -shared -fPIC -O2 -o "$dir/environment.so" "$here/environment.c"
  ip link add $bridge type bridge
  ip addr add $net.254/24 dev $bridge
  ip link set $bridge up
  munged --key-file="$dir/etc/munge.key" --socket="$dir/run/munge/munge.socket" \
    --pid-file="$dir/run/munge/munged.pid" --log-file="$dir/log/munged.log" \
    --seed-file="$dir/run/munge/munged.seed"
  slurmctld
  for k in 1 2; do
    node=nid00$k
    ip netns add $node
    ip link add v$node type veth peer name eth0 netns $node
    ip link set v$node master $bridge up
    ip -n $node link set lo up
    ip -n $node addr add $net.$k/24 dev eth0
    ip -n $node link set eth0 up
    nsenter --net=/run/netns/$node unshare --uts --mount sh -c \
      "hostname $node; mount --bind '$dir/etc/hosts' /etc/hosts; exec slurmd -N $node"
  done
  for _ in $(seq 300); do
    [[ $(sinfo --noheader --states=idle --format=%D 2>/dev/null) != 2 ]] || return 0
    sleep 0.1
  done
  tail -n 20 "$dir"/log/*.log >&2
  return 1
}

write_configuration() {
  local track=proctrack/linuxproc
  [[ ! -w /sys/fs/cgroup/freezer/cgroup.procs ]] || track=proctrack/cgroup
  cat >"$dir/etc/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$controller($net.254)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=$track
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_resolution=1
EnforcePartLimits=ALL
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=DEFAULT Port=16818 CPUs=288 Sockets=4 CoresPerSocket=72 ThreadsPerCore=1 RealMemory=870000 Gres=gpu:4
NodeName=nid001 NodeAddr=$net.1
NodeName=nid002 NodeAddr=$net.2
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  echo "Name=gpu File=$dir/dev/gpu[0-3]" >"$dir/etc/gres.conf"
  printf '%s\n' CgroupPlugin=cgroup/v1 CgroupMountpoint=/sys/fs/cgroup CgroupAutomount=no \
    >"$dir/etc/cgroup.conf"
  printf '%s\n' "127.0.0.1 localhost" "$net.254 $controller" "$net.1 nid001" "$net.2 nid002" \
    >"$dir/etc/hosts"
  plugin on
}

plugin() {
  if [[ $1 == on ]]; then
    echo "required $dir/environment.so" >"$dir/etc/plugstack.conf"
  else
    : >"$dir/etc/plugstack.conf"
  fi
}

down() {
  scancel --user=root 2>/dev/null || :
  for _ in $(seq 100); do
    [[ -n $(squeue --noheader 2>/dev/null) ]] || break
    sleep 0.1
  done
  for file in "$dir"/run/slurmd.*.pid "$dir"/run/slurmctld.pid "$dir"/run/munge/munged.pid; do
    [[ -f $file ]] || continue
    pid=$(cat "$file")
    kill "$pid" 2>/dev/null || continue
    for _ in $(seq 50); do
      kill -0 "$pid" 2>/dev/null || continue 2
      sleep 0.1
    done
    kill -9 "$pid" || :
  done
  for node in nid001 nid002; do
    ip netns del $node || :
    rmdir /sys/fs/cgroup/freezer/slurm_$node 2>/dev/null || :
  done
  ip link del $bridge || :
}

case $command in
  up) up ;;
  down) down ;;
  plugin) plugin "$3" ;;
esac
