"""What lasts from step to step, in variables that belong to no trace: residuals, contexts, the coming step's plan."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdplus.adapters.tensorflow.ops import TensorFlowOps
from hvdplus.adapters.tensorflow.tensors import flat
from hvdplus.compression import Context, Ops
from hvdplus.control.meter import StepTimes
from hvdplus.exchange.bucket import Bucket, BucketState
from hvdplus.exchange.engine import Exchange
from hvdplus.exchange.plan import Ladder, Plan
from hvdplus.exchange.preview import sees_own
from hvdplus.settings import Settings
from hvdplus.transport import Transport


class Coming(NamedTuple):
    """What the next step in the graph is given: its plan, and the last step's times."""

    variant: Any = 0
    fraction: Any = 0.0
    measurement: Any = 0
    probe_bytes: Any = 0
    preview: Any = 0
    """1: levels are tried on the step's means; 2: on the rank's own gradients; 0: none are."""
    check_weights: Any = False
    """Whether ranks compare their weights."""
    step: Any = 0.0
    codec: Any = 0.0
    exposed_comm: Any = 0.0
    comm: Any = 0.0
    input_wait: Any = 0.0
    probe: Any = 0.0


class ContextVariable:
    """All arrays of one context, end to end; integers as the floats of the same bits."""

    def __init__(self, ctx: Context[tf.Tensor], name: str) -> None:
        self._spec = ctx.spec
        self._kinds = [(tuple(array.shape), array.dtype) for array in ctx.state]
        self.variable = tf.Variable(flat(ctx.state), trainable=False, name=name)

    def context(self, side: int, values: tf.Tensor) -> Context[tf.Tensor]:
        """The context whose arrays ``values`` are."""
        ends = itertools.accumulate(math.prod(shape) for shape, _ in self._kinds)
        arrays = (
            tf.reshape(tf.bitcast(values[end - math.prod(shape) : end], kind), shape)
            for end, (shape, kind) in zip(ends, self._kinds, strict=True)
        )
        return Context(self._spec, side, tuple(arrays))


class GraphState:
    """One bucket on this rank; what belongs to a single step is in the graph."""

    def __init__(self, bucket: Bucket, ladder: Ladder, ops: Ops[tf.Tensor], *, table: bool, loses: bool) -> None:
        """``loses``: whether any level of the ladder keeps a residual."""
        self.bucket = bucket
        self.places = BucketState(bucket).places
        self.height = bucket.shapes[0][0] if table else 0
        """Rows of the only parameter, if its gradients are sparse; else 0."""
        self.contexts: dict[int, ContextVariable] = {}
        """Level -> its context, for levels that have one."""
        self.held: Any = None
        """The residual; zeros where nothing is outstanding. None: no level keeps one."""
        self.next_held: Any = None
        """The pending residual. Assigning one variable to the other copies nothing."""
        self.outstanding = False
        """Whether any rank's residual may be other than zeros."""
        if not bucket.compressible:
            return
        for level, compressor in enumerate(ladder.compressors):
            ctx = compressor.init(ops, bucket.spec)
            if ctx.state:
                self.contexts[level] = ContextVariable(ctx, f"hvdplus_context_{bucket.number}_{level}")
        if loses:
            self.make_residual()

    def make_residual(self) -> None:
        """Make the residual's variables, if there are none yet."""
        if self.held is None:
            zeros, name = tf.zeros(self.bucket.spec.size), f"hvdplus_residual_{self.bucket.number}"
            self.held = tf.Variable(zeros, trainable=False, name=name)
            self.next_held = tf.Variable(zeros, trainable=False, name=name + "_pending")

    @property
    def residual(self) -> Any:
        """What encoding lost so far; None where nothing is outstanding."""
        return self.held.read_value() if self.held is not None and self.outstanding else None

    @residual.setter
    def residual(self, values: Any) -> None:
        if self.held is not None:
            self.held.assign(values)
            self.outstanding = True


class VariablesExchange(Exchange[tf.Tensor]):
    """The part of the exchange that keeps, saves and loads."""

    framework = "tensorflow"

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[str],
        transport: Transport,
        settings: Settings,
        **rest: Any,
    ) -> None:
        """See ``Exchange``; it may be made while a step is being traced."""

        def compiled(a_round: Callable[..., Any]) -> Any:
            # As a partial: TensorFlow counts traces by code, and would warn of one a level.
            return tf.function(functools.partial(a_round), autograph=False)

        with tf.init_scope():
            super().__init__(
                TensorFlowOps(), shapes, dtypes, transport, settings, tries_codecs=True, compiled=compiled, **rest
            )
            self.finished_steps = 0
            self.times = StepTimes()
            """Times of the last step."""
            self.coming = tf.Variable(self.told(), trainable=False, name="hvdplus_coming")
            self.pends = tf.Variable(False, trainable=False, name="hvdplus_pends")
            """Whether residuals are pending."""
        self.make_states()

    @staticmethod
    def host_call(ops: Ops[Any], function: Callable[[np.ndarray], np.ndarray], array: Any, longer: int) -> Any:
        called = tf.numpy_function(function, [array], array.dtype)
        called.set_shape([None if array.shape[0] is None else array.shape[0] + longer])
        return called

    def told(self) -> np.ndarray:
        """``Coming`` of the next step, as a float64 vector."""
        plan, times = self.coordinator.plan, self.times
        every, done = self.settings.weights_check_steps, self.finished_steps
        due = bool(every) and self.transport.size > 1 and (done == 1 or (done > 0 and done % every == 0))
        coming = Coming(
            self.ladder.variant(plan),
            plan.flush_fraction,
            plan.measurement,
            plan.probe_bytes,
            (1 + sees_own(self.ladder.compressors[plan.level])) * bool(self.coordinator.unforeseen()),
            due,
            times.step,
            times.codec,
            times.exposed_comm,
            times.comm,
            times.input_wait,
            times.probe,
        )
        return np.array(coming, np.float64)

    def follow(self, plan: Plan) -> None:
        """The coming step runs ``plan``, which is the coordinator's."""
        assert plan == self.coordinator.plan
        self.coming.assign(self.told())

    @property
    def states(self) -> list[GraphState]:
        """All buckets."""
        return [] if self.idle else self._states

    def make_states(self) -> None:
        """The states of all buckets, anew."""
        loses = any(compressor.keeps_residual for compressor in self.ladder.compressors)
        dense = len(self.buckets) - len(self.tables)
        with tf.init_scope():
            self._states = [
                GraphState(bucket, self.ladder, self.ops, table=number >= dense, loses=loses)
                for number, bucket in enumerate(() if self.idle else self.buckets)
            ]
        self.preview = self.make_preview()

    def know_gradients(self, order: Sequence[int], sparse: Sequence[int], tables: Sequence[int]) -> None:
        """Take over from a checkpoint, or the first step, which gradients are sparse. A graph has no ``order``."""
        self.sparse, self.order_known = set(sparse), True
        self._start_anew([] if self.settings.secure_aggregation else list(tables))

    def know_nothing(self) -> None:
        """The next step is a first one."""
        self.sparse, self.order_known = set(), False
        self._start_anew([])

    def _start_anew(self, tables: list[int]) -> None:
        if tables != self.tables:
            self.tables = tables
            with tf.init_scope():  # costs of a Horovod compression class come from compressing zeros
                self.buckets = self.make_buckets()
                self.coordinator.resize(self.costs())
        self.coordinator.ask()
        self.make_states()

    def hold(self, i: int, residual: Any, share: float = 1.0) -> None:
        """Set a parameter's residual to ``residual`` times ``share``. None: zeros, because all ranks must have a
        residual, or none."""
        state = next(state for state in self.states if i in state.bucket.parameters)
        if not state.bucket.compressible:
            return
        state.make_residual()
        state.outstanding = True
        if residual is not None:
            whole, (part, _) = state.held.numpy(), state.places[i]
            whole[part] = np.asarray(residual).reshape(-1) * share
            state.held.assign(whole)

    def note_taken(self) -> None:
        """The optimizer has taken the step."""
        self.not_taken = self.consolidated = False
        # If the coming plan adds none of the residual, this step has sent the last of it.
        outstanding = bool(self.coordinator.plan.flush_fraction)
        for state in self.states:
            state.outstanding = outstanding and state.held is not None
        if self.alone and not outstanding:
            self.idle = True  # from the next trace on

    def arrays(self, ctx: Any) -> list[np.ndarray]:
        """A context's arrays, for a checkpoint."""
        return [np.array(array) for array in ctx.context(0, ctx.variable.read_value()).state]

    def put_context(self, state: Any, level: int, arrays: Sequence[Any]) -> None:
        """Take over a context of a checkpoint."""
        state.contexts[level].variable.assign(flat([np.asarray(array) for array in arrays]))

    def copied(self, array: Any) -> np.ndarray:
        """A copy, for a checkpoint."""
        return np.array(array)

    def on_host(self, array: Any) -> np.ndarray:
        """An array in NumPy, for a digest."""
        return np.asarray(array)

    def load(self, state: Mapping[str, Any]) -> str:
        """See ``Exchange.load``."""
        with tf.init_scope():
            self.times = StepTimes()  # the step before the coming one is another's
            digest = super().load(state)
            if self.not_taken:  # what its last step flushed is sent again
                self.not_taken = False
                self.follow(self.coordinator.repeat())
            return digest
