"""``DistributedOptimizer`` for Keras 3 on TensorFlow: the user's own optimizer, exchanging before it updates.

Keras 3 never calls the methods that stock Horovod overrides, so its ranks train apart without an error
(horovod#4290 reports a symptom). Every update of every Keras 3 optimizer passes through ``_backend_update_step``,
which Keras keeps for backends to override: after unscaling and after local gradient accumulation. Clipping is put
behind the exchange, where it belongs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdplus.adapters.keras.exchange import TensorFlowExchange
from hvdplus.adapters.keras.ops import TensorFlowOps
from hvdplus.launch import announce, check_same_model, check_same_settings, choose_ladder, open_log
from hvdplus.settings import Settings
from hvdplus.transport import World

_instances = itertools.count()

LOSS_SCALING = (
    "apply() stands inside a condition that ranks could decide differently, and so wait for each other for ever. "
    "Keras' LossScaleOptimizer (which mixed_float16 brings along) looks for infinities on each rank by itself. Use "
    "mixed_bfloat16, which needs no loss scaling, or compile(auto_scale_loss=False)."
)


def wrap(
    optimizer: keras.optimizers.Optimizer,
    world: World,
    *,
    compression: Any,
    settings: Mapping[str, Any] | None,
    passes: int,
    average: bool,
) -> keras.optimizers.Optimizer:
    """The optimizer as an instance of a subclass of its own class, sharing its variables.

    Raises:
        ValueError: wrapped twice, not a Keras 3 optimizer, an unknown compression, or a wrong setting.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            "This optimizer is a DistributedOptimizer already; wrapped twice it would average twice. Wrap the bare one."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer wraps a keras.optimizers.Optimizer. Received: {type(optimizer)}")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(LOSS_SCALING)
    if passes < 1:
        raise ValueError(f"backward_passes_per_step must be at least 1. Received: {passes}")
    if passes > 1:
        if optimizer.gradient_accumulation_steps:
            raise ValueError(
                "Accumulate once: either backward_passes_per_step or the optimizer's gradient_accumulation_steps. "
                f"Received: {passes} and {optimizer.gradient_accumulation_steps}"
            )
        optimizer.gradient_accumulation_steps = passes
    resolved = Settings.load(settings)
    ladder, auto = choose_ladder(compression, resolved, world, TensorFlowOps())
    announce(ladder, auto, world)
    # The class keeps name and module of the user's, so that a saved model loads without hvdplus.
    base = optimizer.__class__
    kind = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    wrapped: Any = kind.__new__(kind)  # type: ignore[call-overload]
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__["_hvdplus"] = _Setup(world, resolved, ladder, auto, average, next(_instances))
    if optimizer.built:
        wrapped._hvdplus.connect(wrapped._trainable_variables)
    return wrapped


class _Setup:
    """What the wrapper carries: the job, the choice of levels and, once variables are known, the exchange."""

    def __init__(self, world: World, settings: Settings, ladder: Any, auto: bool, average: bool, instance: int) -> None:
        self.world = world
        self.settings = settings
        self.ladder = ladder
        self.auto = auto
        self.average = average
        self.instance = instance
        self.exchange: TensorFlowExchange | None = None
        self.positions: dict[int, int] = {}
        self.loss: tf.Tensor | None = None
        self.data_time: tf.Tensor | None = None

    def connect(self, variables: Sequence[Any]) -> None:
        """Make the exchange for these variables.

        Raises:
            ValueError: a dtype that cannot be reduced, or another model on another rank.
        """
        known = ("float16", "bfloat16", "float32", "float64")
        odd = [f"{v.path} is {v.dtype}" for v in variables if str(v.dtype) not in known]
        if odd:
            raise ValueError(
                f"hvdplus exchanges float16, bfloat16, float32 and float64 gradients. Received: {', '.join(odd)}"
            )
        shapes = [tuple(v.shape) for v in variables]
        dtypes = [str(v.dtype) for v in variables]
        with tf.init_scope():
            # Not the names: `dense_7` depends on what was made before.
            check_same_model(list(zip(shapes, dtypes, strict=True)), self.world)
        with tf.init_scope():
            check_same_settings(self.settings, self.ladder, self.world, auto=self.auto, average=self.average)
        self.positions = {id(v.value): i for i, v in enumerate(variables)}
        self.exchange = TensorFlowExchange(
            shapes,
            dtypes,
            self.world.transport,
            self.settings,
            ladder=self.ladder,
            auto=self.auto,
            log=open_log(self.settings, self.world, self.instance),
            prefix=f"hvdplus{self.instance}",
            average=self.average,
        )
        self.exchange.pilot.describe_run(self.world, "keras", sum(math.prod(s) for s in shapes))


class _Distributed:
    """What is put before the user's optimizer class."""

    _hvdplus: _Setup

    def build(self, variables: Sequence[Any]) -> None:
        """As in Keras; buckets, residuals and contexts are made here too, once."""
        super().build(variables)  # type: ignore[misc]
        self._hvdplus.connect(variables)

    def apply(self, grads: list[Any], trainable_variables: Any = None) -> None:
        """As in Keras. Refused where ranks could decide differently whether to call it, and so wait for ever."""
        inside = "" if tf.executing_eagerly() else getattr(tf.compat.v1.get_default_graph(), "name", "")
        scaled = tf.executing_eagerly() and keras.config.dtype_policy().compute_dtype == "float16"
        if self._hvdplus.world.transport.size > 1 and (inside.startswith("cond_") or scaled):
            raise ValueError(LOSS_SCALING)
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """As in Keras; every train step passes its loss through here, so the run log learns it."""
        self._hvdplus.loss = loss
        self._hvdplus.data_time = _input_time()
        return super().scale_loss(loss)  # type: ignore[misc]

    def _clip_gradients(self, grads: list[Any]) -> list[Any]:
        """Nothing yet: clipping comes after the exchange, once."""
        return grads

    def _backend_update_step(self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any) -> None:
        """Exchange, clip, update."""
        setup = self._hvdplus
        exchange = setup.exchange
        assert exchange is not None
        loss, data_time = setup.loss, setup.data_time
        setup.loss = setup.data_time = None
        places = [setup.positions[id(getattr(v, "value", v))] for v in trainable_variables]
        present = dict(zip(places, grads, strict=True))
        # Keras drops variables without a gradient; the exchange is the same in every step, so they send zeros.
        complete = [present.get(i, missing) for i, missing in enumerate(exchange.zeros())]
        reduced = exchange.reduce(complete, loss, data_time, learning_rate)
        grads = super()._clip_gradients([reduced[place] for place in places])  # type: ignore[misc]
        super()._backend_update_step(grads, trainable_variables, learning_rate)  # type: ignore[misc]
        exchange.end_step([tf.convert_to_tensor(v) for v in trainable_variables])

    @property
    def hvdplus(self) -> Any:
        """The pilot: present plan, level names, measured times, run log."""
        if self._hvdplus.exchange is None:
            raise RuntimeError("The optimizer has not been built yet: train first, or call optimizer.build(variables).")
        return self._hvdplus.exchange.pilot


def _input_time() -> tf.Tensor | None:
    """When the input of the step that is being traced was there: its function's arguments are that input.

    The forward pass is made to wait for the timestamp. Left to itself, TensorFlow takes it on another thread, and on a
    busy machine (a core for each rank) milliseconds late. It waits where it reads variables, because operations on the
    input itself would no longer be fused.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    data = [tensor for tensor in graph.inputs if tensor.dtype not in (tf.resource, tf.variant)]
    # TensorFlow keeps stateful ops in the order of the program: behind one of them the timestamp would come late, and
    # waiting for it would be a cycle.
    ordered = any(
        op._is_stateful and not any(tensor.dtype == tf.resource for tensor in op.inputs) and op.type != "Placeholder"
        for op in graph.get_operations()
    )
    if not data or ordered:
        return None
    with tf.control_dependencies(data):
        began = tf.timestamp()
    for op in graph.get_operations():
        if op.type == "ReadVariableOp":
            op._add_control_input(began.op)
    return began
