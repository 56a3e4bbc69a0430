"""From Horovod's released source to an installed wheel."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hvdplus.cli.horovod.cache import cache_root, cached_wheel, run_path, store
from hvdplus.cli.horovod.patches import SDIST_SHA256, VERSION, apply_patches, unpack
from hvdplus.cli.horovod.progress import Runner, last_lines
from hvdplus.cli.horovod.stack import Stack
from hvdplus.cli.horovod.tools import InstallError, output_of, which

TOOLS = {"setuptools": "setuptools", "wheel": "wheel", "packaging": "packaging"}
"""What the build needs: pip name -> module name."""


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
    found = re.search(r"cmake version (\d+)\.(\d+)", output_of("cmake", "--version") if which("cmake") else "")
    return bool(found) and (int(found[1]), int(found[2])) >= (3, 13) if found else False


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def given_sdist(path: str) -> Path:
    """Return ``path`` if it is Horovod's released source archive. Raises `InstallError` if not."""
    archive = Path(path)
    received = sha256(archive) if archive.is_file() else "no file"
    if received != SDIST_SHA256:
        raise InstallError(
            f"--sdist must be horovod-{VERSION}.tar.gz as it was released, with the SHA-256 {SDIST_SHA256}. Received: "
            f"{path} ({received})"
        )
    return archive.absolute()


def given_wheel(path: str) -> Path:
    """Return ``path`` if its name is that of a wheel of Horovod. Raises `InstallError` if not."""
    wheel = Path(path)
    if not (wheel.is_file() and re.fullmatch(rf"horovod-{re.escape(VERSION)}(\+[\w.]+)?-.+\.whl", wheel.name)):
        raise InstallError(
            f"--wheel must be a wheel of Horovod {VERSION}, horovod-{VERSION}-*.whl, such as --wheel-dir leaves. "
            f"Received: {path}{'' if wheel.is_file() else ' (no file)'}"
        )
    return wheel.absolute()


def fetch_sdist(run: Runner, folder: Path, use_cache: bool) -> Path:
    """Return Horovod's source archive, from the cache or by ``pip download``. Its hash is verified before any code of
    it runs."""
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
            f"bring the file yourself; then: hvdplus install-horovod --sdist {name} (log: {run.log})"
        )
    if use_cache:
        store(archive, cache_root())
    return archive


def build_environment(stack: Stack, jobs: int) -> dict[str, str]:
    """Return the variables that control Horovod's build; they are added to the user's environment."""
    present = {framework.module for framework in stack.frameworks}

    def choose(feature: str, wanted: bool) -> dict[str, str]:
        return {f"HOROVOD_{'WITH' if wanted else 'WITHOUT'}_{feature}": "1"}

    # Horovod's files for PyTorch would compile for CUDA wherever they see nvcc, and without NCCL.
    without_gpu = stack.gpu is None and not stack.users_gpu
    return {
        **(stack.gpu.variables() if stack.gpu else {}),
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
        "HVDPLUS_CXX_STANDARD": pytorch_standard(),
        "HVDPLUS_MPICXX": stack.mpi.wrapper if stack.mpi else "",
        "HVDPLUS_WITHOUT_GPU": "1" if without_gpu else "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


def pytorch_standard() -> str:
    """The C++ that PyTorch's headers ask for; ``17`` where they do not say."""
    spec = find_spec("torch")
    header = Path(spec.origin).parent / "include/torch/csrc/api/include/torch/all.h" if spec and spec.origin else None
    text = header.read_text(encoding="utf-8") if header and header.exists() else ""
    asked = re.search(r"#error C\+\+(\d+) or later", text)
    return asked[1] if asked else "17"


def build_wheel(run: Runner, stack: Stack, folder: Path, jobs: int, use_cache: bool, sdist: Path | None = None) -> Path:
    """Build Horovod for ``stack`` in ``folder`` and return the wheel.

    Args:
        jobs: compiler jobs at a time.
        use_cache: whether the source archive may come from the cache, and go there.
        sdist: the verified source archive, if the user has brought it.
    """
    ensure_packages(run, {**TOOLS, **({} if usable_cmake() else {"cmake": "cmake"})})
    source = unpack(sdist or fetch_sdist(run, folder, use_cache), folder)
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


def install_wheel(run: Runner, wheel: Path) -> None:
    """Install the wheel alone; the packages that it needs are installed already."""
    with run.progress.step("installing the wheel"):
        code, output = run([sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", str(wheel)])
    if code:
        raise InstallError(f"pip could not install {wheel}:\n{last_lines(output, 5)}\nTo build it anew: "
                           "hvdplus install-horovod --force")  # fmt: skip
