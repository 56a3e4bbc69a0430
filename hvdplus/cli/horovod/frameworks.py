"""The deep-learning frameworks of this environment. None is imported."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import NamedTuple

TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-rocm", "tf-nightly")


class Framework(NamedTuple):
    """A deep-learning framework of this environment: its module, its package and the package's version."""

    module: str
    package: str
    version: str

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
        if find_spec(module) and (known := package_version(*packages)):
            found.append(Framework(module, *known))
    return tuple(found)
