"""The exchange that every framework shares: its parameters, buckets, costs of levels and checkpoints.

``step.py`` has the order of a step.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import numpy as np

from hvdplus.compression import Array, Compressor, Context, NoCompression, Ops
from hvdplus.control.calibration import codec_seconds
from hvdplus.control.link import LevelCost
from hvdplus.control.probing import probe
from hvdplus.exchange import checkpoint, secure
from hvdplus.exchange.bucket import Bucket, BucketState, bytes_per_step, compressor_for, itemsize, make_buckets
from hvdplus.exchange.coordinator import Coordinator
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.preview import Preview
from hvdplus.exchange.two_level import TwoLevel
from hvdplus.log.runlog import RunLog
from hvdplus.settings import Settings
from hvdplus.transport import Transport

PLAIN_BUCKET_BYTES = 2 << 20
"""Size of the groups of gradients that Horovod sums in place. A sum takes some 0.15 ms of CPU time on a fast link."""


class Exchange(ABC, Generic[Array]):
    """Exchanges gradients of given shapes and types once a step; equal on every rank."""

    framework: str
    """Whose checkpoints these are."""

    def __init__(
        self,
        ops: Ops[Array],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[str],
        transport: Transport,
        settings: Settings,
        *,
        ladder: Ladder,
        auto: bool,
        log: RunLog,
        prefix: str,
        average: bool,
        tries_codecs: bool,
        compiled: Callable[[Any], Any] | None = None,
    ) -> None:
        """``prefix`` begins the names of all sums.

        Args:
            tries_codecs: measure every level's codec beforehand, and for ``auto`` the link. ``compiled``: see
                ``codec_seconds``.
        """
        self.ops = ops
        self.shapes, self.dtypes = list(shapes), list(dtypes)
        settings = secure.without_host_sums(settings)
        self.transport, self.settings, self.ladder = transport, settings, ladder
        self.bare = transport
        """What carries metadata. If ranks aggregate securely, only these are sent as they are."""
        self.prefix = prefix
        self.two_level = self.choose_two_level()
        self.wire: Transport = self.two_level or transport
        """What carries payloads; all else travels over ``transport``."""
        self.average = average
        self.scale = 1.0 / transport.size if average else 1.0
        self.alone = transport.size == 1 and (auto or ladder.names == ("none",))
        self.idle = self.alone
        """Alone on one rank, gradients stay untouched, unless the user asks for a level by name, or until a residual
        from a checkpoint of more ranks is flushed."""
        self.order: list[int] = list(reversed(range(len(self.shapes))))
        """Parameters in the order in which gradients become ready on rank 0; until it is known, last to first."""
        self.sparse: set[int] = set()
        """Parameters whose gradients are sparse on some rank, and so come back sparse on all."""
        self.tables: list[int] = []
        """Those of them that have a bucket of their own, whose rows may be exchanged by themselves."""
        self.order_known = False
        """Whether a step, or a checkpoint, has shown the order and which gradients are sparse."""
        self.not_taken = False
        """Whether a residual's share was sent in a step that the optimizer has not taken (yet)."""
        self.consolidated = False
        """Whether residuals are all ranks' mean, so that one rank's state is complete."""
        self.buckets = self.make_buckets()
        if settings.secure_aggregation and transport.size > 1:
            secure.check(self, auto)
            self.transport = self.wire = secure.Masked(transport, prefix, functools.partial(self.host_call, ops))
        self._codec_seconds: tuple[float, ...] = (0.0,) * len(ladder.names)
        """Of every level, for all parameters; 0: not measured."""
        self._codec_elements = sum(bucket.spec.size for bucket in self.buckets)
        if tries_codecs and transport.size > 1:
            specs = [bucket.spec for bucket in self.buckets if bucket.compressible]
            self._codec_seconds = codec_seconds(ops, specs, ladder.compressors, transport, compiled)
        self.coordinator = Coordinator(ladder, settings, auto=auto, ranks=transport.size, costs=self.costs(), log=log)
        part = ", ".join(map(str, transport.part))
        self.coordinator.note = f" (Ranks are counted from 0 within their group: {part}.)" if part else ""
        if tries_codecs and auto and transport.size > 1:
            self.coordinator.begin(probe(ops, self.wire, self.coordinator.payload_bytes[0]))

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in their own types."""
        elements = (bucket.spec.size * itemsize(bucket.dtype) for bucket in self.buckets)
        return sum(elements)

    def choose_two_level(self) -> TwoLevel | None:
        """The two levels that payloads travel over; None: there is one.

        Raises:
            ValueError: two levels are asked for, and there are none in this framework.
        """
        if self.settings.two_level not in ("auto", "off"):
            raise ValueError(
                f"Two levels are exchanged over in PyTorch, not in {self.framework}. Received: "
                f"{self.settings.whence('two_level')}={self.settings.two_level}"
            )
        return None

    @staticmethod
    def host_call(ops: Ops[Any], function: Callable[[np.ndarray], np.ndarray], array: Any, longer: int) -> Any:
        """``function`` of an array (1-D) in NumPy, as an array of the framework, by so many elements ``longer``."""
        return ops.from_numpy(function(ops.to_numpy(array)))

    def sums(self, dtype: str) -> bool:
        """Whether the transport can add up arrays of this type."""
        return dtype in self.transport.summable

    def make_buckets(
        self, *, plain: bool = False, order: Sequence[int] | None = None, tables: Sequence[int] | None = None
    ) -> tuple[Bucket, ...]:
        """Buckets of all parameters, those of tables last.

        Args:
            plain: buckets of dense steps that sum in place, without tables.
            order, tables: instead of the exchange's own.
        """
        tables = self.tables if tables is None else tables
        in_order = list(reversed(self.order if order is None else order))
        chosen = [i for i in in_order if not (plain and i in tables)]
        buckets = make_buckets(
            [self.shapes[i] for i in chosen],
            [self.dtypes[i] for i in chosen],
            bucket_bytes=PLAIN_BUCKET_BYTES if plain else self.settings.bucket_bytes,
            ranks=self.wire.size,
            seed=self.settings.seed,
            tapering=plain,
            apart=[] if plain else [chosen.index(i) for i in tables],
        )
        return tuple(bucket._replace(parameters=tuple(chosen[i] for i in bucket.parameters)) for bucket in buckets)

    def costs(self) -> tuple[LevelCost, ...]:
        """Costs of every level, without tables.

        If dense steps sum in place, Horovod fuses sums as it likes: their messages count as many as buckets, but the
        last message is the last of the dense steps' own buckets.
        """
        dense = self.buckets[: len(self.buckets) - len(self.tables)]
        elements = sum(bucket.spec.size for bucket in dense)
        share = elements / self._codec_elements if self._codec_elements else 0.0
        codec = [share * seconds for seconds in self._codec_seconds]
        first, *others = level_costs(dense, self.ladder.compressors, codec, self.transport.summable)
        if self.sums_in_place and self.ladder.plain(Plan()):
            last = self.make_buckets(plain=True)[-1:]
            first = first._replace(last_bytes=bytes_per_step(last, NoCompression(), self.transport.summable))
        return first, *others

    @property
    def sums_in_place(self) -> bool:
        """Whether plain dense steps sum gradients in place."""
        return False

    def make_preview(self) -> Preview:
        """Of levels that have not run."""
        return Preview(self.shapes, self.dtypes, self.sparse, seed=self.settings.seed, ranks=self.wire.size)

    def compressor(self, bucket: Bucket, level: int) -> Compressor:
        """The compressor of a bucket at a level."""
        return compressor_for(bucket, self.ladder.compressors[level])

    # -- where residuals and contexts are, for checkpoints. Those hold arrays of the framework or of NumPy: Any.

    @property
    @abstractmethod
    def states(self) -> Sequence[Any]:
        """All buckets that keep residuals and contexts."""

    @abstractmethod
    def follow(self, plan: Plan) -> None:
        """The coming step runs ``plan``."""

    @abstractmethod
    def know_gradients(self, order: Sequence[int], sparse: Sequence[int], tables: Sequence[int]) -> None:
        """Take over from a checkpoint the order and sparsity that a first step would show."""

    @abstractmethod
    def know_nothing(self) -> None:
        """Forget order and sparsity, which the checkpoint lacks: the next step is a first step."""

    @abstractmethod
    def hold(self, i: int, residual: Any, share: float = 1.0) -> None:
        """Make ``residual``, times ``share``, the residual of a parameter. None: zeros; whether there is a residual has
        to be the same on all ranks."""

    @abstractmethod
    def arrays(self, ctx: Context[Array]) -> list[Any]:
        """Copies of a context's arrays."""

    @abstractmethod
    def put_context(self, state: BucketState[Array], level: int, arrays: Sequence[Any]) -> None:
        """Make ``arrays`` of a checkpoint the context of a bucket at ``level``."""

    @abstractmethod
    def copied(self, array: Array) -> Any:
        """A copy of an array of a residual."""

    @abstractmethod
    def on_host(self, array: Any) -> np.ndarray:
        """An array of a checkpoint, for its digest."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint, see ``checkpoint.save``."""
        return checkpoint.save(self)

    def load(self, state: Mapping[str, Any]) -> str:
        """Continue from a checkpoint, see ``checkpoint.load``; return a digest that must be equal on all ranks."""
        return checkpoint.load(self, state)

    def consolidate(self) -> None:
        """Make every rank's state complete, see ``checkpoint.consolidate``."""
        checkpoint.consolidate(self)


def level_costs(
    buckets: Sequence[Bucket],
    compressors: Sequence[Compressor],
    codec: Sequence[float],
    summable: Sequence[str] = (),
) -> tuple[LevelCost, ...]:
    """Costs of every level. ``codec``: seconds a step for each compressor. ``summable``: see ``bytes_per_step``."""
    return tuple(
        LevelCost(
            bytes_per_step(buckets, compressor, summable),
            bytes_per_step(buckets[-1:], compressor, summable),
            len(buckets) * compressor.passes,
            seconds,
            compressor.keeps_residual,
            compressor.passes,
            compressor.delay_weight,
        )
        for compressor, seconds in zip(compressors, codec, strict=True)
    )
