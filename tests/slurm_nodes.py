"""A Slurm of several nodes on one machine: a slurmd on each host of a laboratory, the controller on the first.

It has a munged of its own, so that it neither needs nor disturbs the Slurm of ``make slurm-up``.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

ONE_NODE = Path(__file__).parent.parent / "examples" / "slurm" / "one-node-slurm.sh"
OWN = """
ClusterName=laboratory
FirstJobId={first_job}
SlurmctldHost=h1
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_seconds}
SchedulerParameters=sched_interval=1,batch_sched_delay=0
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName={nodes} CPUs=2 RealMemory=500 State=UNKNOWN
"""
"""What is another here than on one node. Each node says that it has two cores; all share this machine's."""
REQUEUE_SECONDS = 10
"""After which Slurm starts a requeued job again; 120 by default. ``scontrol update StartTime=now`` would not do: a node
counts a credential's age in whole seconds, and refuses a job that comes back in the second in which it was ended."""


def configuration(**values):
    """Of one node, with this cluster's own lines."""
    own = OWN.format(**values)
    names = {line.partition("=")[0] for line in own.splitlines()}
    one_node = subprocess.run(["bash", str(ONE_NODE), "conf"], capture_output=True, text=True, check=True).stdout
    shared = [line for line in one_node.splitlines() if line.partition("=")[0] not in names]
    return "\n".join([*shared, own])


class Cluster:
    """Slurm on a laboratory's hosts."""

    def __init__(self, lab):
        """
        Raises:
            TimeoutError: the nodes were not ready within 40 s; with the ends of Slurm's logs.
        """
        self.lab = lab
        self.folder = lab.folder / "slurm"
        self._daemons = []
        (self.folder / "state").mkdir(parents=True)
        for host in lab.hosts:  # nodes share this machine's folders, and PMIx makes some for each job
            (self.folder / f"tmp-{host}").mkdir()
        conf = self.folder / "slurm.conf"
        first_job = 10_000_000 + os.getpid()
        nodes = ",".join(lab.hosts)
        conf.write_text(
            configuration(folder=self.folder, nodes=nodes, first_job=first_job, requeue_seconds=REQUEUE_SECONDS)
        )
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(conf),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self.environment.pop("PYTHONUNBUFFERED", None)
        self._start_munged(self.folder / "munge")
        self._start(lab.hosts[0], "slurmctld", "-D")
        for host in lab.hosts:
            self._start(host, "slurmd", "-D")
        deadline = time.monotonic() + 40
        while not self.is_idle():
            if time.monotonic() > deadline:
                self.close()
                logs = "\n".join(log.read_text()[-1500:] for log in self.folder.glob("*.log"))
                raise TimeoutError(f"Slurm's nodes did not become ready within 40 s:\n{logs}")
            time.sleep(0.5)

    def close(self):
        """End the daemons; their jobs end with the laboratory."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def run(self, *command, cwd=None, check=True, timeout_seconds=60, **environment):
        """What a command prints that runs on the first host."""
        done = subprocess.run(
            self.lab.on(self.lab.hosts[0], command),
            env={**self.environment, **environment},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def is_idle(self):
        """Whether all nodes wait for jobs, with nothing of the last one left."""
        try:
            told = self.run("sinfo", "--noheader", "--format=%D %T", check=False, timeout_seconds=10)
        except subprocess.TimeoutExpired:
            return False
        return told.strip() == f"{len(self.lab.hosts)} idle"

    def _start_munged(self, folder):
        folder.mkdir()
        key = folder / "key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        self._start(self.lab.hosts[0], "munged", "--foreground", *options)

    def _start(self, host, *daemon):
        with (self.folder / f"{host}-{daemon[0]}.out").open("w") as log:
            how = {"env": self.environment, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._daemons.append(subprocess.Popen(self.lab.on(host, daemon), **how))


def missing():
    """What is not here that a cluster needs; empty: nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    wanted = ("slurmctld", "slurmd", "sbatch", "munged")
    return (
        ""
        if all(shutil.which(name, path=path) for name in wanted)
        else "Slurm is not installed: `make slurm-up` as root"
    )
