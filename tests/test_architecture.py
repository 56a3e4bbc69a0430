"""Who may know whom, and what an installation puts where.

cli, examples ─► front doors ─► adapters ─► core ─► compression          no arrow goes back
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "horovod", "mpi4py"}
FRONT_DOORS = {"torch", "keras", "tensorflow"}
"""Modules of ``hvdplus`` that users import; they know a framework, and nobody below knows them."""
OWN_FRAMEWORK = {
    "numpy": set(),
    "torch": {"torch"},
    "tensorflow": {"tensorflow"},
    "keras": {"keras", "tensorflow", "torch"},
}
"""Folder of ``adapters`` -> frameworks that it may import."""
STANDS_ON = {"hvdplus.adapters.keras": {"torch", "tensorflow"}, "hvdplus.tensorflow": {"keras"}}
"""What may import others of its kind: Keras has backends, and TensorFlow's front door leads into Keras' house."""


def modules(folder: str) -> dict[str, Path]:
    """Dotted name (as installed) -> file, for every module below a folder of the repository."""
    root = ROOT / folder
    prefix = folder if folder == "hvdplus" else f"hvdplus.{folder}"
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join((prefix, *(part for part in parts if part != "__init__")))] = path
    return found


def imports(source: str, module: str) -> Iterator[str]:
    """Dotted names that a module imports, anywhere in it; ``from a import b`` is ``a.b``, because b may be a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: relative import, which the folders' mapping would break"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    """Whether ``name`` is one of the packages or inside it."""
    return any(name == package or name.startswith(package + ".") for package in packages)


COMPRESSION, ADAPTERS = modules("compression"), modules("adapters")
HVDPLUS = modules("hvdplus")
CLI = {name: path for name, path in HVDPLUS.items() if within(name, "hvdplus.cli")}
DOORS = {name: path for name, path in HVDPLUS.items() if within(name, *(f"hvdplus.{door}" for door in FRONT_DOORS))}
CORE = {name: path for name, path in HVDPLUS.items() if name not in {**CLI, **DOORS}}


def violations(name: str, source: str) -> list[str]:
    """Imports that go against the arrows."""
    found = []
    for target in imports(source, name):
        top = target.partition(".")[0]
        if within(name, "hvdplus.compression"):
            allowed = within(target, "hvdplus.compression") or top == "numpy" or top in sys.stdlib_module_names
        elif within(name, "hvdplus.adapters"):
            allowed = not within(target, "hvdplus.cli", *(f"hvdplus.{door}" for door in FRONT_DOORS))
            folder = name.split(".")[2] if len(name.split(".")) > 2 else ""
            if folder in OWN_FRAMEWORK:
                allowed = allowed and top not in FRAMEWORKS - OWN_FRAMEWORK[folder]
                beside = {folder} | STANDS_ON.get(f"hvdplus.adapters.{folder}", set())
                others = (f"hvdplus.adapters.{other}" for other in OWN_FRAMEWORK.keys() - beside)
                allowed = allowed and not within(target, *others)
        elif name in CLI:
            allowed = True
        elif name in DOORS:
            beside = {name.split(".")[1]} | STANDS_ON.get(name, set())
            others = (f"hvdplus.{door}" for door in FRONT_DOORS - beside)
            allowed = not within(target, "hvdplus.cli", *others)
        elif top == "hvdplus":  # of the core: the version, and what is core or compression itself
            core = set(CORE) - {"hvdplus"}
            allowed = target == "hvdplus.__version__" or within(target, "hvdplus.compression", *core)
        else:
            allowed = top not in FRAMEWORKS
        if not allowed:
            found.append(f"{name} imports {target}")
    return found


@pytest.mark.parametrize("name", [*COMPRESSION, *ADAPTERS, *HVDPLUS])
def test_no_arrow_goes_back(name: str) -> None:
    path = {**COMPRESSION, **ADAPTERS, **HVDPLUS}[name]
    assert violations(name, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "line", "forbidden"),
    [
        ("hvdplus.compression.new", "from hvdplus.meter import StepTimes", True),
        ("hvdplus.compression.new", "from hvdplus import __version__", True),
        ("hvdplus.compression.new", "def f():\n    import torch", True),
        ("hvdplus.compression.new", "import scipy", True),
        ("hvdplus.compression.new", "from hvdplus.compression.ops import Ops", False),
        ("hvdplus.exchange.coordinator", "from hvdplus.adapters.local import Local", True),
        ("hvdplus.exchange.coordinator", "from hvdplus import adapters", True),
        ("hvdplus.exchange.coordinator", "from hvdplus import torch", True),
        ("hvdplus.exchange.coordinator", "import mpi4py.MPI", True),
        ("hvdplus.exchange.coordinator", "from hvdplus.cli import main", True),
        ("hvdplus.exchange.coordinator", "from hvdplus import meter, __version__", False),
        ("hvdplus.adapters.torch.new", "import hvdplus.torch", True),
        ("hvdplus.adapters.torch.new", "from tensorflow import keras", True),
        ("hvdplus.adapters.torch.new", "from hvdplus.adapters.keras import ops", True),
        ("hvdplus.adapters.torch.new", "from hvdplus.exchange.coordinator import Coordinator", False),
        ("hvdplus.adapters.new", "from hvdplus import cli", True),
        ("hvdplus.adapters.tensorflow.new", "import keras", True),
        ("hvdplus.adapters.keras.new", "from hvdplus.adapters.torch import optimizer", False),
        ("hvdplus.keras", "import hvdplus.tensorflow", True),
        ("hvdplus.tensorflow", "import hvdplus.keras", False),
        ("hvdplus.torch", "import hvdplus.keras", True),
        ("hvdplus.torch.elastic", "import hvdplus.keras", True),
        ("hvdplus.torch.elastic", "import hvdplus.torch", False),
    ],
)
def test_the_rule_itself_has_teeth(name: str, line: str, forbidden: bool) -> None:
    assert bool(violations(name, line)) == forbidden


def test_every_room_is_there() -> None:
    """An empty list would make the rules above pass for nothing."""
    assert {"hvdplus.compression", "hvdplus.compression.lowrank", "hvdplus.compression.ops"} <= set(COMPRESSION)
    assert {"hvdplus.adapters.local", "hvdplus.adapters.torch.ops", "hvdplus.adapters.tensorflow.ops"} <= set(ADAPTERS)
    assert {"hvdplus", "hvdplus.controller", "hvdplus.exchange", "hvdplus.launch"} <= set(CORE)
    rooms = ("bucket", "checkpoint", "coordinator", "eager", "engine", "metadata", "plan", "schedule", "sparse", "step")
    assert {f"hvdplus.exchange.{room}" for room in rooms} <= set(CORE)
    assert {"hvdplus.torch", "hvdplus.keras", "hvdplus.tensorflow"} <= set(DOORS)
    assert {"hvdplus.cli", "hvdplus.cli.doctor"} <= set(CLI)


def loaded(statement: str, folder: Path) -> set[str]:
    """Top-level modules in a fresh interpreter after ``statement``, run in an empty folder."""
    code = f"import sys\n{statement}\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import hvdplus",
        "import hvdplus.cli",
        "import " + ", ".join(sorted(CORE)),
        "import hvdplus.adapters.connect, hvdplus.adapters.local, hvdplus.adapters.numpy",
    ],
    ids=("package", "command line", "core", "adapters without a framework"),
)
def test_importing_it_imports_no_framework_and_starts_no_mpi(statement: str, tmp_path: Path) -> None:
    names = loaded(statement, tmp_path)
    assert "hvdplus" in names
    assert not names & FRAMEWORKS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built from a copy of the sources, offline."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("hvdplus", "compression", "adapters", "examples", "tests"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    done = subprocess.run(
        [*command, "-w", str(folder), str(source)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return archive.namelist()


def test_a_wheel_puts_one_name_at_the_top_level(wheel: list[str]) -> None:
    """The standard library owns ``compression`` from Python 3.14 on; ``tests`` and ``adapters`` are anybody's."""
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hvdplus"}


def test_a_wheel_holds_every_module(wheel: list[str]) -> None:
    sources = {**COMPRESSION, **ADAPTERS, **HVDPLUS}
    expected = {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in sources.items()
    }
    assert {name for name in wheel if name.endswith(".py")} == expected
    assert "hvdplus/py.typed" in wheel


def test_the_installed_distribution_claims_one_top_level_name() -> None:
    text = metadata.distribution("hvdplus").read_text("top_level.txt")
    assert text is not None and text.split() == ["hvdplus"]
    owners = metadata.packages_distributions()
    for name in ("compression", "adapters", "tests", "examples"):
        assert "hvdplus" not in owners.get(name, [])
