"""``hvdplus doctor``: versions, settings, and commands that install what is missing.

Versions come from the packages' metadata. Questions to a framework or MPI run in a child process, so that a broken
installation is a line of the table and no traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hvdplus.adapters.numpy import NumpyOps
from hvdplus.adapters.transports.local import Local
from hvdplus.agree import AUTO, choose_ladder, choose_rhythm, settings_of_exchanges
from hvdplus.cli.horovod.frameworks import TENSORFLOW_NAMES, find_frameworks, package_version
from hvdplus.cli.horovod.stack import default_jobs, find_mpi
from hvdplus.cli.horovod.tools import environment, which
from hvdplus.cli.text import reason
from hvdplus.log.words import printable
from hvdplus.settings import CONFIG, Settings, describe, unknown
from hvdplus.transport import World

ROW = tuple[str, str]
PROBE_SECONDS = 120.0  # importing a framework from a cold network disk

_BUILT = "{k: bool(getattr(hvd, k + '_built')()) for k in ('mpi', 'gloo', 'nccl')}"
# Questions that only a framework or MPI can answer; each program prints one line of JSON.
PROBES = {
    "torch": f"""
import json, torch
seen = dict(imported=True, distributed=torch.distributed.is_available())
seen.update(capability=torch.backends.cpu.get_cpu_capability())
try:
    import horovod.torch as hvd
    seen.update({_BUILT})
except Exception as error:
    seen["error"] = f"{{type(error).__name__}}: {{error}}"
print("\\nseen " + json.dumps(seen))
""",
    "tensorflow": f"""
import json, tensorflow
seen = dict(imported=True)
try:
    import horovod.tensorflow as hvd
    seen.update({_BUILT})
except Exception as error:
    seen["error"] = f"{{type(error).__name__}}: {{error}}"
print("\\nseen " + json.dumps(seen))
""",
    "mpi4py": """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
told = MPI.Get_library_version().strip("\\0").splitlines()[0].split(",")[0]
print("\\nseen " + json.dumps(dict(library=" ".join(told.split()))))
""",
}


class Finding(NamedTuple):
    """Something missing or broken, the command that mends it, and whether it is optional."""

    what: str
    command: str
    optional: bool = False


def probe(name: str) -> dict[str, Any]:
    """Run one of `PROBES` in a child process and return its answer, or ``{"error": last line of its output}``."""
    env = {**environment(), "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", PROBES[name]]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_SECONDS:.0f} s"}
    if seen := re.search(r"^seen (\{.*\})$", done.stdout, re.MULTILINE):
        return dict(json.loads(seen[1]))
    lines = (done.stderr or done.stdout).strip().splitlines()
    return {"error": lines[-1] if lines else f"ended with code {done.returncode}"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdplus doctor``, which has none."""


def run(args: argparse.Namespace) -> int:
    """Print the table. Return 0 if training on several ranks works here and the settings are right, else 1."""
    frameworks = [framework.module for framework in find_frameworks()]
    names = [*frameworks, *(["mpi4py"] if package_version("mpi4py") else [])]
    with ThreadPoolExecutor() as pool:
        seen = dict(zip(names, pool.map(probe, names), strict=True))

    _section("Versions", _versions())
    _section("Horovod", _horovod(frameworks, seen))
    _section("MPI", _mpi(seen))
    _section("Machine", _machine(seen.get("torch", {})))
    settings, sound = _settings()
    _section("Settings", settings)

    ways = _ways(frameworks, seen)
    findings = list(_findings(frameworks, seen))
    _section("Missing", [(_optional(found), found.command) for found in findings] or [("nothing", "")])
    if not sound:
        end = "A setting is wrong: see Settings. (Compressors that only a script registers are unknown here.)"
    elif ways:
        end = f"Training on several ranks works through: {', '.join(ways)}."
    else:
        end = "Nothing here can train on several ranks yet: see what is missing."
    print(f"\n{end}")
    return 0 if ways and sound else 1


def _section(title: str, rows: Iterator[ROW] | list[ROW]) -> None:
    print(f"\n{title}")
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {printable(value)}".rstrip())


def _optional(finding: Finding) -> str:
    return finding.what + (" (optional)" if finding.optional else "")


def _versions() -> Iterator[ROW]:
    for name, packages in {
        "hvdplus": ("hvdplus",),
        "numpy": ("numpy",),
        "torch": ("torch",),
        "tensorflow": TENSORFLOW_NAMES,
        "keras": ("keras",),
        "mpi4py": ("mpi4py",),
        "horovod": ("horovod",),
    }.items():
        known = package_version(*packages)
        yield name, "not installed" if known is None else known[1] + (f" ({known[0]})" if known[0] != name else "")
    yield "python", f"{platform.python_version()} ({sys.executable})"


def _horovod(frameworks: list[str], seen: dict[str, dict[str, Any]]) -> Iterator[ROW]:
    for framework in frameworks:
        answer = seen[framework]
        if not answer.get("imported"):
            yield framework, f"cannot be imported itself: {answer['error']}"
        elif package_version("horovod") is None:
            yield framework, "not installed"
        elif "error" in answer:
            yield framework, f"does not work: {answer['error']}"
        else:
            names = {"mpi": "MPI", "gloo": "Gloo", "nccl": "NCCL"}
            yield framework, "built with " + ", ".join(name for key, name in names.items() if answer[key])
    if not frameworks:
        yield "frameworks", "neither PyTorch nor TensorFlow is here"


def _mpi(seen: dict[str, dict[str, Any]]) -> Iterator[ROW]:
    from hvdplus.adapters.transports import openmpi

    mpi, mpirun = find_mpi(), which("mpirun", "mpiexec")
    yield "launcher", f"{mpi.version if mpi else 'found'} ({mpirun})" if mpirun else "no mpirun found"
    yield "compiler wrapper", mpi.wrapper if mpi else "none (mpicxx; only needed to build Horovod)"
    if "mpi4py" in seen:
        yield "mpi4py uses", seen["mpi4py"].get("library") or f"does not work: {seen['mpi4py']['error']}"
    if mpi and not mpi.version.startswith("Open MPI"):  # only that reads these settings
        yield "all-reduce", "MPI's choice"
        return
    settings = openmpi.apply_settings(environment())
    origins = {setting.name: setting.origin for setting in settings}
    yield "all-reduce", f"{openmpi.allreduce_algorithm(settings)} (set by: {origins[openmpi.ALLREDUCE_ALGORITHM]})"
    for setting in settings:
        yield setting.name, f"{setting.value or 'left to Open MPI'} (set by: {setting.origin})"


def _machine(torch: dict[str, Any]) -> Iterator[ROW]:
    def first(path: str, pattern: str) -> str:
        try:
            found = re.search(pattern, Path(path).read_text())
        except OSError:
            found = None
        return found[1] if found else ""

    yield "system", f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield "processor", first("/proc/cpuinfo", r"model name\s*:\s*(.*)") or platform.processor() or "unknown"
    yield "CPU capability", torch.get("capability", "unknown (PyTorch tells)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "cores", f"{cores} usable of {os.cpu_count()}"
    memory = first("/proc/meminfo", r"MemTotal:\s+(\d+) kB")
    yield "memory", f"{int(memory) / 2**20:.0f} GiB" if memory else "unknown"
    job = os.environ.get("SLURM_JOB_ID")
    yield "Slurm", (which("sbatch") or "not found") + (f", inside job {job}" if job else "")


def _settings() -> tuple[list[ROW], bool]:
    """The settings' rows, and whether jobs can start with them."""
    path = os.environ.get(CONFIG, "")
    rows = [(CONFIG, f"{path or '-'} ({'environment' if path else 'default'}): YAML file with settings")]
    try:
        loaded = Settings.load()
        wrong = list(_wrong_levels(loaded))
        rows += [(s.name, f"{s.value or '-'} ({s.origin}): {s.help}") for s in describe(loaded)]
    except ValueError as error:
        wrong = [str(error)]
    for name, near in unknown(os.environ):
        hint = f"; did you mean {near}?" if near else ""
        rows.append((name, f"is in the environment, but is no setting of hvdplus{hint}"))
    return rows + [("wrong", message) for message in wrong], not wrong


def _wrong_levels(loaded: Settings) -> Iterator[str]:
    """Errors in the levels of the settings. The ladder is checked even if a fixed level leaves it unused."""
    alone = World(Local(), hosts={}, collective="none", cross_rank=0, differences=())
    for compression in dict.fromkeys((loaded.compression, AUTO)):
        try:
            asked = replace(loaded, compression=compression)
            level = choose_rhythm(AUTO, None, asked).compression
            own = settings_of_exchanges({}, asked).get("compression", compression)
            choose_ladder(level, replace(loaded, compression=own), alone, NumpyOps())
        except Exception as error:  # another package's compressor may fail as it likes
            yield reason(error)


def _ways(frameworks: list[str], seen: dict[str, dict[str, Any]]) -> list[str]:
    """Return the ways to train on several ranks that work here."""
    ways = [f"Horovod ({framework})" for framework in frameworks if "error" not in seen[framework]]
    distributed = ["torch.distributed (torchrun)"] if seen.get("torch", {}).get("distributed") else []
    return [*ways, *(["mpi4py"] if _imported(frameworks, seen) and _mpi4py_works(seen) else []), *distributed]


def _imported(frameworks: list[str], seen: dict[str, dict[str, Any]]) -> list[str]:
    """Those of the frameworks that can be imported."""
    return [framework for framework in frameworks if seen[framework].get("imported")]


def _mpi4py_works(seen: dict[str, dict[str, Any]]) -> bool:
    return "library" in seen.get("mpi4py", {}) and bool(which("mpirun", "mpiexec"))


def _findings(frameworks: list[str], seen: dict[str, dict[str, Any]]) -> Iterator[Finding]:
    sound = _imported(frameworks, seen)
    for module, name, extra in (("torch", "PyTorch", "torch"), ("tensorflow", "TensorFlow with Keras", "keras")):
        if module not in frameworks:
            yield Finding(name, f"pip install 'hvdplus[{extra}]'", optional=bool(frameworks))
        elif module not in sound:
            again = f"python -c 'import {module}'    (says why; then: pip install --force-reinstall 'hvdplus[{extra}]')"
            yield Finding(f"{name} that can be imported", again, optional=bool(sound))
    if sound and package_version("horovod") is None:
        command = f"hvdplus install-horovod    (minutes; {default_jobs()} compiler jobs at a time)"
        yield Finding("Horovod", command, optional=bool(_ways(frameworks, seen)))
    else:
        for framework in sound:
            if "error" in seen[framework]:
                without = _mpi4py_works(seen) or bool(seen[framework].get("distributed"))
                yield Finding(f"Horovod that works with {framework}", "hvdplus install-horovod", optional=without)
            elif not seen[framework]["mpi"] and find_mpi():
                yield Finding(f"Horovod built with MPI for {framework}", "hvdplus install-horovod", optional=True)
    if not which("mpirun", "mpiexec"):
        yield Finding("MPI", "pip install 'hvdplus[mpi]'    (then: hvdplus install-horovod)", optional=True)
    elif "library" not in seen.get("mpi4py", {}):
        yield Finding("mpi4py (trains without Horovod)", "pip install 'hvdplus[mpi]'", optional=True)
    if not (package_version("matplotlib") and package_version("rich")):
        yield Finding("matplotlib and rich (pictures, progress)", "pip install 'hvdplus[viz]'", optional=True)
