"""Who may know whom, and what an installation puts where.

cli, examples ─► front doors ─► adapters ─► core ─► compression          no arrow goes back
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from frameworks import need

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
SHOWS = {
    f"hvdplus.log.{name}"
    for name in ("words", "summary", "table", "columns", "picture", "panels", "page", "timeline", "follow", "report")
}
"""Words and axes: training imports none of them. A front door's ``report()`` may, when it is called."""


def modules(folder: str) -> dict[str, Path]:
    """Dotted name (as installed) -> file, for every module below a folder of the repository."""
    root = ROOT / folder
    prefix = folder if folder == "hvdplus" else f"hvdplus.{folder}"
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join((prefix, *(part for part in parts if part != "__init__")))] = path
    return found


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: all but what is in functions, or for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from at_import(node)


def imports(source: str, module: str, walk: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk) -> Iterator[str]:
    """Dotted names that a module imports, anywhere or where ``walk`` goes; ``from a import b`` is ``a.b``: b may be a
    module."""
    for node in walk(ast.parse(source)):
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
CLI = {name: path for name, path in HVDPLUS.items() if within(name, "hvdplus.cli", "hvdplus.lab")}
"""What starts programs; nobody below knows of it."""
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
    if name not in CLI and name not in SHOWS:  # a front door may import them later, nobody else at all
        shown = imports(source, name, at_import if name in DOORS else ast.walk)
        found += [f"{name} imports {target}, which only shows" for target in shown if within(target, *SHOWS)]
    if name not in CLI:
        loads = imports(source, name, at_import)
        found += [f"{name} imports {target} when it is imported" for target in loads if within(target, "matplotlib")]
    return found


@pytest.mark.parametrize("name", [*COMPRESSION, *ADAPTERS, *HVDPLUS])
def test_no_arrow_goes_back(name: str) -> None:
    path = {**COMPRESSION, **ADAPTERS, **HVDPLUS}[name]
    assert violations(name, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "line", "forbidden"),
    [
        ("hvdplus.compression.new", "from hvdplus.control.meter import StepTimes", True),
        ("hvdplus.compression.new", "from hvdplus import __version__", True),
        ("hvdplus.compression.new", "def f():\n    import torch", True),
        ("hvdplus.compression.new", "import scipy", True),
        ("hvdplus.compression.new", "from hvdplus.compression.ops import Ops", False),
        ("hvdplus.exchange.coordinator", "from hvdplus.adapters.transports.local import Local", True),
        ("hvdplus.exchange.coordinator", "from hvdplus import adapters", True),
        ("hvdplus.exchange.coordinator", "from hvdplus import torch", True),
        ("hvdplus.exchange.coordinator", "import mpi4py.MPI", True),
        ("hvdplus.exchange.coordinator", "from hvdplus.cli import main", True),
        ("hvdplus.exchange.coordinator", "from hvdplus.control import meter", False),
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
        ("hvdplus.exchange.coordinator", "from hvdplus.log.runlog import RunLog", False),
        ("hvdplus.exchange.coordinator", "def f():\n    from hvdplus.log import words", True),
        ("hvdplus.log.facts", "from hvdplus.log.words import count", True),
        ("hvdplus.adapters.torch.new", "from hvdplus.log.table import table", True),
        ("hvdplus.torch", "from hvdplus.log.report import report", True),
        ("hvdplus.torch", "class C:\n    from hvdplus.log import words", True),
        ("hvdplus.torch", "def report():\n    from hvdplus.log.report import report", False),
        ("hvdplus.cli.report", "from hvdplus.log.table import table", False),
        ("hvdplus.log.picture", "import matplotlib", True),
        ("hvdplus.log.picture", "if TYPE_CHECKING:\n    from matplotlib.axes import Axes", False),
    ],
)
def test_the_rule_itself_has_teeth(name: str, line: str, forbidden: bool) -> None:
    assert bool(violations(name, line)) == forbidden


def test_every_room_is_there() -> None:
    """An empty list would make the rules above pass for nothing."""
    assert {"hvdplus.compression", "hvdplus.compression.lowrank", "hvdplus.compression.ops"} <= set(COMPRESSION)
    assert {
        "hvdplus.adapters.transports.local",
        "hvdplus.adapters.torch.ops",
        "hvdplus.adapters.tensorflow.ops",
    } <= set(ADAPTERS)
    assert {"hvdplus", "hvdplus.control.controller", "hvdplus.exchange", "hvdplus.agree"} <= set(CORE)
    rooms = ("bucket", "checkpoint", "coordinator", "eager", "engine", "metadata", "plan", "schedule", "sparse", "step")
    assert {f"hvdplus.exchange.{room}" for room in rooms} <= set(CORE)
    assert {"hvdplus.torch", "hvdplus.keras", "hvdplus.tensorflow"} <= set(DOORS)
    assert {"hvdplus.cli", "hvdplus.cli.doctor"} <= set(CLI)
    assert {"hvdplus.log.runlog"} | SHOWS <= set(CORE)


def loaded(statement: str, folder: Path) -> set[str]:
    """Modules in a fresh interpreter after ``statement``, run in an empty folder."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import hvdplus",
        "import hvdplus.cli",
        "import " + ", ".join(sorted(CORE)),
        "import hvdplus.adapters.transports.connect, hvdplus.adapters.transports.local, hvdplus.adapters.numpy",
    ],
    ids=("package", "command line", "core", "adapters without a framework"),
)
def test_importing_it_imports_no_framework_and_starts_no_mpi(statement: str, tmp_path: Path) -> None:
    names = loaded(statement, tmp_path)
    assert "hvdplus" in names
    assert not names & FRAMEWORKS


@pytest.mark.parametrize("door", sorted(FRONT_DOORS))
def test_training_imports_neither_words_nor_axes(door: str, tmp_path: Path) -> None:
    need("torch" if door == "torch" else "tensorflow")
    names = loaded(f"import hvdplus.{door}", tmp_path)
    assert "hvdplus.log.runlog" in names
    assert not names & SHOWS
    assert door != "torch" or "matplotlib" not in names  # Keras imports it for itself


BUILD = [sys.executable, "-m", "pip", "-q", "--no-input", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index"]


def run(command: list[str], folder: Path) -> str:
    """What a command printed. Its failure is the test's."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with the links as links."""
    source = tmp_path_factory.mktemp("checkout") / "source"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("hvdplus", "compression", "adapters", "examples", "tests"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignore, symlinks=True)
    return source


@pytest.fixture(scope="module")
def sdist(checkout: Path) -> Path:
    """An archive of the sources."""
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", build, str(checkout.parent / "sdist")], checkout)
    (archive,) = (checkout.parent / "sdist").glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module", params=["checkout", "sdist"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in a wheel built offline, from a checkout and from an archive of the sources."""
    source, folder = request.getfixturevalue(request.param), tmp_path_factory.mktemp("wheel")
    if source.is_file():
        # Debian 12's Python, 3.11.2, has no filters.
        how: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        shutil.unpack_archive(source, folder / "unpacked", **how)
        (source,) = (folder / "unpacked").iterdir()
    run([*BUILD, "wheel", *OFFLINE, "-w", str(folder), str(source)], folder)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return archive.namelist()


@pytest.mark.packaging
def test_a_wheel_puts_one_name_at_the_top_level(wheel: list[str]) -> None:
    """The standard library owns ``compression`` from Python 3.14 on; ``tests`` and ``adapters`` are anybody's."""
    tops = {name.partition("/")[0] for name in wheel}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"hvdplus"}


@pytest.mark.packaging
def test_a_wheel_holds_every_module_once(wheel: list[str]) -> None:
    """The links ``hvdplus/compression`` and ``hvdplus/adapters`` are not a second way in."""
    sources = {**COMPRESSION, **ADAPTERS, **HVDPLUS}
    expected = {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in sources.items()
    }
    assert sorted(name for name in wheel if name.endswith(".py")) == sorted(expected)
    assert "hvdplus/py.typed" in wheel


@pytest.mark.packaging
def test_an_archive_of_the_sources_holds_every_module_once(sdist: Path) -> None:
    expected = {path.relative_to(ROOT) for path in {**COMPRESSION, **ADAPTERS, **HVDPLUS}.values()}
    with tarfile.open(sdist) as archive:
        found = [Path(*Path(name).parts[1:]) for name in archive.getnames() if name.endswith(".py")]
    assert sorted(found) == sorted(expected | {Path("setup.py")})


@pytest.mark.packaging
@pytest.mark.parametrize("links", [True, False], ids=["with links", "without"])
def test_an_editable_installation_finds_the_sources(checkout: Path, tmp_path: Path, links: bool) -> None:
    """Each module is where it is edited, also where a system or an archive lost the links."""
    source, prefix = tmp_path / "source", tmp_path / "prefix"
    shutil.copytree(checkout, source, symlinks=True)
    for name in ("compression", "adapters"):
        assert (source / "hvdplus" / name).is_symlink()
        if not links:
            (source / "hvdplus" / name).unlink()
    # The other hvdplus, which these tests run with, stays.
    run([*BUILD, "install", "--ignore-installed", *OFFLINE, "--prefix", str(prefix), "-e", str(source)], tmp_path)
    (packages,) = prefix.rglob("site-packages")
    # Without this environment's packages, where another hvdplus is installed; NumPy is all that these modules need.
    numpy = Path(find_spec("numpy").origin).parent  # type: ignore[union-attr, arg-type]
    (tmp_path / "others").mkdir()
    for needed in (numpy, *numpy.parent.glob("numpy.libs")):
        (tmp_path / "others" / needed.name).symlink_to(needed)
    modules = (
        "hvdplus.settings",
        "hvdplus.compression.lowrank",
        "hvdplus.adapters.numpy.ops",
        "hvdplus.adapters.transports.local",
    )
    look = (
        f"import importlib, site, sys\nsite.addsitedir({str(packages)!r})\n"
        f"sys.path.append({str(tmp_path / 'others')!r})\n"
        f"for name in {modules!r}: print(importlib.import_module(name).__file__)\n"
        "from importlib.metadata import version; print(version('hvdplus'))"
    )
    *places, version = run([sys.executable, "-I", "-S", "-c", look], tmp_path).split()
    sources = {**COMPRESSION, **ADAPTERS, **HVDPLUS}
    assert [Path(place).resolve() for place in places] == [source / sources[name].relative_to(ROOT) for name in modules]
    assert version == metadata.version("hvdplus")


def test_the_installed_distribution_claims_one_top_level_name() -> None:
    text = metadata.distribution("hvdplus").read_text("top_level.txt")
    assert text is not None and text.split() == ["hvdplus"]
    owners = metadata.packages_distributions()
    for name in ("compression", "adapters", "tests", "examples"):
        assert "hvdplus" not in owners.get(name, [])
