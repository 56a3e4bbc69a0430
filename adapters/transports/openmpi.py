"""Open MPI settings that have to be made before MPI starts.

Open MPI's default all-reduce for large messages is not a ring, so it moves more bytes over the slowest link than the
cost model (and the user) expects; a waiting rank spins, which steals the cores of ranks that still compute; and large
messages over TCP go a way that is slow in some jobs (``TCP_FLAGS``). All of these are MCA parameters, read once, when
MPI starts. A user's own choice always wins, wherever Open MPI 4.1 would read it: the environment (``mpirun --mca``
arrives there too), the files of ``mpirun --tune`` and ``-am``, and the parameter files ``~/.openmpi/mca-params.conf``
and ``<prefix>/etc/openmpi-mca-params.conf``. The environment beats those files, so setting a variable without looking
into them would override the user silently.

Other MPI implementations ignore these variables. Nothing here starts a process or imports MPI.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

PREFIX = "OMPI_MCA_"
DYNAMIC_RULES = "OMPI_MCA_coll_tuned_use_dynamic_rules"
ALLREDUCE_ALGORITHM = "OMPI_MCA_coll_tuned_allreduce_algorithm"
YIELD_WHEN_IDLE = "OMPI_MCA_mpi_yield_when_idle"
TCP_FLAGS = "OMPI_MCA_btl_tcp_flags"
"""Messages of more than a megabyte or so go over TCP in either of two ways, by pieces that are put into the receiver's
memory or by pieces that are sent. Where both directions are busy at once, as in a ring, putting them takes up to 1.5
times as long as the link's rate allows, in about every second job (Open MPI 4.1.8, two hosts: 42 MB at 100 Mb/s in 5.27
or 3.51 s; sent, always in 3.55 s)."""

HAN_PRIORITY, HAN, TUNED = "OMPI_MCA_coll_han_priority", 35, 30
"""Open MPI takes the component of the highest priority. ``tuned``, which has the ring, has 30. ``han``, which has 0 in
4.1 and 35 from 5.0 on, takes jobs with several ranks on each of several hosts: it sums within hosts first, and bytes
cross the network once a host. That is left as it is, because it is faster (5.0.11, 4 ranks on 2 hosts, 8 MB at 100
Mb/s: 0.71 s, in a ring of all ranks 1.09 s, with none of these settings 1.8 s)."""

#: Variable -> value that hvdplus sets where the user has chosen none.
SETTINGS: dict[str, str] = {
    DYNAMIC_RULES: "1",  # without it Open MPI ignores the next one
    ALLREDUCE_ALGORITHM: "4",  # 4 is the ring
    YIELD_WHEN_IDLE: "1",
    TCP_FLAGS: "9",  # 1: send, 8: without a copy
}

# Variable -> prefix of the parameters that are one decision: hvdplus sets none of them if the user has set one.
_DECISION = {
    DYNAMIC_RULES: "coll_tuned_",
    ALLREDUCE_ALGORITHM: "coll_tuned_",
    YIELD_WHEN_IDLE: "mpi_yield_when_idle",
    TCP_FLAGS: "btl_tcp_flags",
}

# Names that hvdplus has set, so that a second call (or a child process) does not take them for the user's choice.
_OURS = "_HVDPLUS_OPENMPI_SET"

# Open MPI 4.1's numbers and names (`ompi_info --all`: coll_tuned_allreduce_algorithm).
_ALGORITHMS = (
    "default",
    "basic linear",
    "nonoverlapping",
    "recursive doubling",
    "ring",
    "segmented ring",
    "rabenseifner",
)


class Setting(NamedTuple):
    """One Open MPI setting as it stands.

    ``origin`` is ``"hvdplus"``, ``"environment"``, or the path of the parameter file that decides. An empty ``value``
    means: left to Open MPI, because ``origin`` holds the user's own tuning.
    """

    name: str
    value: str
    origin: str


def locate_wheel(environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell Open MPI from PyPI's wheel where it is installed, so that it also starts without a launcher.

    Its ``mpirun`` sets this for its ranks; a process started by itself (or by srun) would look in the folder that the
    wheel was built in. The user's own ``OPAL_PREFIX``, and any other MPI, is left alone.
    """
    prefix = Path(sys.prefix)
    if "OPAL_PREFIX" not in environ and (prefix / "bin" / "orterun_wrapper").exists():
        environ["OPAL_PREFIX"] = str(prefix)


def load_wheel() -> None:
    """Load Open MPI from PyPI's wheel, all symbols bound; call it before MPI starts. Any other MPI is left alone.

    TensorFlow brings its own hwloc. If TensorFlow is imported after MPI has started (by Keras on its PyTorch backend),
    MPI would call that hwloc when it ends, and the process would end with a segmentation fault.
    """
    library = Path(sys.prefix) / "lib" / "libmpi.so.40"
    if Path(os.environ.get("OPAL_PREFIX", "/")) == Path(sys.prefix) and library.exists():
        ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_GLOBAL)


def apply_settings(environ: MutableMapping[str, str] = os.environ) -> tuple[Setting, ...]:
    """Set what the user has not, in ``environ``, and return every setting with its origin.

    Call it before MPI starts; calling it again changes nothing and returns the same. Reads at most a handful of small
    files; unreadable ones count as empty, as they do for Open MPI.
    """
    ours = {name for name in environ.get(_OURS, "").split(",") if environ.get(name) == SETTINGS.get(name, "")}
    file_values = dict(_file_values(environ))
    settings = []
    for name, wanted in SETTINGS.items():
        decision = PREFIX + _DECISION[name]
        user_variables = [key for key in environ if key.startswith(decision) and key not in ours]
        user_files = [origin for key, (_, origin) in file_values.items() if key.startswith(decision)]
        if name in environ and name not in ours:
            settings.append(Setting(name, environ[name], "environment"))
        elif name in file_values and name not in ours:
            settings.append(Setting(name, *file_values[name]))
        elif name not in ours and (user_variables or user_files):
            settings.append(Setting(name, "", "environment" if user_variables else user_files[0]))
        else:
            environ[name] = wanted
            ours.add(name)
            settings.append(Setting(name, wanted, "hvdplus"))
    if ours:
        environ[_OURS] = ",".join(sorted(ours))
    return tuple(settings)


def is_loaded() -> bool:
    """Whether the MPI of this process is Open MPI, whatever has started it."""
    maps = _maps()
    return "libopen-pal" in maps if maps else "OMPI_COMM_WORLD_SIZE" in os.environ


def _maps() -> str:
    """The libraries that this process has loaded, among others; empty: this is no Linux."""
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def allreduce_algorithm(
    settings: Iterable[Setting], grouped: bool = False, environ: Mapping[str, str] = os.environ
) -> str:
    """Name the all-reduce that ``settings`` lead to: ``"ring"``, ``"segmented ring"``, ... or ``"default"``.

    An algorithm that Open MPI 4.1 does not know is returned as it was written.

    Args:
        grouped: there are several ranks on each of several hosts.
    """
    if grouped and _han_priority(environ) > TUNED:
        return "hosts first (han)"
    values = {setting.name: setting.value.strip().lower() for setting in settings}
    if values.get(DYNAMIC_RULES, "") not in ("1", "true", "t", "yes", "enabled"):
        return "default"
    algorithm = values.get(ALLREDUCE_ALGORITHM, "")
    if algorithm.isdecimal() and int(algorithm) < len(_ALGORITHMS):
        return _ALGORITHMS[int(algorithm)]
    return algorithm.replace("_", " ").replace("ignore", "default") or "default"


def _han_priority(environ: Mapping[str, str]) -> int:
    """Of ``han``, as far as the environment tells. mpirun tells its version from Open MPI 5 on, and srun no MPI's; the
    name of the library that is loaded does (``libopen-pal.so.80`` is of 5.0)."""
    version = re.match(r"\d+", environ.get("OMPI_VERSION", ""))
    library = re.search(r"libopen-pal\.so\.(\d+)", _maps())
    usual = HAN if (version and int(version[0]) >= 5) or (library and int(library[1]) >= 80) else 0
    try:
        return int(environ.get(HAN_PRIORITY, usual))
    except ValueError:
        return usual


def _file_values(environ: MutableMapping[str, str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (variable, (value, file)) for our parameters in every file Open MPI would read, weakest file first.

    Two notations: ``name = value`` (parameter files, ``-am``) and ``-mca name value`` (``--tune``).
    """
    ours = "|".join(sorted(set(_DECISION.values())))
    assignment = re.compile(rf"^\s*(?:-{{1,2}}g?mca\s+)?((?:{ours})\w*)(?:\s*=\s*|\s+)(.*?)\s*$")
    for path in _parameter_files(environ):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if match := assignment.match(line):
                yield PREFIX + match[1], (match[2].strip("\"'"), str(path))


def _parameter_files(environ: MutableMapping[str, str]) -> list[Path]:
    """List the parameter files that Open MPI 4.1 reads, weakest first (tried with `ompi_info`); they need not exist."""
    if "OPAL_SYSCONFDIR" in environ:
        system = Path(environ["OPAL_SYSCONFDIR"])
    elif "OPAL_PREFIX" in environ:  # mpirun from the pip wheel sets it for its ranks
        system = Path(environ["OPAL_PREFIX"]) / "etc"
    else:
        mpirun = shutil.which("mpirun", path=environ.get("PATH", ""))
        prefix = Path(mpirun).resolve().parent.parent if mpirun else Path("/usr")
        system = Path("/etc/openmpi") if prefix == Path("/usr") else prefix / "etc"
    named = environ.get("OMPI_MCA_mca_base_param_files") or environ.get("OMPI_MCA_mca_param_files")
    if named:
        files = [Path(name) for name in reversed(named.split(",")) if name]
    else:
        home = Path(environ["HOME"]) if "HOME" in environ else Path.home()
        files = [system / "openmpi-mca-params.conf", home / ".openmpi" / "mca-params.conf"]
    for variable in ("OMPI_MCA_mca_base_param_file_prefix", "OMPI_MCA_mca_base_envar_file_prefix"):
        files += [Path(name) for name in environ.get(variable, "").split(",") if name]
    return [*files, system / "openmpi-mca-params-override.conf"]
