"""A Slurm of several nodes on one machine: a slurmd on each host of a laboratory, the controller on the first."""

import os
import shutil
import subprocess
import time

CONF = """
ClusterName=laboratory
FirstJobId={first_job}
SlurmctldHost=h1
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
JobRequeue=1
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName={nodes} CPUs={cores} RealMemory=500 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class Cluster:
    """Slurm on a laboratory's hosts."""

    def __init__(self, lab, cores=2):
        """
        Args:
            cores: that each node says it has. All nodes share this machine's.

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
        conf.write_text(
            CONF.format(folder=self.folder, nodes=",".join(lab.hosts), cores=cores, first_job=10_000_000 + os.getpid())
        )
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(conf),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        self.environment.pop("PYTHONUNBUFFERED", None)
        self._start(lab.hosts[0], "slurmctld")
        for host in lab.hosts:
            self._start(host, "slurmd")
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

    def state(self, job):
        """What Slurm says of a job: ``COMPLETED``, ``RUNNING``, ..."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def end_of(self, job, timeout_seconds):
        """The state in which a job ended.

        Raises:
            TimeoutError: it did not within the time; it is cancelled then.
        """
        deadline = time.monotonic() + timeout_seconds
        while (state := self.state(job)) not in ENDS:
            if time.monotonic() > deadline:
                self.run("scancel", job)
                raise TimeoutError(f"job {job} was still {state} after {timeout_seconds} s")
            time.sleep(0.5)
        return state

    def is_idle(self):
        """Whether all nodes wait for jobs, with nothing of the last one left."""
        try:
            told = self.run("sinfo", "--noheader", "--format=%D %T", check=False, timeout_seconds=10)
        except subprocess.TimeoutExpired:
            return False
        return told.strip() == f"{len(self.lab.hosts)} idle"

    def _start(self, host, daemon):
        with (self.folder / f"{host}-{daemon}.out").open("w") as log:
            how = {"env": self.environment, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._daemons.append(subprocess.Popen(self.lab.on(host, [daemon, "-D"]), **how))


def missing():
    """What is not here that a cluster needs; empty: nothing."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if not all(shutil.which(name, path=path) for name in ("slurmctld", "slurmd", "sbatch")):
        return "Slurm is not installed: `make slurm-up` as root"
    if subprocess.run(["munge", "-n"], capture_output=True).returncode:
        return "munged does not run: `make slurm-up` as root"
    return ""
