"""Several hosts on one machine: network namespaces on a switch, joined by links of a given rate.

    with Lab(hosts=2, rate="1gbit") as lab:
        lab.check()                                            # bytes over rate come out right, or LabError
        with lab.start(["python", "train.py"], timeout_seconds=600) as job:
            for line in job:                                   # as the ranks print
                if "step 100" in line:
                    lab.shape("100mbit")                       # while the job runs
            result = job.wait()                                # exit code, output, bytes each host sent

Every host is a network namespace with a host name (h1, h2, …), an address and a /dev/shm of its own, and one link to
the switch, a bridge in one more namespace. Both ends of a link are shaped by a token bucket (``tc tbf``), so the rate
holds in each direction. There is bandwidth but no latency: what a message costs apart from its bytes is what it costs
on this machine. All hosts share its processor cores, unless ``cores`` pins them.

Needs Linux, root (or ``hvdplus.lab.rootless``), and ``ip`` and ``tc`` (Debian: iproute2). Nothing is left behind: a lab
that is killed outright is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from hvdplus.lab.jobs import Job, Result
from hvdplus.lab.launch import LAUNCHERS, launch
from hvdplus.lab.links import UNSHAPED, LabError, bits_per_second, check, shape_of, stream

PREFIX = "hvdlab"
NAME = re.compile(rf"{PREFIX}-(?P<pid>\d+)-(?P<born>\d+)-\d+")
"""Of a lab: what its namespaces and its folder begin with. It says which process owns them."""
FOLDER = Path("/tmp")
"""Not TMPDIR: the next lab has to find it, and Open MPI's sockets in it want a short path."""
CLONE_NEWNET = 0x40000000

# What runs a command on a host, in place of ssh: for `mpirun`, for `horovodrun` and for us.
SSH = """#!/bin/sh
# ssh [options] HOST [options] COMMAND...
host=
while :; do
    case $1 in
    -[opil]) shift 2 ;;
    -*) shift ;;
    *) if [ -z "$host" ]; then host=$1; shift; else break; fi ;;
    esac
done
{join}
exec nsenter --net="/run/netns/{name}-$host" unshare --uts --mount sh -c '
    mount --bind {folder}/hosts /etc/hosts && mount -t tmpfs shm /dev/shm && hostname "$0" || exit 125
    exec taskset -c "$(cat {folder}/cores/"$0")" bash -c "$*"
' "$host" "$@"
"""


def unavailable() -> str | None:
    """Why there can be no lab here, in one sentence; None if there can."""
    if os.geteuid() != 0:
        return "The lab sets up network namespaces, which needs root."
    for tools, package in ((("ip", "tc"), "iproute2"), (("unshare", "nsenter", "setpriv", "taskset"), "util-linux")):
        missing = [tool for tool in tools if not shutil.which(tool)]
        if missing:
            return f"The lab needs {' and '.join(missing)}: apt-get install {package}."
    # Everything the lab asks of the kernel, in a namespace that is gone with the shell.
    probe = (
        "ip link add one type veth peer name two && ip link add three type bridge && mount -t tmpfs probe /dev/shm"
        " && tc qdisc add dev one root tbf rate 1mbit burst 64kb limit 1mb"
    )
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", probe], capture_output=True, text=True)
    if tried.returncode:
        return f"The lab is not permitted or not supported by this kernel: {tried.stderr.strip()}"
    return None


def own_cores() -> list[int]:
    """The processor cores that this process may use; in a container, those that it was given."""
    return sorted(os.sched_getaffinity(0))


def a_core_each(hosts: int) -> dict[str, str]:
    """``cores`` of a `Lab` whose hosts are on different cores, as far as there are enough."""
    cores = own_cores()
    return {f"h{i + 1}": str(cores[i % len(cores)]) for i in range(hosts)}


class Lab:
    """Hosts, links and a switch, for as long as the ``with`` lasts.

    Args:
        hosts: how many; they are called h1, h2, …
        rate: of every link in each direction: ``50mbit``, ``1gbit``, …, or ``unshaped``.
        cores: host to processor cores, as ``taskset`` writes them: ``{"h1": "0", "h2": "1"}``. Others run anywhere.

    Raises:
        LabError: it cannot be set up here; the message says why.
    """

    _count = itertools.count()

    def __init__(self, hosts: int = 2, rate: str = UNSHAPED, cores: Mapping[str, str] | None = None):
        if not 1 <= hosts <= 250:
            raise ValueError(f"A lab has between 1 and 250 hosts. Received: hosts={hosts}")
        self.hosts = tuple(f"h{number}" for number in range(1, hosts + 1))
        """Their names."""
        unknown = set(cores or {}) - set(self.hosts)
        if unknown:
            raise ValueError(f"cores= names hosts that are not there. Received: {sorted(unknown)}")
        self.rates = dict.fromkeys(self.hosts, rate)
        """Of each host's link, as it is now."""
        bits_per_second(rate)
        everywhere = ",".join(map(str, own_cores()))
        self._cores = {host: (cores or {}).get(host) or everywhere for host in self.hosts}
        self._groups: Path | None = None
        self._job: Job | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self.name = f"{PREFIX}-{os.getpid()}-{_born(os.getpid())}-{next(Lab._count)}"
        self.folder = FOLDER / self.name
        """A benchmark may keep files here; it is removed in the end."""

    def __enter__(self) -> Lab:
        why = unavailable()
        if why:
            raise LabError(why)
        _remove_leftovers()
        try:
            self._end_in_order_on_signals()
            self._set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and remove everything. Safe to repeat."""
        for number in self._handlers:  # a second one would leave half of it behind
            signal.signal(number, signal.SIG_IGN)
        try:
            if self._job:
                self._job.stop()
        finally:
            _remove(self.name)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def shape(self, rate: str, host: str | None = None) -> None:
        """Give all links, or one host's link, another rate in both directions; also while a job runs."""
        changed = self.hosts if host is None else (self._known(host),)
        shape = shape_of(rate)
        self.burst_seconds = shape.rest_seconds
        """That a link has to rest to have its burst again; of the links that were shaped last."""
        verb = "delete" if rate == UNSHAPED else "replace"
        for name in changed:
            # Connections keep the size of a segment until they look up their route again.
            _tool(
                ["ip", "-n", self._namespace(name)],
                f"link set eth0 gso_max_size {shape.segment_bytes}",
                "route flush cache",
            )
            for namespace, device in ((self._namespace(name), "eth0"), (self._namespace("switch"), name)):
                if (self.rates[name], rate) != (UNSHAPED, UNSHAPED):
                    _tool(["tc", "-n", namespace], f"qdisc {verb} dev {device} root {shape.queue}")
            self.rates[name] = rate

    def plug(self, host: str, connected: bool) -> None:
        """Plug a host's cable in, or out: nothing crosses its link then, and nobody is told."""
        state = "up" if connected else "down"
        _tool(["ip", "-n", self._namespace("switch")], f"link set {self._known(host)} {state}")

    def check(self, seconds: float = 0.3) -> dict[tuple[str, str], float]:
        """See that bytes over rate come out right; what was measured, see ``links.check``."""
        return check(self, seconds)

    def measure(self, sender: str, receiver: str, payload_bytes: int, timeout_seconds: float) -> float:
        """Rate of one TCP stream in bits per second on the wire, headers included, once it is under way."""
        with self._socket(receiver) as server, self._socket(sender) as source:
            server.bind((self.address(receiver), 0))
            return stream(source, server, payload_bytes, timeout_seconds)

    def bytes_sent(self) -> dict[str, int]:
        """Bytes each host has put on its link since the lab began, with one header a segment (not a packet)."""
        counts = {}
        for host in self.hosts:
            link = subprocess.run(
                ["ip", "-n", self._namespace(host), "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True
            )
            counts[host] = int(json.loads(link.stdout)[0]["stats64"]["tx"]["bytes"])
        return counts

    def address(self, host: str) -> str:
        """A host's IP address; its name resolves to it on every host."""
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """Command line that runs a command on a host, for `subprocess`. What still runs in the end is ended."""
        return [str(self.folder / "bin" / "ssh"), host, shlex.join(map(str, command))]

    def start(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        launcher: str = "mpi",
        one_sided: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_seconds: float = 600.0,
    ) -> Job:
        """Start a command on all hosts, one job at a time. The job ends with the thread that started it.

        Args:
            command: what each rank runs. ``python`` is the one that runs the lab.
            launcher: ``mpi`` for mpirun, ``gloo`` for horovodrun, which puts the rank before every line, ``torch`` for
                a torchrun on every host.
            one_sided: with mpirun: over UCX, whose one-sided operations work between hosts.
            env: variables for all ranks, on top of this process's own.
            timeout_seconds: from the start; then `Job` ends every process and raises TimeoutError.
        """
        if launcher not in LAUNCHERS:
            raise ValueError(f"launcher is mpi, gloo or torch. Received: launcher={launcher!r}")
        if self._job and self._job.process.poll() is None:
            raise LabError("One job at a time: the one before is still running.")
        launched, variables = launch(command, self.hosts, ranks_per_host, launcher, one_sided, self.folder)
        # A job has a process namespace: everything in it ends when the launcher does, when `unshare` is killed, and
        # when this process is.
        contain = "setpriv --pdeathsig KILL unshare --pid --fork --kill-child --mount-proc"
        command = [*contain.split(), *self.on(self.hosts[0], launched)]
        self._job = Job(self, command, timeout_seconds, env=variables | dict(env or {}), cwd=cwd)
        return self._job

    def run(self, command: Sequence[str], **how: Any) -> Result:
        """Run a command on all hosts to its end; arguments and errors as `start` and `Job.wait` have them."""
        with self.start(command, **how) as job:
            return job.wait()

    @contextlib.contextmanager
    def slow(self, host: str, share: float = 0.5) -> Iterator[None]:
        """Give a host's processes, running or yet to come, only a share of the processor time due to it.

        Due to it is every core it may use, divided by the number of hosts that may: pinned to a core of its own, a host
        then computes about as if that core ran at ``share`` of its speed, in slices of 2 ms: longer ones would stop
        its sums, too, as no slow processor does.

        Raises:
            LabError: there are no control groups for processor time here.
        """
        self._known(host)
        if not 0 < share < 1:
            raise ValueError(f"share is between 0 and 1. Received: share={share}")
        if self._groups is None:
            raise LabError("A host is slowed by the cpu control group, which this process cannot use.")
        mine = _numbers(self._cores[host])
        due = sum(1 / sum(core in _numbers(cores) for cores in self._cores.values()) for core in mine)
        group = self._groups / self._namespace(host)
        _limit(group, share * due)
        try:
            yield
        finally:
            _limit(group, None)

    def _known(self, host: str) -> str:
        """The host. Raises ValueError: there is none of this name."""
        if host not in self.hosts:
            raise ValueError(f"There is no such host. Received: host={host!r}; there are {', '.join(self.hosts)}")
        return host

    def _namespace(self, host: str) -> str:
        return f"{self.name}-{host}"

    def _set_up(self) -> None:
        for folder in ("bin", "cores"):
            (self.folder / folder).mkdir(parents=True)
        self._groups, join = _control_groups(), ""
        if self._groups:
            try:
                for host in self.hosts:
                    (self._groups / self._namespace(host)).mkdir()
                join = f'echo $$ > "{self._groups}/{self.name}-$host/cgroup.procs" || exit 125'
            except OSError:  # mounted read-only, as in many containers
                self._groups = None
        ssh = self.folder / "bin" / "ssh"
        ssh.write_text(SSH.format(name=self.name, folder=self.folder, join=join))
        ssh.chmod(0o755)
        names = "".join(f"{self.address(host)} {host}\n" for host in self.hosts)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        switch = self._namespace("switch")
        _tool(["ip"], f"netns add {switch}", *(f"netns add {self._namespace(host)}" for host in self.hosts))
        _tool(["ip", "-n", switch], "link add switch type bridge", "link set switch up")
        for host in self.hosts:
            (self.folder / "cores" / host).write_text(self._cores[host])
            namespace = self._namespace(host)
            _tool(["ip"], f"link add eth0 netns {namespace} type veth peer name {host} netns {switch}")
            _tool(["ip", "-n", switch], f"link set {host} master switch up")
            _tool(
                ["ip", "-n", namespace],
                "link set lo up",
                f"addr add {self.address(host)}/24 dev eth0",
                "link set eth0 up",
            )
        rates, self.rates = self.rates, dict.fromkeys(self.hosts, UNSHAPED)
        for host in self.hosts:
            self.shape(rates[host], host)

    def _socket(self, host: str) -> socket.socket:
        """A socket on a host: it stays where it was made, so a thread goes there for a moment."""

        def make() -> socket.socket:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path("/run/netns", self._namespace(host)).open() as namespace:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return socket.socket()

        with ThreadPoolExecutor(1) as visitor:
            return visitor.submit(make).result()

    def _end_in_order_on_signals(self) -> None:
        """Being told to end is like Ctrl-C: everything unwinds, the lab is removed."""

        def interrupt(number: int, _: FrameType | None) -> None:
            raise KeyboardInterrupt(number)

        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, interrupt)


def _tool(tool: Sequence[str], *commands: str) -> None:
    """Give `ip` or `tc` some commands at once."""
    done = subprocess.run([*tool, "-batch", "-"], input="\n".join(commands) + "\n", capture_output=True, text=True)
    if done.returncode:
        raise LabError(f"{shlex.join(tool)} refused: {done.stderr.strip()}; it was told: {'; '.join(commands)}")


def _born(pid: int) -> int | None:
    """When a process began, in clock ticks; None if there is none. With the number it names a process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _limit(group: Path, cores: float | None) -> None:
    """What the processes of a control group may use of the processor; None: all."""
    period_us, quota_us = 2_000, None
    if cores is not None:
        period_us = max(period_us, round(1000 / cores))  # the least quota is 1 ms
        quota_us = round(cores * period_us)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us or 'max'} {period_us}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us or -1))


def _numbers(listed: str) -> set[int]:
    """``0,2-3`` as numbers."""
    spans = [span.split("-") for span in listed.split(",")]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}


def _control_groups() -> Path | None:
    """Where groups with a limit on processor time are made: version 1's cpu hierarchy, or version 2 if cpu is on."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (first / "cgroup.procs").exists():
        return first
    enabled = second / "cgroup.subtree_control"
    return second if enabled.exists() and "cpu" in enabled.read_text().split() else None


def _remove(lab: str) -> None:
    """End what runs in a lab, of this process or of one that is no more, and remove it."""
    deadline = time.monotonic() + 10
    groups = _control_groups()
    while True:
        namespaces = [path.name for path in Path("/run/netns").glob(f"{lab}-*")]
        for name in namespaces:
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not listed.stdout:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        left = list(groups.glob(f"{lab}-*")) if groups else []
        for group in left:
            with contextlib.suppress(OSError):  # its processes are about to end
                group.rmdir()
        if not (namespaces or left) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    shutil.rmtree(FOLDER / lab, ignore_errors=True)


def _remove_leftovers() -> None:
    """Remove labs whose process is no more."""
    for path in [*Path("/run/netns").glob(f"{PREFIX}-*"), *FOLDER.glob(f"{PREFIX}-*")]:
        match = NAME.match(path.name)
        if match and path.exists() and _born(int(match["pid"])) != int(match["born"]):
            _remove(match[0])
