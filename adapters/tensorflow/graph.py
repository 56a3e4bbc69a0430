"""The exchange in TensorFlow: part of the compiled train step, or run eagerly, with the same code.

    gradients ─► every bucket: switch over the step variants (send_bucket ─► all-reduce ─► receive_bucket)
              ─► metadata: one small all-reduce ─► host: coordinator, next plan
              ─► mend (NaN, or the rest in full width) ─► contexts, pending residuals ─► means
    optimizer has taken the step ─► end_step: pending residuals count

The graph holds every variant of the ladder once; a variable that is written between steps picks one by
``tf.switch_case``. Sums begin as soon as their gradients are there, because nothing in the graph orders them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdplus.adapters.tensorflow import private, report, settle, tensors
from hvdplus.adapters.tensorflow.bucket import exchange_bucket, mask_size, used_rows
from hvdplus.adapters.tensorflow.timing import Stamps, StepClock, packed, timed, unpacked
from hvdplus.adapters.tensorflow.variables import Coming, VariablesExchange
from hvdplus.exchange import checkpoint
from hvdplus.exchange.metadata import read, weights_differ
from hvdplus.exchange.plan import Plan

COMPILED_FOR_OTHERS = (
    "Ranks have come or gone since this step was compiled. Make its tf.function anew inside the function that "
    "hvd.elastic.run runs."
)


class Heard(NamedTuple):
    """Loss and input of the step that is being traced."""

    loss: Any = None
    data_time: Any = None
    """When the step's input was there; None: unknown."""
    graph: Any = None
    """Where they are; None: they were computed eagerly."""

    @property
    def within_reach(self) -> bool:
        """Whether they are of the graph that is being made, or of one around it."""
        here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        while here is not None and here is not self.graph:
            here = getattr(here, "outer_graph", None)
        return here is self.graph


def heard(loss: tf.Tensor, data_time: Any = None) -> Heard:
    """In the graph that is being made."""
    return Heard(loss, data_time, None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())


class GraphExchange(VariablesExchange):
    """Exchanges gradients of given variables once a step."""

    def __init__(
        self, variables: Callable[[], Sequence[Any]], names: Sequence[str], *args: Any, **keywords: Any
    ) -> None:
        """``variables``: returns the variables to compare between ranks; ``names``: theirs, for messages."""
        super().__init__(*args, **keywords)
        self.variables, self.names = variables, list(names)
        self.traces = 0
        """How often the exchange was traced (or, eagerly, run)."""
        self._closed = False
        self._heard = Heard()
        self._clock = StepClock()
        for line in private.missing() if self.transport.rank == 0 else ():
            checkpoint.say(line)

    def abandon(self) -> None:
        """Forget the step in flight: the transport has failed or has ended."""
        self._heard = Heard()
        self._clock.forget()
        self._waits_no_more()

    def close(self) -> None:
        """Stop: another exchange takes over. To run a step that was compiled with this one is an error."""
        self._closed = True
        self._waits_no_more()

    def hear(self, loss: tf.Tensor) -> None:
        """Note the step's loss, for the run log, and in a compiled step when its input was there."""
        self._heard = heard(loss, private.input_time())

    def agree(self, here: tf.Tensor) -> tf.Tensor:
        """Whether ``here`` is true on all ranks."""
        elsewhere = tf.reshape(tf.where(here, 0.0, 1.0), [1])
        return self.bare.wait(self.bare.start(elsewhere, f"{self.prefix}.agree"))[0] == 0

    def sum(self, array: tf.Tensor, name: str, scale: float = 1.0) -> tf.Tensor:
        """The sum over all ranks, times ``scale``."""
        return self.transport.wait(self.transport.start(array, name, scale))

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, grads: Sequence[Any], learning_rate: Any = None, loss_scale: tf.Tensor | None = None
    ) -> list[tf.Tensor | None]:
        """Mean gradients over all ranks. Call ``end_step`` or ``skip_step`` afterwards.

        Args:
            grads: gradients of all variables, in order; IndexedSlices come back dense. None: no rank has a gradient
                (else the step is an error); zeros are sent, and None comes back.
            learning_rate: 0-d, of this step, for the coordinator; None: unknown.
            loss_scale: divisor of the gradients; None: 1.
        """
        self.traces += 1
        told, self._heard = self._heard if self._heard.within_reach else Heard(), Heard()
        if loss_scale is not None:
            grads = [None if grad is None else tensors.divided(grad, loss_scale) for grad in grads]
        absent = [grad is None for grad in grads]
        shapes = zip(grads, self.shapes, self.dtypes, strict=True)
        grads = [tf.zeros(shape, dtype) if grad is None else grad for grad, shape, dtype in shapes]
        self.see_sparse(grads)
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        ready = private.timestamp(dense)
        coming = Coming(*tf.unstack(self.coming.read_value()))
        variant = tf.cast(coming.variant, tf.int32)
        parts, begins, ends, row_bytes = [], [], [], []
        for state in self.states:
            vector, begin = timed(tensors.packed(state.bucket, dense))
            rows = used_rows(self, state, grads) if state.height else None
            part = exchange_bucket(self, state, variant, coming.fraction, vector, rows)
            summed, end = timed(part.summed)
            parts.append(part._replace(summed=summed))
            begins.append(begin)
            ends.append(end)
            row_bytes += [part.sent_bytes + mask_size(self, state)] if state.height else []
        done = private.timestamp([part.summed for part in parts])
        measured = report.measured(self, coming, variant, dense, parts)
        weights = report.weights(self, coming)
        mine = report.metadata(self, coming, parts, told.loss, learning_rate, measured, weights, absent)
        total = self.bare.wait(self.bare.start(self._watched(mine), f"{self.prefix}.metadata"))
        shown, spent = report.preview(self, coming, dense, parts, [done, total])
        probe = report.probe(self, coming, [done, total]) + spent  # never both
        stamps = Stamps(ready if told.data_time is None else told.data_time, ready, done, probe, begins, ends)
        sums_finite = tf.reduce_all([part.sum_finite for part in parts] or [True])
        sizes = [state.bucket.spec.size for state in self.states]
        row_bytes = tf.add_n(row_bytes or [0])
        arguments = [tf.stack(list(coming)), total, shown, sums_finite, row_bytes, weights, packed(stamps)]
        answer = tf.numpy_function(functools.partial(self._between_steps, sizes), arguments, tf.float64)
        answer.set_shape([len(Coming._fields) + 3])
        self.coming.assign(answer[:-3])
        mended = settle.mended(self, tf.cast(answer[-1], tf.int32), parts)
        settle.keep(self, variant, answer[-3] > 0, answer[-2] > 0, mended, absent)
        settle.hand_over(self, variant, tf.cast(answer[0], tf.int32))
        return settle.delivered(self, mended, dense, absent)

    def _watched(self, mine: tf.Tensor) -> tf.Tensor:
        """This rank's metadata, from which on it waits for other ranks, until ``_waits_no_more``."""
        patience = self.bare.patience
        if patience is None:
            return mine

        def begin(first: np.ndarray) -> np.ndarray:
            patience.begin(self.prefix, f"sum '{self.prefix}.metadata' of a training step")
            return first

        first = tf.numpy_function(begin, [mine[:1]], mine.dtype)
        first.set_shape([1])
        return tf.concat([first, mine[1:]], axis=0)

    def _waits_no_more(self) -> None:
        if self.bare.patience is not None:
            self.bare.patience.end(self.prefix)

    def end_step(self, updated: Sequence[tf.Tensor]) -> None:
        """The optimizer has taken the step: ``updated`` are values read after it."""
        with tf.control_dependencies(updated):
            now = tf.timestamp()
        self.commit()
        tf.numpy_function(self._note_end, [now], [])

    def commit(self) -> None:
        """Pending residuals become residuals."""
        states = [state for state in self.states if state.held is not None]

        def store() -> tf.Tensor:
            for state in states:
                state.held.assign(state.next_held.read_value())
            return self.pends.assign(False)

        if states:
            tf.cond(self.pends, store, lambda: False)

    def skip_step(self) -> None:
        """The optimizer has not taken the step: the residual that it flushed is still outstanding."""
        if self.states:
            self.pends.assign(False)
            coming = tf.numpy_function(self._note_skipped, [], tf.float64)
            self.coming.assign(tf.ensure_shape(coming, self.coming.shape))

    def see_sparse(self, grads: Sequence[Any]) -> None:
        """In the first step: give every sparse gradient a bucket of its own."""
        if self.order_known or self.idle or self.settings.secure_aggregation:
            return
        mine = [i for i, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
        with tf.init_scope():
            found = sorted(set().union(*self.transport.gather_objects(mine)))
            if not found:
                self.order_known = True
                return
            residuals = checkpoint.residuals(self)  # of a loaded state that was saved before any step
            self.know_gradients(self.order, found, found)
            for i, residual in residuals.items():
                self.hold(i, residual)

    # -- on the host

    def _between_steps(
        self,
        sizes: Sequence[int],
        ran: np.ndarray,
        total: np.ndarray,
        shown: np.ndarray,
        sums_finite: Any,
        row_bytes: Any,
        weights: np.ndarray,
        stamps: np.ndarray,
    ) -> np.ndarray:
        """Once a step: (``Coming``, 1 if all was finite, 1 if contexts learn from the step, ``settle.remedy``)."""
        self._waits_no_more()
        if self._closed:
            raise RuntimeError(COMPILED_FOR_OTHERS)
        step = Coming(*ran.tolist())
        used = self.ladder.variants[int(step.variant)]
        measurement, probe_bytes = int(step.measurement), int(step.probe_bytes)
        plan = Plan(used.level, used.side, step.fraction, used.asks, measurement, probe_bytes)
        metadata = read(total, self.transport.size)
        if step.preview:
            self.coordinator.foresee(shown)
        if "weights" in metadata.odd:
            everyone = self.transport.gather_objects(weights.tolist())
            message = weights_differ(metadata.odd["weights"], everyone, self.names)
            raise RuntimeError(message + self.coordinator.note)
        healthy = bool(sums_finite) and not metadata.nonfinite
        self.coordinator.row_bytes = int(row_bytes)
        self.coordinator.observe(plan, metadata, healthy)
        self.not_taken = healthy and self.ladder.flushes(plan)
        self.finished_steps += 1
        codec = self.coordinator.costs[plan.level].codec
        self.times = self._clock.read(unpacked(stamps), sizes, codec, self.transport.size == 1)
        overflow = metadata.overflow and self.ladder.keeps_residual(plan)
        learns = healthy and (self.coordinator.schedule.learns(overflow) or plan.asks)
        self.coordinator.advance()
        return np.array([*self.told(), healthy, learns, settle.remedy(self, used, healthy, overflow)], np.float64)

    def _note_end(self, now: Any) -> None:
        self.note_taken()
        self._clock.step_ended(float(now))

    def _note_skipped(self) -> np.ndarray:
        if self.not_taken:
            self.not_taken = False
            self.coordinator.repeat()
        return self.told()


def check_place(size: int) -> None:
    """Raise ValueError where an exchange could hang, or cannot be compiled."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if private.in_xla(graph):
        raise ValueError(
            "XLA cannot compile sums over ranks. Received: a step with jit_compile=True. Use "
            "model.compile(..., jit_compile=False), or tf.function(jit_compile=False)."
        )
    if size > 1 and private.in_condition(graph):
        raise ValueError(
            "The optimizer is applied inside a condition that ranks could decide differently, and so wait for each "
            "other for ever. Apply it in every step, on every rank."
        )
