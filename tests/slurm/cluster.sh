#!/usr/bin/env bash
# A private SLURM of four nodes on one machine: real slurmctld, slurmd and munged; nothing outside DIR is touched.
#
#   cluster.sh DIR run COMMAND…   fetch, start in namespaces of its own, run COMMAND inside, stop; exit code is COMMAND's
#   cluster.sh DIR fetch          download and unpack Debian's packages under DIR (once; nothing is installed)
#   cluster.sh DIR start|stop|status|env|startnode N|stopnode N [SIGNAL]     for use inside `run`
#
# Nodes wm1-wm4 with eight fake GPUs each; partitions `train` (requeued by preemption, 10 s of grace) and `urgent`
# (preempts `train`). Needs root for the namespaces; where that or the packages are missing, `run` says so and
# ends with exit code 0 unless SLURM_DEV_REQUIRED is set. Everything dies with the process that called `run`.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ROOT=$(mkdir -p "$1" && cd "$1" && pwd -P)
CMD=$2
SELF=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
NODES=${SLURM_DEV_NODES:-4} GPUS=${SLURM_DEV_GPUS:-8} BASE=${SLURM_DEV_PORT:-26800}
P=$ROOT/pkg

say() { echo "cluster: $*" >&2; }
skip() {
  say "skipped: $*"
  [ -z "${SLURM_DEV_REQUIRED:-}" ] || exit 1
  exit 0
}
libraries() { echo "$P"/usr/lib/*-linux-gnu; }
env_text() {
  local lib
  lib=$(libraries)
  printf 'export SLURM_CONF=%s\n' "$ROOT/etc/slurm.conf"
  # shellcheck disable=SC2016 # for whoever reads the file
  printf 'export PATH=%s/usr/bin:%s/usr/sbin:$PATH\n' "$P" "$P"
  printf 'export LD_LIBRARY_PATH=%s:%s/slurm-wlm\n' "$lib" "$lib"
}

fetch() {
  [ ! -L "$P/usr/sbin/slurmstepd" ] || return 0
  if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    say "no apt-get and dpkg here"
    return 1
  fi
  mkdir -p "$ROOT/debs" "$P"
  local packages=(libhwloc15 liblua5.1-0 libmunge2 munge slurm-wlm-basic-plugins slurm-client slurmctld slurmd)
  cd "$ROOT/debs"
  if ! apt-get -qq download "${packages[@]}" 2>"$ROOT/fetch.log"; then
    { apt-get -qq update && apt-get -qq download "${packages[@]}"; } >"$ROOT/fetch.log" 2>&1 || {
      say "Debian's packages cannot be downloaded: $(tail -n 1 "$ROOT/fetch.log")"
      return 1
    }
  fi
  apt-get -qq download shellcheck 2>/dev/null || say "no shellcheck package: the scripts are not linted"
  local package program
  for package in *.deb; do dpkg -x "$package" "$P"; done
  # Debian names them *-wlm; SLURM looks at its own program's name and without the plain one drops Gres silently.
  for program in slurmctld slurmd slurmstepd; do ln -sf "$program-wlm" "$P/usr/sbin/$program"; done
}

configure() {
  local i
  mkdir -p "$ROOT"/{etc,run,state,spool,log,dev,munge}
  chmod 700 "$ROOT/munge"
  chmod 755 "$ROOT/run"
  [ -s "$ROOT/munge/key" ] || { head -c 1024 /dev/urandom >"$ROOT/munge/key" && chmod 600 "$ROOT/munge/key"; }
  for ((i = 0; i < GPUS; i++)); do ln -sfn /dev/null "$ROOT/dev/gpu$i"; done # a gres must be a character device
  {
    cat <<E2
ClusterName=dev
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$BASE
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$ROOT/run/munge.sock,cred_expire=5
CryptoType=crypto/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
PluginDir=$(libraries)/slurm-wlm
PlugStackConfig=$ROOT/etc/plugstack.conf
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd.%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd.%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$ROOT/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
JobRequeue=1
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=5
UnkillableStepTimeout=20
MessageTimeout=10
InactiveLimit=0
MinJobAge=600
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
E2
    for ((i = 1; i <= NODES; i++)); do
      echo "NodeName=wm$i CPUs=96 Sockets=2 CoresPerSocket=48 ThreadsPerCore=1 RealMemory=500000 State=UNKNOWN NodeHostname=wm$i NodeAddr=127.0.0.1 Port=$((BASE + i)) Gres=gpu:$GPUS"
    done
    cat <<E2
PartitionName=train Nodes=wm[1-$NODES] Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=REQUEUE GraceTime=10
PartitionName=urgent Nodes=wm[1-$NODES] MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
E2
  } >"$ROOT/etc/slurm.conf"
  printf 'AutoDetect=off\nName=gpu File=%s\n' "$ROOT/dev/gpu[0-$((GPUS - 1))]" >"$ROOT/etc/gres.conf"
  : >"$ROOT/etc/plugstack.conf"
  # slurmd loads a cgroup plugin even when nothing uses it, and its automatic choice needs a mount or systemd.
  echo 'CgroupPlugin=cgroup/v1' >"$ROOT/etc/cgroup.conf"
  { cat /etc/hosts && for ((i = 1; i <= NODES; i++)); do echo "127.0.0.1 wm$i"; done; } >"$ROOT/etc/hosts"
  env_text >"$ROOT/env"
}

alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }

start() {
  local i n
  configure
  # shellcheck source=/dev/null
  . "$ROOT/env"
  rm -rf "$ROOT"/run/*.pid "$ROOT"/run/munge.sock* "$ROOT/state" "$ROOT/spool"
  mkdir -p "$ROOT/state" "$ROOT/spool"
  : >"$ROOT/log/slurmctld.log"
  # glibc ignores 127.0.0.1 when it decides whether there is IPv4: with that alone SLURM resolves nothing.
  ip -4 -o addr show 2>/dev/null | grep -qvE ' 127\.0\.0\.1/' || ip addr add 127.0.0.2/8 dev lo
  "$P/usr/sbin/munged" --key-file="$ROOT/munge/key" --socket="$ROOT/run/munge.sock" --pid-file="$ROOT/run/munged.pid" \
    --log-file="$ROOT/log/munged.log" --seed-file="$ROOT/munge/seed" --num-threads=2
  "$P/usr/sbin/slurmctld" -f "$SLURM_CONF" -c
  for ((i = 1; i <= NODES; i++)); do start_node "wm$i"; done
  for ((i = 0; i < 300; i++)); do
    n=$(sinfo -h -N -p train -t idle,alloc,mix -o %N 2>/dev/null | wc -l) || n=0
    [ "$n" -lt "$NODES" ] || { say "$n nodes are up"; return 0; }
    sleep 0.1
  done
  say "the nodes did not come up within 30 s"
  sinfo >&2 || true
  tail -n 20 "$ROOT"/log/*.log >&2
  return 1
}

start_node() { # every node has a host name and an /etc/hosts of its own
  # shellcheck source=/dev/null
  . "$ROOT/env"
  mkdir -p "$ROOT/spool/$1"
  # shellcheck disable=SC2016 # the inner shell expands them
  unshare --uts --mount --propagation private bash -c \
    'hostname "$1" && mount --bind "$2" /etc/hosts && exec "$3" -N "$1" -f "$4" -d "$5"' \
    _ "$1" "$ROOT/etc/hosts" "$P/usr/sbin/slurmd" "$SLURM_CONF" "$P/usr/sbin/slurmstepd"
}

stop_node() { alive "$ROOT/run/slurmd.$1.pid" && kill "${2:--TERM}" "$(cat "$ROOT/run/slurmd.$1.pid")"; }

stop() { # the namespace takes along what is left
  local file
  for file in "$ROOT"/run/slurmd.*.pid "$ROOT/run/slurmctld.pid" "$ROOT/run/munged.pid"; do
    ! alive "$file" || kill -TERM "$(cat "$file")" 2>/dev/null || true
  done
}

run() {
  [ "$(id -u)" = 0 ] || skip "the cluster needs root (for namespaces)"
  unshare --mount --pid --fork --uts --ipc --net true 2>/dev/null || skip "namespaces cannot be made here"
  (fetch) || skip "SLURM is not here"
  exec 9>"$ROOT/lock"
  flock -n 9 || { say "error: another cluster runs in $ROOT; wait for it or take another DIR"; exit 1; }
  exec unshare --mount --propagation private --pid --fork --kill-child --mount-proc --uts --ipc --net \
    bash "$SELF" "$ROOT" inside "$@"
}

inside() {
  local code=0
  ip link set lo up
  start
  # shellcheck source=/dev/null
  . "$ROOT/env"
  export SLURM_DEV_ROOT=$ROOT SLURM_DEV_SCRIPT=$SELF
  "$@" || code=$?
  stop
  exit "$code"
}

shift 2
case $CMD in
fetch | start | stop | run | inside) "$CMD" "$@" ;;
startnode) start_node "$@" ;;
stopnode) stop_node "$@" ;;
env) cat "$ROOT/env" ;;
status)
  # shellcheck source=/dev/null
  . "$ROOT/env"
  sinfo -N -l
  squeue
  ;;
*)
  say "unknown command $CMD"
  exit 2
  ;;
esac
