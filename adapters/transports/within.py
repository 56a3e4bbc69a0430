"""Some of a job's ranks as a world of their own: Horovod's process sets, and torch.distributed's process groups.

Such as the copies of one part of a model that is split over several ranks.
"""

from __future__ import annotations

from typing import Any

from hvdplus.adapters.transports.connect import COLLECTIVES, INSTALL_HOROVOD, Cpu, learn
from hvdplus.settings import Settings
from hvdplus.transport import NeedsHorovod, World

_sets: dict[int, tuple[Any, World, World]] = {}
"""Number of a process set -> the set, the world that it is a part of, and its own. The number of a set that was removed
is given away again."""
_groups: dict[tuple[int, ...], tuple[Any, World]] = {}
"""Ranks of a process group -> the default process group, and their world. A script may end the first, and make
another."""


def is_part(process_set: Any) -> bool:
    """Whether a script's argument is a process set other than Horovod's global one."""
    return process_set is not None and getattr(process_set, "process_set_id", 0) != 0


def of_process_set(binding: str, cpu: Cpu, world: World, process_set: Any) -> World:
    """The ranks of a Horovod process set (None: those of ``world``); all of them call it, and no other rank.

    Arguments as of ``connect``.

    Raises:
        ValueError: this rank is not one of them, or the set was not added.
        NeedsHorovod: the job runs without Horovod.
    """
    if not is_part(process_set):
        return world
    if not hasattr(world.transport, "within"):
        raise NeedsHorovod(
            f"process_set= needs Horovod, and this job runs over {world.transport.name} (in PyTorch, process_group= "
            f"takes torch.distributed's groups). {INSTALL_HOROVOD}."
        )
    if process_set.process_set_id is None:
        raise ValueError(
            "The process set was not added: hvd.init(process_sets=[...]) does that, or hvd.add_process_set(...), if "
            f"HOROVOD_DYNAMIC_PROCESS_SETS=1 was set before hvd.init(). Received: {process_set}"
        )
    known, of, found = _sets.get(process_set.process_set_id, (None, None, None))
    if found is None or known is not process_set or of is not world:
        found = learn(binding, cpu, world.transport.within(process_set), world.collective)
        _sets[process_set.process_set_id] = process_set, world, found
    return found


def of_process_group(cpu: Cpu, group: Any) -> World:
    """The ranks of a ``torch.distributed`` process group (None: all ranks); all of them call it, and no other rank.

    Raises:
        ValueError: this rank is not one of them.
    """
    from torch import distributed as dist

    from hvdplus.adapters.transports.torch_distributed import TorchDistributed

    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(f"This rank, {dist.get_rank()}, is not in the process group.")
    whole, ranks = dist.group.WORLD, tuple(dist.get_process_group_ranks(group))
    known, found = _groups.get(ranks, (None, None))
    if found is None or known is not whole:
        if found is not None:
            found.transport.end()
        transport = TorchDistributed(Settings.load().timeout_seconds, group)
        found = learn("horovod.torch", cpu, transport, COLLECTIVES[transport.name])
        _groups[ranks] = whole, found
    return found


def end_all() -> None:
    """End the transports of all groups; sets have that of all ranks."""
    _sets.clear()
    while _groups:
        _, (_, world) = _groups.popitem()
        world.transport.end()
