"""The deep-learning frameworks of this environment, and the devices that they are built for. None is imported."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly")
BUILT_FOR = {
    # torch/version.py has `cuda: Optional[str] = '12.6'` and `hip`, TensorFlow's own page a dictionary of its build.
    "torch": ("version.py", r"^cuda\b.*= *['\"](\d+\.\d+)", r"^hip\b.*= *['\"](\d+\.\d+)"),
    "tensorflow": (
        "python/platform/build_info.py",
        r"'cuda_version', *'(\d+\.\d+)",
        r"'is_rocm_build', *(True)",
    ),
}
"""Module -> (file that its build wrote, pattern of CUDA's version, pattern of ROCm's)."""


class Framework(NamedTuple):
    """A deep-learning framework of this environment: its module, its package and the package's version.

    ``cuda`` is the version of CUDA that it is built for, such as ``12.6``, or ``""``.
    """

    module: str
    package: str
    version: str
    cuda: str = ""
    rocm: bool = False

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


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
        spec = find_spec(module)
        if spec and (known := package_version(*packages)):
            found.append(Framework(module, *known, *built_for(module, Path(spec.origin or "").parent)))
    return tuple(found)


def built_for(module: str, folder: Path) -> tuple[str, bool]:
    """Return (version of CUDA or ``""``, whether for ROCm) of the framework ``module`` installed in ``folder``.

    Packages' names do not tell: ``torch`` and ``tensorflow`` are CUDA's on one index or machine and CPUs' on another.
    """
    name, cuda, rocm = BUILT_FOR[module]
    path = folder / name
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = re.search(cuda, text, re.MULTILINE)
    return found[1] if found else "", bool(re.search(rocm, text, re.MULTILINE))
