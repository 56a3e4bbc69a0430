"""Two levels: a host's ranks add up their gradients densely, and one compressed stream a host crosses the network.

    gradients + residual ─► sum over the host's ranks (dense, shared memory) ─► its owner encodes ─┐
    mean ◄─ decode ◄─ every rank of the host gets the total ◄─ sum over hosts, by the owners ◄─────┘

So a residual, encoding, the head room of integers and the noise of rounding are a host's and not a rank's: every bucket
has an owner among the host's ranks, who alone encodes it, sends it and keeps what is left. Whatever its name, the first
level may be any part of a host, such as the devices that NVLink connects.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdplus.compression import Array, Ops, Spec
from hvdplus.exchange import passes
from hvdplus.exchange.backend import EagerArray
from hvdplus.transport import OBJECTS, Transport

if TYPE_CHECKING:
    from hvdplus.exchange.bucket import BucketState
    from hvdplus.exchange.eager import EagerExchange

RUNS = 3
SAMPLE_BYTES = 1 << 20
"""Most bytes of a sum by which the two ways are compared."""
BETTER = 0.9
"""Two levels are chosen if they take at most so many times as long as one."""


class _Call(NamedTuple):
    array: Any
    sending: Any
    """Handle of the sum over hosts; None: another rank of this host sends."""
    name: str
    scale: float


class TwoLevel(Transport):
    """A transport (see ``hvdplus.transport.Transport``) of payloads that are the same on all ranks of a host."""

    negotiates = False

    def __init__(self, everyone: Transport, local: Transport, between: Transport) -> None:
        """
        Args:
            everyone: of all ranks.
            local: of this host's ranks.
            between: of the ranks that have this one's place on their hosts.
        """
        self.everyone, self.local, self.between = everyone, local, between
        local.waits_on_device = between.waits_on_device = False  # the host waits, and so knows how long sums take
        self.name, self.summable = everyone.name, everyone.summable
        self.rank, self.size = between.rank, between.size
        self.local_rank, self.local_size = everyone.local_rank, everyone.local_size
        self._next = 0

    def owns(self, bucket: int) -> bool:
        """Whether this rank is the one of its host that encodes and sends the bucket of this number."""
        return bucket % self.local.size == self.local.rank

    def start(self, array: Any, name: str, scale: float = 1.0, bucket: int | None = None) -> _Call:
        """``bucket``: whose owner sends; of others, which all ranks of a host have alike, ranks take turns."""
        if bucket is None:
            bucket, self._next = self._next, self._next + 1
        mine = self.owns(bucket)
        return _Call(array, self.between.start(array, name) if mine else None, name, scale)

    def done(self, handle: _Call) -> bool:
        return handle.sending is not None and self.between.done(handle.sending)  # of others' sums nothing is known

    def wait(self, handle: _Call) -> Any:
        mine = handle.sending is not None
        total = self.between.wait(handle.sending) if mine else _zeros(handle.array)
        return self.local.wait(self.local.start(total, f"{handle.name}.shared", handle.scale))

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        return self.everyone.gather_objects(value, what)

    def barrier(self) -> None:
        self.everyone.barrier()

    def shutdown(self) -> None:
        self.between.shutdown()
        self.local.shutdown()


def _zeros(array: Any) -> Any:
    """As many of the same type; of a tensor, a tensor."""
    return array.new_zeros(array.shape) if hasattr(array, "new_zeros") else np.zeros_like(array)


def groups(hosts: Sequence[str], share: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks that share the first level, and ranks that exchange over the second; each rank is in one group of each.

    Args:
        hosts: of every rank.
        share: so many neighbouring ranks share the first level; 0: all of a host.

    Raises:
        ValueError: groups of unequal numbers of ranks.
    """
    of_host = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
    if share:
        of_host = [ranks[at : at + share] for ranks in of_host for at in range(0, len(ranks), share)]
    sizes = sorted({len(ranks) for ranks in of_host})
    if len(sizes) > 1:
        raise ValueError(
            "Two levels want the same number of ranks on every host"
            + (f", and one that {share} divides" if share else "")
            + f". Received: {' and '.join(map(str, sizes))}"
        )
    return of_host, [list(ranks) for ranks in zip(*of_host, strict=True)]


def split(transport: Any, hosts: Sequence[str], wanted: int | str) -> TwoLevel | None:
    """The two levels of a job; None: there are none. All ranks call it.

    Args:
        wanted: the setting ``two_level``.

    Raises:
        ValueError: two levels are asked for, and cannot be.
    """
    unasked = wanted == "auto" and not transport.splits_unasked
    if wanted == "off" or unasked or transport.size == 1:
        return None
    share = int(wanted) if wanted not in ("auto", "on") else 0
    try:
        shared, between = groups(hosts, share)
        if len(shared) == 1 or len(between) == 1:
            raise ValueError(
                "Two levels want several hosts, with several ranks on each. Received: "
                f"{len(shared)} x {len(between)} ranks"
            )
        if not hasattr(transport, "split"):
            raise ValueError(
                "Two levels need PyTorch, and torch.distributed, mpi4py or Horovod over MPI. Received: transport "
                f"{transport.name}"
            )
        return TwoLevel(transport, transport.split(shared), transport.split(between))
    except ValueError:
        if wanted == "auto":
            return None
        raise


def pays(ops: Ops[Array], levels: TwoLevel, dense_bytes: int, payload_bytes: int) -> bool:
    """Whether two levels take less time than one for a step's sums, measured; the same on every rank."""

    def seconds(transport: Any, size: int, name: str) -> float:
        sample = min(size, SAMPLE_BYTES) // 4 * 4
        took = []
        for run in range(RUNS):
            array = ops.from_numpy(np.zeros(max(1, sample // 4), np.float32))
            levels.barrier()
            began = time.perf_counter()
            ops.to_numpy(ops.reshape(transport.wait(transport.start(array, f"{name}.{run}")), (-1,))[:1])
            took.append(time.perf_counter() - began)
        return median(took) * max(1.0, size / max(4, sample))

    one = seconds(levels.everyone, payload_bytes, "hvdplus.one_level")
    two = seconds(levels.local, dense_bytes, "hvdplus.host") + seconds(levels, payload_bytes, "hvdplus.two_levels")
    ranks = levels.gather_objects((one, two), "one level or two")
    return bool(max(two for _, two in ranks) < BETTER * max(one for one, _ in ranks))


def choose(x: EagerExchange[EagerArray]) -> TwoLevel | None:
    """The two levels that an exchange's payloads travel over: those that the transport has, and with ``auto`` only if
    they are faster. The same on every rank.

    Raises:
        ValueError: the exchange's own settings ask for others than there are.
    """
    levels: TwoLevel | None = x.transport.two_level
    wanted, there = x.settings.two_level, levels.local.size if levels else 1
    if wanted == "off" or x.transport.size == 1 or (wanted == "auto" and levels is None):
        return None
    if levels is None or wanted not in ("auto", "on", there):
        raise ValueError(
            f"two_level is settled when hvd.init() starts the transport: set HVDPLUS_TWO_LEVEL. There, {there} "
            f"rank{'s share' if there > 1 else ' shares'} a level. Received: {x.settings.whence('two_level')}={wanted}"
        )
    if wanted != "auto":
        return levels
    elements = sum(math.prod(shape) for shape in x.shapes)
    spec = Spec(tuple(x.shapes), 0, 0, x.transport.size)
    least = min(compressor.step_bytes(spec) for compressor in x.ladder.compressors)
    return levels if pays(x.ops, levels, 4 * elements, least) else None


# -- in a step


def sum_over_host(
    x: EagerExchange[EagerArray],
    state: BucketState[EagerArray],
    vector: EagerArray,
    go_on: Callable[[EagerArray], None],
) -> None:
    """Begin the sum of a packed bucket over this host's ranks; ``go_on`` sends what it is given, the sum."""
    assert x.two_level is not None
    levels, local = x.two_level, x.two_level.local

    def summed(vector: EagerArray) -> None:
        if x.plan.measurement and levels.owns(state.bucket.number):
            residual = state.residual if x.plan.flush_fraction else None
            share = x.plan.flush_fraction * (x.loss_scale / x.sent_scale)
            own = vector if residual is None else vector - residual * share
            x.reporter.note_norms(x, [own * x.sent_scale])
        go_on(vector)

    handle = local.start(vector, f"{x.tensor_name(state)}.host")
    passes.follow(x, passes.Stage(state, local, handle, summed))
