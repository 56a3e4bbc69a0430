"""Which folder of the repository is which installed package; all else about hvdplus is in ``pyproject.toml``.

``compression/`` and ``adapters/`` live at the top of the repository and are installed as ``hvdplus.compression`` and
``hvdplus.adapters``; nothing else reaches the top level of an environment (the standard library owns the name
``compression`` from Python 3.14 on).

The links ``hvdplus/compression`` and ``hvdplus/adapters`` show editors and type checkers the same. Nothing here follows
them, so that archives that lose links can be built, and no module is packed twice.
"""

from setuptools import find_packages, setup

FOLDERS = {"hvdplus": "hvdplus", "hvdplus.compression": "compression", "hvdplus.adapters": "adapters"}
"""Package -> its folder; packages inside are found by themselves."""
LINKED = ["compression", "compression.*", "adapters", "adapters.*"]
"""Packages of their own, although links make them look like parts of ``hvdplus``."""

PACKAGE_DIR = dict(FOLDERS)
for package, folder in FOLDERS.items():
    for name in find_packages(folder, exclude=LINKED):
        PACKAGE_DIR[f"{package}.{name}"] = f"{folder}/{name.replace('.', '/')}"

setup(packages=list(PACKAGE_DIR), package_dir=PACKAGE_DIR)
