"""Every private interface of TensorFlow that hvdplus uses.

No result depends on one: where a name is gone, a measurement is less exact, or an error less clear. ``missing`` says so
once, at the start.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def missing() -> list[str]:
    """What this TensorFlow no longer has, and what follows from it; empty for all versions known so far."""
    op_names, found = ("_is_stateful", "_add_control_input"), {}

    def traced() -> Any:
        graph, result = tf.compat.v1.get_default_graph(), tf.constant(0)
        found["FuncGraph.experimental_acd_manager (every timestamp costs a call into Python)"] = _order_of(graph)
        has = hasattr(graph, "inputs") and all(hasattr(result.op, name) for name in op_names)
        found[
            f"FuncGraph.inputs, Operation.{', Operation.'.join(op_names)} (waiting for input counts as computing)"
        ] = has
        return result

    with tf.init_scope():
        tf.function(traced, autograph=False).get_concrete_function()
    found["control_flow_util.GraphOrParentsInXlaContext (jit_compile=True fails without a hint)"] = _xla_test()
    return [f"TensorFlow {tf.__version__} has no {name}" for name, there in found.items() if not there]


def in_xla(graph: Any) -> bool:
    """Whether XLA will compile this graph; False where it cannot be told."""
    test = _xla_test()
    return bool(test and test(graph))


def in_condition(graph: Any) -> bool:
    """Whether the graph is a branch of ``tf.cond``, by the names that TensorFlow gives to them."""
    return str(getattr(graph, "name", "")).startswith("cond_")


def timestamp(after: Sequence[Any]) -> Any:
    """Seconds since the epoch when all tensors are there, float64 0-d.

    By itself TensorFlow would run timestamps, and everything else that has effects, in the order of the program.
    """
    order = None if tf.executing_eagerly() else _order_of(tf.compat.v1.get_default_graph())
    if order is None and not tf.executing_eagerly() and after:
        # A call without effects runs whenever its input is there. It has an input, else it would become a constant.
        with tf.control_dependencies(after):
            first = tf.reshape(after[0], [-1])[:1]
        now = tf.numpy_function(lambda _: np_time(), [first], tf.float64, stateful=False)
        now.set_shape([])
        return now
    with tf.control_dependencies(after):
        now = tf.timestamp()
    if order is not None:
        order.run_independently(now.op)
    return now


def np_time() -> Any:
    """The clock of ``tf.timestamp``."""
    return tf.as_dtype(tf.float64).as_numpy_dtype(time.time())


def input_time() -> Any:
    """When the input of the step being traced, the arguments of its function, was there; None: unknown.

    The forward pass waits for the timestamp. Otherwise TensorFlow takes it on another thread, and on a busy machine (a
    core for each rank) milliseconds late. Reads of variables wait, because operations on the input that waited would no
    longer be fused.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    operations = graph.get_operations()
    if not (operations and hasattr(graph, "inputs")):
        return None
    if not all(hasattr(operations[0], name) for name in ("_is_stateful", "_add_control_input")):
        return None
    data = [tensor for tensor in graph.inputs if tensor.dtype not in (tf.resource, tf.variant)]
    # TensorFlow keeps stateful ops in the order of the program: behind one of them the timestamp would come late, and
    # waiting for it would be a cycle.
    ordered = any(
        op._is_stateful and not any(tensor.dtype == tf.resource for tensor in op.inputs) and op.type != "Placeholder"
        for op in operations
    )
    if not data or ordered:
        return None
    with tf.control_dependencies(data):
        began = tf.timestamp()
    for op in operations:
        if op.type == "ReadVariableOp":
            op._add_control_input(began.op)
    return began


def _xla_test() -> Any:
    try:
        module = importlib.import_module("tensorflow.python.ops.control_flow_util")
    except ImportError:
        return None
    return getattr(module, "GraphOrParentsInXlaContext", None)


def _order_of(graph: Any) -> Any:
    """The object that keeps a graph's effects in order; None: there is none, or it is unknown."""
    order = getattr(graph, "experimental_acd_manager", None)
    return order if hasattr(order, "run_independently") else None
