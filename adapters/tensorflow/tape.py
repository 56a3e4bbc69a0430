"""``DistributedGradientTape``: a tape whose gradients are means over all ranks, for training loops without Keras.

Scripts make a new tape in every step, or once in every trace of a compiled one. So residuals, contexts and decisions
belong to the list of sources, and are found again by it.

A tape does not see whether its gradients are used. The next call of ``gradient`` does: the step was taken if a source
has changed since. If none has, the pending residual is dropped, and the flushed one is sent again. Two limits follow: a
step that changes no weight (a learning rate of 0) counts as not taken; if a script adds up several gradients before one
step, only the last one's residual is kept.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdplus.adapters.tensorflow import tensors
from hvdplus.adapters.tensorflow.graph import GraphExchange, check_place
from hvdplus.adapters.tensorflow.ops import TensorFlowOps
from hvdplus.agree import check_types, choose_ladder, join, next_instance, refuse_local_steps
from hvdplus.settings import Settings
from hvdplus.transport import World

_Key = tuple[Any, ...]
_exchanges: dict[_Key, tuple[list[weakref.ref[Any]], TapeExchange]] = {}
"""ids of sources, and how they are exchanged -> (weak references to the sources, their exchange)."""


def wrap(
    tape: tf.GradientTape,
    world: World,
    *,
    compression: Any,
    settings: Mapping[str, Any] | None,
    average: bool,
    scale_local_gradients: bool,
) -> tf.GradientTape:
    """The tape as an instance of a subclass of its own class, with what it has recorded.

    Raises:
        ValueError: wrapped twice, or not a tape.
    """
    if isinstance(tape, _Distributed):
        raise ValueError("This tape is a DistributedGradientTape already; wrapped twice it would average twice.")
    if not isinstance(tape, tf.GradientTape):
        raise ValueError(f"DistributedGradientTape wraps a tf.GradientTape. Received: {type(tape)}")
    kind = type(tape.__class__.__name__, (_Distributed, tape.__class__), {})
    wrapped: Any = kind.__new__(kind)  # type: ignore[call-overload]
    wrapped.__dict__.update(tape.__dict__)
    wrapped._world, wrapped._compression, wrapped._settings = world, compression, settings
    wrapped._average, wrapped._local = average, []
    wrapped._local_scale = 1.0 / world.transport.size if scale_local_gradients else 1.0
    return wrapped


def forget() -> None:
    """Close all exchanges: the job has ended, or ranks have come or gone."""
    for _, exchange in _exchanges.values():
        exchange.close()
    _exchanges.clear()


class TapeExchange(GraphExchange):
    """The exchange of a tape's sources, which it does not keep alive."""

    def __init__(self, sources: Sequence[Any], *args: Any, **keywords: Any) -> None:
        # Only variables are compared between ranks: tensors that a script computes may differ.
        variables = [source for source in sources if hasattr(source, "assign")]
        refs = [weakref.ref(variable) for variable in variables]
        names = [getattr(variable, "path", variable.name) for variable in variables]
        super().__init__(lambda: [ref() for ref in refs], names, *args, **keywords)
        self._places = [i for i, source in enumerate(sources) if hasattr(source, "assign")]
        with tf.init_scope():
            zeros = tf.zeros(len(refs), tf.int64)
            self._seen = tf.Variable(zeros, trainable=False, name="hvdplus_fingerprints")
            """Fingerprints of the variables at the last call."""

    def reduce(self, grads: Sequence[Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """See ``GraphExchange.reduce``; no call of ``end_step`` or ``skip_step`` follows."""
        self.see_sparse(grads)
        self.settle_last_step()
        return super().reduce(grads, *arguments, **keywords)

    def settle_last_step(self) -> None:
        """Commit the last step if a variable has changed, else skip it; alike on all ranks, as their weights are."""
        if not (self._places and any(state.held is not None for state in self.states)):
            return
        pairs = zip(self._places, self.variables(), strict=True)
        prints = tf.stack([tensors.fingerprint(variable, whole=i in self.sparse) for i, variable in pairs])
        changed = tf.reduce_any(prints != self._seen.read_value())
        self._seen.assign(prints)

        def settle() -> tf.Tensor:
            tf.cond(changed, self._commit_all, self._skip_all)
            return tf.constant(0)

        tf.cond(self.pends, settle, lambda: tf.constant(0))

    def _commit_all(self) -> tf.Tensor:
        self.commit()
        return tf.constant(0)

    def _skip_all(self) -> tf.Tensor:
        self.skip_step()
        return tf.constant(0)

    def state(self) -> dict[str, Any]:
        """See ``Exchange.state``; first finds out whether the last step was taken."""
        self.settle_last_step()
        self.note_taken()  # a skipped step has been repeated by now
        return super().state()


class _Distributed:
    """Base class that comes before the tape's class."""

    _world: World
    _compression: Any
    _settings: Mapping[str, Any] | None
    _average: bool
    _local: list[Any]
    _local_scale: float

    def register_local_source(self, source: Any) -> None:
        """Leave this source's gradient on its rank."""
        self._local.append(source)

    @tf.autograph.experimental.do_not_convert
    def gradient(self, target: Any, sources: Any, *arguments: Any, **keywords: Any) -> Any:
        """As in TensorFlow, averaged over all ranks; sparse gradients come back dense.

        Every rank calls it in every step, with the same sources in the same order.
        """
        flat = tf.nest.flatten(sources)
        shared = [i for i, source in enumerate(flat) if not any(source is local for local in self._local)]
        check_place(self._world.transport.size)
        exchange = self._exchange_of([flat[i] for i in shared])
        if isinstance(target, tf.Tensor) and target.shape.rank == 0:
            exchange.hear(target)
        grads = tf.nest.flatten(super().gradient(target, sources, *arguments, **keywords))  # type: ignore[misc]
        for i, grad in enumerate(grads):
            if grad is not None and i not in shared:
                grads[i] = tf.convert_to_tensor(grad) * self._local_scale
        for i, mean in zip(shared, exchange.reduce([grads[i] for i in shared]), strict=True):
            grads[i] = mean
        return tf.nest.pack_sequence_as(sources, grads)

    def _exchange_of(self, sources: Sequence[Any]) -> TapeExchange:
        settings = Settings.load(self._settings)
        how = getattr(self._compression, "name", self._compression)  # a script may make a new object in every step
        key = (*map(id, sources), str(how), str(settings), self._average)
        known, exchange = _exchanges.get(key, ([], None))
        gone = any(ref() is not source for ref, source in zip(known, sources, strict=False))
        if exchange is None or gone or exchange.bare is not self._world.transport:
            with tf.init_scope():  # what lasts belongs to no trace
                exchange = self._make(sources, settings)
            forget_it = lambda _: _exchanges.pop(key, None)  # noqa: E731
            _exchanges[key] = [weakref.ref(source, forget_it) for source in sources], exchange
        return exchange

    def _make(self, sources: Sequence[Any], settings: Settings) -> TapeExchange:
        shapes = [tuple(source.shape) for source in sources]
        dtypes = [tf.as_dtype(source.dtype).name for source in sources]
        check_types([getattr(source, "name", "a source") for source in sources], dtypes)
        refuse_local_steps(self._compression, settings, "A tape", "DistributedOptimizer(every=)")
        exchange: TapeExchange = join(
            functools.partial(TapeExchange, sources, shapes, dtypes, average=self._average),
            self._world,
            settings,
            *choose_ladder(self._compression, settings, self._world, TensorFlowOps()),
            framework="tensorflow",
            instance=next_instance(),
            shapes=shapes,
            dtypes=dtypes,
            average=self._average,
        )
        return exchange

    @property
    def hvdplus(self) -> Any:
        """The coordinator of the sources used last: present plan, level names, measured times, run log."""
        if not _exchanges:
            raise RuntimeError("No gradient has been computed yet.")
        return list(_exchanges.values())[-1][1].coordinator
