"""Exchanges that wait for nobody, or only for ranks that are too far behind (stale-synchronous).

The anchors are a vector in the memory of all ranks. A rank whose exchange is due adds its drift to it, divided by the
number of ranks, reads it, and goes on from there: what others have added meanwhile comes along. A rank that is slower
than the others adds what it computed from parameters that are old by then, and takes a smaller step for it
(staleness-aware rates, arXiv 1511.05950).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdplus.adapters.torch.fragment import Fragment
from hvdplus.adapters.transports.window import GONE, SharedVector
from hvdplus.agree import AUTO, asked_for
from hvdplus.compression import Compressor, NoCompression, parse
from hvdplus.compression.blocks import BlockSelection
from hvdplus.settings import Settings
from hvdplus.transport import World


class Asynchronous(Fragment):
    """All parameters, exchanged through a memory that all ranks share."""

    waits = False
    memory: SharedVector

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        anchors: Sequence[torch.nn.Parameter],
        outer: Any,
        *,
        ahead: int | None,
        level: Compressor,
    ) -> None:
        """
        Args:
            ahead: exchanges by which a rank may be ahead of the slowest one; None: any number.
            level: what is added: everything, or the blocks with most energy.
        """
        super().__init__(parameters, anchors, outer)
        self._ahead, self._blocks = ahead, level if isinstance(level, BlockSelection) else None
        self._residual: np.ndarray | None = None
        self._read_at = 0
        """Exchanges of all ranks when this one last read."""
        self._added = self._total_age = self._largest_age = 0
        """This rank's exchanges, and exchanges of others that came between its reading and its adding: in all, and at
        most."""
        self.waited_seconds = 0.0
        self._open = False

    def anchor(self) -> None:
        """Share the present parameters. All ranks call it.

        Raises:
            RuntimeError: they are not the same on all ranks; on every rank.
        """
        super().anchor()
        if self._open:  # first, as others may be waiting for this rank's exchanges
            self.memory.close()
            self._open = False
        values = self._flat(self.anchors)
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        told = self.outer._exchange.transport.gather_objects(digest, "parameters to share")
        if len(set(told)) > 1:
            raise RuntimeError(
                "Ranks that do not wait for each other have to begin with the same parameters. Received: other ones on "
                f"rank {next(rank for rank, each in enumerate(told) if each != told[0])} than on rank 0. Call "
                "hvd.broadcast_parameters(model.state_dict(), root_rank=0), also after loading checkpoints that ranks "
                "have saved each for itself; or save after optimizer.average_now()."
            )
        self.memory, self._open = SharedVector(values, self.outer._exchange.settings.timeout_seconds), True
        self._read_at = 0

    def begin(self, early: bool, sent: Sequence[torch.Tensor] | None = None) -> None:
        """Nothing has to be done before ``complete``."""

    @torch.no_grad()
    def complete(self, rate: float) -> None:
        """Add this rank's drift, wait if it is too far ahead, read.

        Raises:
            RuntimeError: a parameter is not finite: it would be in the memory of all ranks.
        """
        memory = self.memory
        self._add(self._change())
        count = int(memory.count()[memory.rank] % GONE)
        if self._ahead is not None:
            self.waited_seconds += memory.wait_until(count - self._ahead)
        self._read()

    def meet(self, rate: float) -> None:
        """Wait for all ranks, and go on from the same parameters and counts. All ranks call it, whatever number of
        exchanges they have made; nobody waits for one that is here."""
        memory, change = self.memory, self._change()
        if self._residual is not None:
            change, self._residual = change + self._residual, None
        if change.any():
            memory.add(change)
        memory.skip(GONE)
        memory.meet()
        made = memory.counts() % GONE
        memory.meet()
        memory.skip(int(made.max() - made[memory.rank]) - GONE)
        memory.meet()
        self._read()
        memory.meet()

    def state(self) -> dict[str, Any]:
        """As any fragment's, with what was not added yet."""
        residual = None if self._residual is None else torch.from_numpy(self._residual.copy())
        return {**super().state(), "residual": residual}

    def load(self, state: Mapping[str, Any], under_way: bool) -> bool:
        """Continue from a ``state()``. The memory is made anew, of the parameters that the next step finds."""
        super().load(state, False)
        residual = state.get("residual")
        self._residual = None if residual is None else residual.numpy().copy()
        return False

    def facts(self) -> dict[str, Any]:
        """For the report."""
        return {
            "mean_staleness": round(self._total_age / max(1, self._added), 2),
            "largest_staleness": self._largest_age,
            "waited_seconds": round(self.waited_seconds, 3),
        }

    def _change(self) -> np.ndarray:
        """What this rank brings: its share of its drift."""
        change: np.ndarray = self._flat(self.parameters) - self._flat(self.anchors)
        if not np.isfinite(change).all():
            raise RuntimeError(
                f"Rank {self.memory.rank} has parameters that are not finite after {self._added + 1} exchanges; "
                "they would reach all ranks, which wait for nobody. Lower the learning rate, or skip such steps."
            )
        age = _total(self.memory.counts()) - self._read_at
        if change.any():
            self._added += 1
            self._total_age += age
            self._largest_age = max(self._largest_age, age)
        change *= step_share(age, self.memory.size)
        return change

    def _add(self, change: np.ndarray) -> None:
        if self._blocks is None:
            self.memory.add(change)
            return
        if self._residual is not None:
            change += self._residual
        block = self._blocks.block
        count = -(-len(change) // block)
        padded = np.zeros(count * block, np.float32)
        padded[: len(change)] = change
        energy = np.square(padded.reshape(count, block)).sum(1)
        most = max(1, math.ceil(self._blocks.share * count))
        chosen = np.sort(np.argpartition(-energy, most - 1)[:most])
        self.memory.add_blocks(change, block, chosen)
        kept = padded.reshape(count, block)
        kept[chosen] = 0.0
        self._residual = kept.reshape(-1)[: len(change)].copy()

    def _read(self) -> None:
        self._read_at = _total(self.memory.counts())
        values = np.empty(sum(p.numel() for p in self.anchors), np.float32)
        self.memory.read(values)
        place = 0
        with torch.no_grad():
            for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
                part = torch.from_numpy(values[place : place + anchor.numel()]).view(anchor.shape)
                anchor.copy_(part)
                parameter.copy_(part)
                place += anchor.numel()

    def _flat(self, tensors: Sequence[torch.Tensor]) -> np.ndarray:
        whole: np.ndarray = torch.cat([t.detach().float().reshape(-1).cpu() for t in tensors]).numpy()
        return whole


def _total(counts: np.ndarray) -> int:
    """Exchanges of all ranks."""
    return int((counts % GONE).sum())


def step_share(age: int, ranks: int) -> float:
    """What share of its drift a rank adds: the mean of all ranks' drifts where each is as old as with equal speeds,
    and less, the older it is."""
    usual = max(1, ranks - 1)
    return min(1.0, usual / max(1, age)) / ranks


def chosen_level(compression: Any, settings: Settings) -> Compressor:
    """The level of what is added; ``auto`` adds everything.

    Raises:
        ValueError: it can only be added up by all ranks together.
    """
    wanted, from_settings = asked_for(compression, settings)
    level = parse("none" if wanted == AUTO else wanted) if isinstance(wanted, str) else wanted
    if not isinstance(level, NoCompression | BlockSelection):
        raise ValueError(
            "Ranks that do not wait for each other add float32 values to each other's memory: all of them (none), or "
            "the blocks with most energy (topk:0.05). Received: "
            + (f"{settings.whence('compression')}={wanted}" if from_settings else f"compression={wanted!r}")
        )
    return level


def check(settings: Settings, every: int, types: Mapping[str, torch.dtype], world: World) -> None:
    """Raise ValueError where settings, or ``every``, ask for what such exchanges cannot do, where they would not carry
    all that parameters hold (``types`` of all names), or where the ranks of ``world`` are not those of MPI."""
    transport = world.transport
    if transport.name not in ("horovod-mpi", "mpi4py") or transport.part:
        raise ValueError(
            "With staleness, all ranks add to a memory that MPI shares between them: start the job with mpirun or srun "
            "--mpi=pmix (horovodrun without --gloo), and leave process sets and groups out. Received: "
            + ("a process set or group" if transport.part else f"transport {transport.name}")
        )
    wrong: Mapping[str, bool] = {
        "every=auto": not every,
        f"outer={settings.outer}": settings.outer != "average",
        f"overlap_steps={settings.overlap_steps}": settings.overlap_steps > 0,
        f"fragments={settings.fragments}": settings.fragments > 1,
        "average_state=yes": settings.average_state,
        "secure_aggregation=yes": settings.secure_aggregation,
    }
    if any(wrong.values()):
        received = ", ".join(name for name, is_so in wrong.items() if is_so)
        raise ValueError(
            "With staleness, parameters are added up all at once as they are, after a fixed number of steps. "
            f"Received: {received}"
        )
    for name, dtype in types.items():
        if torch.promote_types(dtype, torch.float32) != torch.float32:
            raise ValueError(f"With staleness, parameters are added up in float32. Received: {name} in {dtype}")
