"""The laboratory: hosts, links and jobs are real."""

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvdplus.cli.lab import shares
from hvdplus.lab import Lab, LabError, bits_per_second, rootless, unavailable

COMMAND = [sys.executable, "-P", "-m", "hvdplus.cli", "lab"]

ECHO = """
import socket
server = socket.create_server(("", 7000))
print("here", flush=True)
while True:
    server.accept()[0].close()
"""
PING = """
import socket, sys, time
until = time.monotonic() + 3
while True:
    try:
        sys.exit(socket.create_connection((sys.argv[1], 7000), timeout=1).close())
    except OSError:
        if time.monotonic() > until:
            raise SystemExit(1)
"""
ALLREDUCE = """
import socket, sys
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
local = world.Split_type(MPI.COMM_TYPE_SHARED)
total = numpy.ones(int(sys.argv[1]) // 4, numpy.float32)
world.Allreduce(MPI.IN_PLACE, total)
assert (total == world.size).all()
print(f"{world.rank} of {world.size} on {socket.gethostname()}, {local.rank} of {local.size}")
"""

HOROVOD_ALLREDUCE = """
import socket, sys
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(int(sys.argv[1]) // 4), op=hvd.Sum)
assert (total == hvd.size()).all()
host = f"{socket.gethostname()}, {hvd.local_rank()} of {hvd.local_size()}"
print(f"{hvd.rank()} of {hvd.size()} on {host}")
hvd.shutdown()
"""

SEND = """
import sys
import time
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
data = numpy.ones(int(sys.argv[1]), numpy.uint8)
while True:
    time.sleep(0.05)  # the link has its burst again
    world.Barrier()
    began = time.perf_counter()
    world.Send(data, 1) if world.rank == 0 else world.Recv(data, 0)
    world.Barrier()
    if world.rank == 0:
        print("seconds", time.perf_counter() - began, flush=True)
"""

STALE = """
import os, signal, sys, time
import torch
import hvdplus.torch as hvd
hvd.init()
net = torch.nn.Linear(300, 200)
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
own = torch.optim.SGD(net.parameters(), 10.0)
named = net.named_parameters()
optimizer = hvd.DistributedOptimizer(own, named_parameters=named, compression="none", staleness="any")
before = net.weight.detach().square().mean().item()
for step in range(30):
    if sys.argv[1] == "killed" and hvd.rank() == 1 and step == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02 * hvd.rank())
    optimizer.zero_grad()
    net(torch.randn(16, 300)).square().mean().backward()
    optimizer.step()
if sys.argv[1] == "met":
    optimizer.average_now()
    assert hvd.identical(net)
print(f"{hvd.rank()} took {net.weight.detach().square().mean().item() / before:.3f}")
"""

SPIN = """
import time
while True:
    used, began = time.process_time(), time.monotonic()
    while time.monotonic() < began + 0.4:
        pass
    print((time.process_time() - used) / (time.monotonic() - began), flush=True)
"""

RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_tcp_flags": "9",
}


def python(program, *arguments):
    return ["python", "-P", "-c", program, *map(str, arguments)]


def traces(name):
    """What there is of a lab: namespaces, processes, control groups, its folder."""
    found = [str(path) for path in Path("/run/netns").glob(f"{name}*")]
    found += [str(path) for path in Path("/tmp").glob(f"{name}*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{name}*")]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if name in (process / "cmdline").read_text():
                found.append((process / "cmdline").read_text())
    return found


def running(name):
    """Programs on the hosts of a lab, or of all labs whose names begin so."""
    found = []
    for path in Path("/run/netns").glob(f"{name}*-h[0-9]"):
        pids = subprocess.run(["ip", "netns", "pids", path.name], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0])
    return found


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


@contextlib.contextmanager
def command(*arguments, **how):
    process = subprocess.Popen(
        # Tests that run in the background of a shell have inherited that SIGINT is ignored.
        ["/usr/bin/env", "--default-signal=INT,HUP", *COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **how,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("rate", "bits"), [("50mbit", 50e6), ("1gbit", 1e9), ("2.5gbit", 2.5e9), ("8kbit", 8e3), ("unshaped", float("inf"))]
)
def test_rates(rate, bits):
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "1g", "gbit", "1 gbit", "-1mbit", "0mbit"])
def test_other_rates_are_refused(rate):
    with pytest.raises(ValueError, match=f"Received: '{rate}'"):
        bits_per_second(rate)


@pytest.mark.alone
def test_links_have_their_rate(lab):
    lab = lab(hosts=3, rate="100mbit")
    lab.check()
    lab.shape("300mbit")  # a machine that is busy with something else carries that, too
    lab.check()
    lab.shape("50mbit", host="h2")
    lab.check()  # with a slow link between
    for sender, receiver in (("h1", "h2"), ("h2", "h3")):
        assert max(lab.measure(sender, receiver, 1_000_000, 5) for _ in range(3)) == pytest.approx(50e6, rel=0.1)
    assert lab.measure("h3", "h1", 10_000_000, 5) > 200e6
    lab.shape("unshaped")
    lab.check()
    assert lab.measure("h2", "h1", 50_000_000, 5) > 400e6


@pytest.mark.alone
def test_check_tells_a_link_that_is_not_what_it_should_be(lab):
    lab = lab(rate="100mbit")
    lab.rates["h1"] = lab.rates["h2"] = "200mbit"
    with pytest.raises(
        LabError, match=r"from h1 to h2.*Expected: 200mbit.*200\.0 Mbit/s.*received: .* in 6 tries"
    ) as found:
        lab.check(seconds=0.1)
    received = re.search(r"received: (.*) Mbit/s in", str(found.value))[1].split(", ")
    assert statistics.median(map(float, received)) == pytest.approx(100, rel=0.1)  # some tries fall into busy moments


@pytest.mark.alone
def test_a_rate_changes_while_a_job_runs(lab):
    lab = lab(rate="100mbit")

    seconds = {}
    with lab.start(python(SEND, 1_000_000), env=RING, timeout_seconds=60) as job:
        lines = iter(job)
        for rate in ("100mbit", "20mbit", "200mbit"):
            lab.shape(rate)
            for _ in range(3):  # what was under way, and what was printed before
                next(lines)
            seconds[rate] = min(float(next(lines).split()[1]) for _ in range(5))
    for rate, found in seconds.items():
        # A bucket, perhaps two, crosses for nothing.
        assert 0.85 <= found / (8e6 / bits_per_second(rate)) <= 1.3, seconds
    assert not running(lab.name)


@pytest.mark.alone
def test_small_messages_take_their_time_too(lab):
    """A bucket that has filled up in a pause lets none of 64 kB cross for nothing."""
    lab = lab(rate="20mbit")
    with lab.start(python(SEND, 65536), env=RING, timeout_seconds=60) as job:
        lines = iter(job)
        seconds = min(float(next(lines).split()[1]) for _ in range(5))
    assert seconds >= 0.6 * 8 * 65536 / 20e6


MOST_SENT_AGAIN = 1.15
"""Bytes on the wire for each of payload: what a full queue drops is sent again (seen: up to 1.07)."""


def test_a_cable_is_out_and_in_again(lab):
    lab = lab()
    ping = lab.on("h1", ["python3", "-c", PING, lab.address("h2")])
    with subprocess.Popen(lab.on("h2", ["python3", "-c", ECHO]), stdout=subprocess.PIPE, text=True) as echo:
        try:
            assert echo.stdout.readline() == "here\n"
            for connected in (True, False, True):
                lab.plug("h2", connected)
                assert (subprocess.run(ping).returncode == 0) == connected
        finally:
            echo.kill()
    with pytest.raises(ValueError, match="no such host"):
        lab.plug("h3", True)


@pytest.mark.alone
@pytest.mark.parametrize(("hosts", "ranks_per_host"), [(2, 1), (3, 1), (2, 2)])
def test_bytes_on_the_wire_are_a_rings_over_mpi(lab, hosts, ranks_per_host):
    """Only TCP joins hosts, and ranks of one host share memory: one of them has its neighbour on the next host."""
    lab = lab(hosts=hosts)
    size, ranks = 12_000_000, hosts * ranks_per_host
    before = lab.bytes_sent()
    result = lab.run(python(ALLREDUCE, size), ranks_per_host=ranks_per_host, env=RING, timeout_seconds=60)
    assert result.exit_code == 0, result.output
    where = [(rank, rank // ranks_per_host + 1, rank % ranks_per_host) for rank in range(ranks)]
    expected = [f"{rank} of {ranks} on h{host}, {local} of {ranks_per_host}" for rank, host, local in where]
    # Open MPI now and then adds a line of its own.
    assert sorted(line for line in result.output.splitlines() if " of " in line) == expected
    for host, count in result.bytes_sent.items():
        payload = 2 * (ranks - 1) / ranks * size
        assert 0.99 * payload <= count <= MOST_SENT_AGAIN * payload
        assert lab.bytes_sent()[host] - before[host] == pytest.approx(count, rel=0.01)


@pytest.mark.alone
def test_bytes_on_the_wire_are_a_rings_over_gloo(lab):
    lab = lab(rate="1gbit")
    result = lab.run(python(HOROVOD_ALLREDUCE, 12_000_000), launcher="gloo", timeout_seconds=120)
    assert result.exit_code == 0, result.output
    for rank in range(2):
        assert f"[{rank}]<stdout>:{rank} of 2 on h{rank + 1}, 0 of 1" in result.output
    for count in result.bytes_sent.values():
        assert 0.99 * 12_000_000 <= count <= MOST_SENT_AGAIN * 12_000_000


@pytest.mark.parametrize("end", ["met", "not met"])
def test_ranks_of_two_hosts_that_wait_for_nobody(lab, end):
    """They share a memory over the network, and the job ends, even if one rank is through long before the other."""
    result = lab().run(python(STALE, end), one_sided=True, env={"OMP_NUM_THREADS": "1"}, timeout_seconds=90)
    assert result.exit_code == 0, result.output
    shrunk = [float(line.split()[2]) for line in result.output.splitlines() if " took " in line]
    assert len(shrunk) == 2 and max(shrunk) < 0.99
    assert min(result.bytes_sent.values()) > 30 * 4 * 300 * 200 / 4


def test_a_killed_rank_ends_a_job_that_waits_for_nobody(lab):
    lab = lab()
    result = lab.run(python(STALE, "killed"), one_sided=True, env={"OMP_NUM_THREADS": "1"}, timeout_seconds=90)
    assert result.exit_code != 0
    assert not running(lab.name)


def test_a_torchrun_on_every_host(lab, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        "import hvdplus.torch as hvd, torch\n"
        "hvd.init()\n"
        "print('sum', hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), 'on host rank', hvd.local_rank())\n"
    )
    result = lab(hosts=2).run(["python", str(script)], launcher="torch", ranks_per_host=2, timeout_seconds=60)
    assert result.exit_code == 0, result.output
    assert "4 ranks on 2 hosts" in result.output and "transport torch-gloo" in result.output, result.output
    assert result.output.count("sum 4.0 on host rank 0") == result.output.count("sum 4.0 on host rank 1") == 2


def test_a_failing_command_gives_its_exit_code(lab):
    assert lab().run(python("import sys; print('hello'); sys.exit(7)"), timeout_seconds=30)[0] == 7


def test_one_job_at_a_time(lab):
    lab = lab()
    with lab.start(["sleep", "600"]) as job:
        with pytest.raises(LabError, match="still running"):
            lab.start(["true"])
        job.stop()
        assert lab.run(["true"]).exit_code == 0
        with pytest.raises(ValueError, match="launcher='slurm'"):
            lab.start(["true"], launcher="slurm")


@pytest.mark.alone
def test_a_job_that_takes_too_long_is_ended_with_all_its_processes(lab):
    lab = lab()
    stubborn = "trap '' TERM; echo started on $(hostname); setsid sleep 600 & sleep 600; sleep 600"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not end in 3 s. It printed:\n(.*\n)*started on h2"):
        lab.run(["bash", "-c", stubborn], timeout_seconds=3)
    assert time.monotonic() - began < 10
    assert not running(lab.name)
    with lab.start(["bash", "-c", stubborn], timeout_seconds=3) as job, pytest.raises(TimeoutError):
        list(job)
    assert not running(lab.name)


def test_what_outlives_its_launcher_is_ended(lab):
    lab = lab()
    assert lab.run(["bash", "-c", "setsid sleep 600 > /dev/null 2>&1 &"], timeout_seconds=30).exit_code == 0
    assert not running(lab.name)


def test_hosts_stay_on_their_cores(lab):
    lab = lab(cores={"h2": "0"})
    program = python("import os, socket; print(f'{socket.gethostname()} {sorted(os.sched_getaffinity(0))}')")
    result = lab.run(program, timeout_seconds=30)
    assert sorted(result.output.splitlines()) == [f"h1 {sorted(os.sched_getaffinity(0))}", "h2 [0]"]


@pytest.mark.alone
def test_a_slow_host_gets_a_share_of_its_core(lab):
    lab = lab(cores={"h1": "0", "h2": "0"})
    spin = [
        subprocess.Popen(lab.on(h, [sys.executable, "-c", SPIN]), stdout=subprocess.PIPE, text=True) for h in lab.hosts
    ]

    def core_shares():
        return [max(float(process.stdout.readline()) for _ in range(2)) for process in spin]

    try:
        core_shares()
        assert min(core_shares()) > 0.06
        with lab.slow("h1", share=0.1):  # of the half that is due to it
            core_shares()
            slow, other = core_shares()
            assert 0.03 < slow < 0.06 < other
        core_shares()
        assert min(core_shares()) > 0.06
        with pytest.raises(ValueError, match="share=2"), lab.slow("h1", share=2):
            pass
    except LabError as error:
        pytest.skip(str(error))
    finally:
        for process in spin:
            process.kill()
            process.communicate()


@pytest.mark.alone
def test_labs_do_not_meet(lab):
    first, second = lab(rate="100mbit"), lab(rate="200mbit")
    first.check(seconds=0.1)
    second.check(seconds=0.1)
    assert first.bytes_sent()["h1"] < 0.7 * second.bytes_sent()["h1"]


def test_nothing_is_left_behind(lab):
    with Lab() as inside:
        inside.run(["true"])
        assert len(traces(inside.name)) >= 4
    assert not traces(inside.name)
    with pytest.raises(ZeroDivisionError), Lab() as inside:
        inside.start(["sleep", "600"])
        _ = 1 / 0
    assert not traces(inside.name)


def test_a_lab_that_fails_half_way_leaves_nothing(lab):
    inside = Lab()
    in_the_way = f"{inside.name}-h2"
    subprocess.run(["ip", "netns", "add", in_the_way], check=True)
    with pytest.raises(LabError, match="refused.*exists"), inside:
        pass
    assert not traces(inside.name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_removes_the_lab(lab, number):
    with command("--rate", "100mbit", "--", "sleep", "600") as process:
        name = f"hvdlab-{process.pid}-"
        wait_for(lambda: running(name).count("sleep") == 2)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert not traces(name)


@pytest.mark.alone  # any new laboratory is the next
def test_the_next_lab_removes_one_that_was_killed(lab):
    with command("--rate", "100mbit", "--", "sleep", "600") as process:
        name = f"hvdlab-{process.pid}-"
        wait_for(lambda: running(name).count("sleep") == 2)
        process.kill()
    wait_for(lambda: not running(name))  # the job notices
    assert traces(name)
    lab()
    assert not traces(name)


@pytest.mark.alone
def test_command(lab):
    with command(
        "--hosts", "3", "--rate", "300mbit", "--check", "--", "python", "-P", "-c", ALLREDUCE, "3000000"
    ) as process:
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    for number in range(3):
        assert f"{number} of 3 on h{number + 1}" in output
        assert re.search(rf"^h{number + 1} sent [1-9]\.\d\d MB$", output, re.MULTILINE)
    assert re.search(r"^h3 to h1: (2[789]|3[012])\d\.\d Mbit/s$", output, re.MULTILINE), output
    with command("--", "false") as process:
        assert "h1 sent" in process.communicate(timeout=60)[0]
    assert process.returncode == 1
    with command("--timeout-seconds", "1", "--", "sleep", "600") as process:
        assert "did not end in 1 s" in process.communicate(timeout=60)[0]
    assert process.returncode == 124


def test_command_without_what_it_needs():
    with command("--", "true", env={"PATH": "/nonexistent"}) as process:
        output = process.communicate(timeout=20)[0]
    assert process.returncode == 2
    assert output.startswith("hvdplus lab: The lab ") and output.count("\n") == 1
    if os.geteuid() == 0 and not unavailable():
        nobody = ["unshare", "--user", *COMMAND, "--", "true"]
        refused = {**os.environ, "HVDPLUS_LAB_INSIDE": "1"}  # as if there were no namespaces for users
        done = subprocess.run(nobody, capture_output=True, text=True, env=refused)
        assert done.returncode == 2
        assert done.stderr == "hvdplus lab: The lab sets up network namespaces, which needs root.\n"


def as_nobody(*command, **how):
    """Run as a user without rights, who owns nothing but a folder in /tmp."""
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]
    return subprocess.run([*drop, *command], capture_output=True, text=True, timeout=120, **how)


@pytest.mark.lab
def test_a_user_without_rights_has_labs_where_the_kernel_allows():
    if os.geteuid() != 0 or unavailable():
        pytest.skip("this test gives up root's rights, and has none")
    if as_nobody(*rootless.ENTER, "true").returncode:
        pytest.skip("this kernel lets only root make networks")
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    home.chmod(0o777)
    try:
        environment = {**os.environ, "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        script = home / "allreduce.py"
        script.write_text(ALLREDUCE)
        if as_nobody(*rootless.ENTER, sys.executable, "-c", "import hvdplus", env=environment).returncode:
            pytest.skip("this Python is out of reach for others")
        done = as_nobody(*COMMAND, "--rate", "200mbit", "--", "python", str(script), "400000", env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 of 2 on h1, 0 of 1" in done.stdout and "1 of 2 on h2, 0 of 1" in done.stdout
        assert re.search(r"^h1 sent 0\.[4-9]\d MB$", done.stdout, re.MULTILINE)
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize(("given", "found"), [((), {}), (("h2=0.5", "h1=0.25"), {"h2": 0.5, "h1": 0.25})])
def test_shares_of_slow_hosts(given, found):
    assert shares(given) == found


def test_a_share_that_is_none_is_named():
    with pytest.raises(ValueError, match="--slow wants a host and .* Received: h2"):
        shares(["h2"])
