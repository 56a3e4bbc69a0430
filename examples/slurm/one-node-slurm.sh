#!/usr/bin/env bash
# A real Slurm on this one machine, for trying the batch scripts and for the tests: Debian's packages, no systemd.
#
#   one-node-slurm.sh [up]    install, configure and start; does nothing where it runs already
#   one-node-slurm.sh down    end the daemons that `up` started
#   one-node-slurm.sh conf    print the configuration that `up` would write; needs no root
#
# An HPC centre has its own Slurm: never run this there.
set -euo pipefail

readonly CONF=/etc/slurm/slurm.conf
readonly MARK="# written by hvdplus: one-node-slurm.sh"
readonly STATE=/var/lib/hvdplus-slurm
readonly LOGS=/var/log/hvdplus-slurm
export PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "one-node-slurm: $*" >&2
    exit 1
}

ours() { grep -qsF "$MARK" "$CONF"; }

# By name too: after a reboot the number may belong to somebody else's process, which `down` must not end.
running() { [[ -s $STATE/$1.pid && $(cat "/proc/$(<"$STATE/$1.pid")/comm" 2>/dev/null) == "$1" ]]; }

# slurmd is asked for apart, because Slurm calls a node idle for half a minute after its slurmd died.
node_is_ready() {
    timeout 5 sinfo --noheader --format=%T 2>/dev/null | grep -qxE 'idle|mixed|allocated' && { ! ours || running slurmd; }
}

install_packages() {
    # libpmix-dev only for the link libpmix.so, by which Slurm's plugin loads the library.
    local wanted=(slurm-wlm munge libpmix2 libpmix-dev) missing=() name
    for name in "${wanted[@]}"; do
        dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
    done
    ((${#missing[@]})) || return 0
    echo "one-node-slurm: installing ${missing[*]}"
    command -v apt-get >/dev/null || fail "needs Debian's packages (${missing[*]}), and there is no apt-get here"
    apt-get update -q >/dev/null
    # The packages try to start their services; here nothing supervises them, and ours are started below.
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
}

conf() {
    # What the node has, in Slurm's own words; less memory than there is, because the system needs some.
    local memory cores
    memory=$(awk '/^MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    # nproc believes OpenMP's variables, which say how many threads a program wants, not how many cores there are.
    cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
    cat <<CONF
$MARK
ClusterName=one-node
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
MinJobAge=300
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/d
SlurmctldPidFile=$STATE/slurmctld.pid
SlurmdPidFile=$STATE/slurmd.pid
SlurmctldLogFile=$LOGS/slurmctld.log
SlurmdLogFile=$LOGS/slurmd.log
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$memory State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

write_conf() {
    if [[ -e $CONF ]] && ! ours; then
        fail "$CONF exists and is not ours: this machine has a Slurm of its own, which is left alone"
    fi
    mkdir -p "$STATE/ctld" "$STATE/d" "$LOGS" /etc/slurm
    conf >"$CONF"
}

start_munge() {
    munge -n >/dev/null 2>&1 && return
    [[ -s /etc/munge/munge.key ]] || mungekey --create
    install -d -o munge -g munge -m 0755 /run/munge
    chown munge: /etc/munge/munge.key
    runuser -u munge -- munged --pid-file=/run/munge/munged.pid
    cp /run/munge/munged.pid "$STATE/munged.pid"
    munge -n >/dev/null || fail "munged does not answer; see /var/log/munge/munged.log"
}

start() {
    running "$1" && return
    "$1" && return
    tail -n 15 "$LOGS/$1.log" >&2 || true
    fail "$1 did not start; its log is $LOGS/$1.log"
}

up() {
    node_is_ready && { echo "one-node-slurm: runs already"; return; }
    install_packages
    write_conf
    start_munge
    start slurmctld
    start slurmd
    local deadline=$((SECONDS + 60))
    until node_is_ready; do
        if ((SECONDS > deadline)); then
            tail -n 15 "$LOGS"/*.log >&2 || true
            fail "the node did not become ready within 60 s; see $LOGS"
        fi
        # After a crash Slurm may hold the node down until somebody says it is well.
        scontrol update NodeName="$(hostname)" State=RESUME 2>/dev/null || true
        sleep 1
    done
    echo "one-node-slurm: ready ($(sinfo --noheader --format='%n: %c cores, %m MB'))"
}

down() {
    local name
    for name in slurmd slurmctld munged; do
        if running "$name"; then
            kill "$(<"$STATE/$name.pid")"
            echo "one-node-slurm: ended $name"
        fi
        rm -f "$STATE/$name.pid"
    done
}

[[ $(id -u) == 0 || ${1:-up} == conf ]] || fail "needs root, to install packages and to start Slurm's daemons"
case ${1:-up} in
    up) up ;;
    down) down ;;
    conf) conf ;;
    *) fail "usage: one-node-slurm.sh [up|down|conf]" ;;
esac
