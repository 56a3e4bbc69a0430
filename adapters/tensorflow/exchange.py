"""The exchange in TensorFlow: part of the compiled train step, or run eagerly, with the same code.

The graph holds every program of the ladder once; a variable that is written between steps picks one by
``tf.switch_case``. Reductions start as soon as their gradients are there, because nothing in the graph orders them;
the host sees one small call a step, in which the pilot reads the summed side tensor and makes the next plan.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdplus import saved
from hvdplus.adapters.tensorflow.ops import TensorFlowOps
from hvdplus.adapters.tensorflow.rows import mask_bytes, sum_of_rows, union_of_rows
from hvdplus.buckets import DENSE_ONLY, SPARSE, Bucket, bytes_per_step, compressor_for, make_buckets
from hvdplus.calibration import codec_seconds
from hvdplus.compression import Compressor, Context
from hvdplus.costmodel import LevelCost, level_costs
from hvdplus.exchange import SLOT_FLOATS, Ladder, Plan, Program, SideSlot, read_side, told_apart
from hvdplus.log.runlog import RunLog
from hvdplus.meter import StepTimes, union_seconds
from hvdplus.pilot import Pilot
from hvdplus.residual import join, unreleased
from hvdplus.settings import Settings
from hvdplus.transport import Transport

FRAMEWORK = "tensorflow"
"""Whose states these are."""
_PLAN_VALUES = 5
"""Values that the host returns to the graph besides the next slot's times: program, release, whether to gauge, bytes of
a sounding, whether all was finite."""


class _Lane(NamedTuple):
    """One bucket on this rank; the variables live across steps and traces."""

    bucket: Bucket
    residual: tf.Variable | None
    """What encoding lost so far; None if no level of the ladder loses anything."""
    states: dict[int, tf.Variable]
    """Level -> all arrays of its context, end to end; integers as the floats of the same bits."""
    arrays: dict[int, list[tuple[tuple[int, ...], tf.DType]]]
    """Level -> their shapes and types."""
    height: int
    """Rows of the one parameter in it, if its gradients are sparse; else 0."""


class TensorFlowExchange:
    """Exchanges the gradients of ``variables`` once a step."""

    def __init__(
        self,
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
    ) -> None:
        """``shapes``, ``dtypes``: of all trainable variables, in the same order on every rank."""
        self.transport = transport
        self.ops = TensorFlowOps()
        self.traces = 0
        """How often the exchange was traced (or, eagerly, run)."""
        self._shapes, self._dtypes = list(shapes), list(dtypes)
        self._prefix = prefix
        self._ladder = ladder
        self._average = average
        self._closed = False
        self._scale = 1.0 / transport.size if average else 1.0
        # Alone there is nobody to exchange with: gradients stay untouched unless a level is asked for by name.
        self.idle = transport.size == 1 and (auto or ladder.names == ("none",))
        self._settings = settings
        self.buckets = self._cut(())
        self._codec_seconds: tuple[float, ...] = (0.0,) * len(ladder.names)
        """Of every level, for all that is not sparse. Within a compiled step the codec cannot be told from the wire."""
        if transport.size > 1:
            compiled = functools.partial(tf.function, autograph=False)
            with tf.init_scope():
                self._codec_seconds = codec_seconds(self.ops, self.buckets, ladder.compressors, transport, compiled)
        self.pilot = Pilot(ladder, settings, auto=auto, ranks=transport.size, costs=self._costs(self.buckets), log=log)
        self._last_done = self._last_end = 0.0
        self._sparse: list[int] | None = None
        """Variables with sparse gradients; None: no gradient was seen yet."""
        self._heard: tuple[tf.Tensor, tf.Tensor | None] | None = None
        """Of the step that is being traced: its loss, and when its input was there."""
        self._consolidated = False
        """Whether residuals are all ranks' mean, so that one rank's state is everybody's."""
        with tf.init_scope():  # also when the first step is being traced: variables belong to no trace
            plan = self.pilot.plan
            self._program = tf.Variable(ladder.program(plan), dtype=tf.int32, trainable=False, name="hvdplus_program")
            self._release = tf.Variable(plan.release, dtype=tf.float32, trainable=False, name="hvdplus_release")
            self._gauge = tf.Variable(plan.gauge, dtype=tf.bool, trainable=False, name="hvdplus_gauge")
            self._sounding = tf.Variable(plan.sounding, dtype=tf.int32, trainable=False, name="hvdplus_sounding")
            self._times = tf.Variable(tf.zeros(len(StepTimes._fields)), trainable=False, name="hvdplus_times")
        self._loses = any(compressor.keeps_residual for compressor in ladder.compressors)
        self._make_lanes([])

    def abandon(self) -> None:
        """Forget what is on its way, as the transport has failed or has ended."""
        self._heard = None
        self._last_done = self._last_end = 0.0

    def close(self) -> None:
        """Let gradients be: another exchange takes over. A step that was compiled with this one is an error."""
        self._closed = True

    def hear(self, loss: tf.Tensor) -> None:
        """The step's loss, for the run log; from where the step's input was there first, in a compiled step."""
        self._heard = loss, _input_time()

    def agree(self, here: tf.Tensor) -> tf.Tensor:
        """Whether it is so on all ranks."""
        elsewhere = self._sum(tf.reshape(tf.where(here, 0.0, 1.0), [1]), f"{self._prefix}.agree")
        return elsewhere[0] == 0

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self, grads: Sequence[Any], learning_rate: Any = None, loss_scale: tf.Tensor | None = None
    ) -> list[tf.Tensor | None]:
        """Mean gradients over all ranks. Call ``end_step`` after the optimizer has used them.

        Args:
            grads: gradients of all variables, in order; IndexedSlices come back dense. None: there is none, on no rank
                (else the step is an error), and none comes back; zeros are sent.
            learning_rate: 0-d, of this step, for the pilot; None: unknown.
            loss_scale: by which gradients are divided first; None: 1.
        """
        self.traces += 1
        if loss_scale is not None:
            grads = [None if grad is None else _divided(grad, loss_scale) for grad in grads]
        absent = [grad is None for grad in grads]
        zeros = zip(self._shapes, self._dtypes, strict=True)
        grads = [
            tf.zeros(shape, dtype) if grad is None else grad for grad, (shape, dtype) in zip(grads, zeros, strict=True)
        ]
        loss, data_time = self._heard or (None, None)
        self._heard = None
        self._sort_out_sparse(grads)
        dense = [tf.convert_to_tensor(grad) for grad in grads]
        ready = _time_after(dense)
        program, release, gauge = self._program.read_value(), self._release.read_value(), self._gauge.read_value()
        sums, kept = [], []
        row_bytes, begins, ends = [], [], []
        finite = sums_finite = tf.constant(True)
        checksum = tf.constant(0, tf.int64)
        for lane in self._lanes:
            flat, begin = _timed(self._pack(lane, dense))
            rows = self._rows(lane, grads) if lane.height else None
            total, *keep, lane_finite, sum_finite, lane_checksum, sent = tf.switch_case(
                program,
                [self._branch(lane, number, flat, release, rows) for number in range(len(self._ladder.programs))],
            )
            if lane.height:
                row_bytes.append(sent + mask_bytes(lane.height, self.transport.size))
            total.set_shape([lane.bucket.spec.size])
            total, end = _timed(total)
            begins.append(begin)
            ends.append(end)
            sums.append(total)
            kept.append(keep)
            finite = tf.logical_and(finite, lane_finite)
            sums_finite = tf.logical_and(sums_finite, sum_finite)
            checksum += lane_checksum
        done = _time_after(sums)
        sounding = self._sounding.read_value()
        known = self._known(finite, checksum, loss, learning_rate, self._norms(gauge, program, dense, kept), absent)
        side_total = self._sum(self._side(known), f"{self._prefix}.side")
        answer = tf.numpy_function(
            self._between_steps,
            [
                side_total,
                sums_finite,
                program,
                release,
                gauge,
                ready if data_time is None else data_time,
                ready,
                done,
                tf.stack(begins) if begins else tf.zeros(0, tf.float64),
                tf.stack(ends) if ends else tf.zeros(0, tf.float64),
                tf.add_n(row_bytes) if row_bytes else 0,
                sounding,
                self._sound(sounding, [done, side_total]),
            ],
            tf.float64,
        )
        answer.set_shape([_PLAN_VALUES + len(StepTimes._fields)])
        healthy = answer[4] > 0
        self._commit(program, healthy, kept, absent)
        self._hand_over(program, tf.cast(answer[0], tf.int32))
        self._program.assign(tf.cast(answer[0], tf.int32))
        self._release.assign(tf.cast(answer[1], tf.float32))
        self._gauge.assign(answer[2] > 0)
        self._sounding.assign(tf.cast(answer[3], tf.int32))
        self._times.assign(tf.cast(answer[_PLAN_VALUES:], tf.float32))
        means = dense if self.idle else self._unpack(sums, dense, program, healthy)
        return [None if none else mean for none, mean in zip(absent, means, strict=True)]

    def end_step(self, updated: Sequence[tf.Tensor]) -> None:
        """The optimizer has taken the step: ``updated`` are values read after it."""
        with tf.control_dependencies(updated):
            now = tf.timestamp()
        tf.numpy_function(self._note_end, [now], [])

    def state(self) -> dict[str, Any]:
        """All that coming steps depend on, besides weights and the optimizer's own state; between two steps.

        NumPy arrays, numbers, text, and lists and dictionaries of them. Residuals are this rank's own, unless they were
        consolidated; all else is the same on every rank.
        """
        return {
            "format": saved.FORMAT,
            "framework": FRAMEWORK,
            "ranks": self.transport.size,
            "rank": None if self._consolidated else self.transport.rank,
            "shapes": [list(shape) for shape in self._shapes],
            "sparse": self._sparse,
            "pilot": self.pilot.state(),
            "contexts": [
                {
                    "parameters": list(lane.bucket.parameters),
                    "levels": {self._ladder.names[level]: state.numpy() for level, state in lane.states.items()},
                }
                for lane in self._lanes
            ],
            "residuals": self._residuals(),
        }

    def _residuals(self) -> dict[int, np.ndarray]:
        """Variable -> what is held back of it."""
        return {
            i: lane.residual.numpy()[slice(*lane.bucket.offsets[place : place + 2])]
            for lane in self._lanes
            if lane.residual is not None
            for place, i in enumerate(lane.bucket.parameters)
        }

    def _hold_back(self, lane: _Lane, residuals: Mapping[int, np.ndarray], share: float = 1.0) -> None:
        if lane.residual is not None:
            lane.residual.assign(share * np.concatenate([residuals[i].ravel() for i in lane.bucket.parameters]))

    def consolidate(self) -> None:
        """Give every rank the mean of all ranks' residuals, which changes nothing in what they come to."""
        for lane in self._lanes:
            if lane.residual is not None:
                name = f"{self._prefix}.mean.{lane.bucket.number}"
                handle = self.transport.start(lane.residual.read_value(), name, 1.0 / self.transport.size)
                lane.residual.assign(self.transport.wait(handle))
        self._consolidated = True

    def load(self, state: Mapping[str, Any]) -> str:
        """Go on where the exchange was that gave ``state``; returns what has to be the same on all ranks.

        From a job with other levels, or another number of ranks, come the residuals alone, so that what was held
        back is not lost, but for that of ranks that are gone.

        Raises:
            ValueError: the state is of another model, or of another version of hvdplus.
        """
        saved.check(state, self._shapes)
        same_ranks, mine, share = saved.claim(state, self.transport, average=self._average)
        if self.idle:
            if not (mine and saved.holds_back(state)):
                return ""
            self.idle, self._loses = False, True  # what was held back is paid out on one rank, too
            self._make_lanes([])
        if state["residuals"] and not self._loses:  # what another level held back is paid out
            self._loses = True
            self._make_lanes([])
        own = state.get("framework") == FRAMEWORK
        if own and self._sparse is None and state["sparse"] is not None:
            self._set_apart(list(state["sparse"]))
        self._consolidated = state["rank"] is None
        resumed = own and same_ranks and self.pilot.load(state["pilot"])
        contexts = {tuple(each["parameters"]): each["levels"] for each in state["contexts"]} if resumed else {}
        for lane in self._lanes:
            for name, array in contexts.get(lane.bucket.parameters, {}).items():
                lane.states[self._ladder.names.index(name)].assign(array)
            if mine and state["residuals"]:
                self._hold_back(lane, state["residuals"], share)
        if state["residuals"] and not resumed:
            self.pilot.pay_out()
        plan = self.pilot.plan
        self._program.assign(self._ladder.program(plan))
        self._release.assign(plan.release)
        self._gauge.assign(plan.gauge)
        self._sounding.assign(plan.sounding)
        self._last_done = self._last_end = 0.0
        plain = state["ranks"], state["rank"] is None, resumed, state["pilot"], self._sparse
        return saved.digest(*plain, arrays=[array for levels in contexts.values() for array in levels.values()])

    def _sort_out_sparse(self, grads: Sequence[Any]) -> None:
        """When gradients are seen for the first time: those that are sparse travel apart from the others."""
        if self._sparse is not None or self.idle:
            return
        mine = [i for i, grad in enumerate(grads) if isinstance(grad, tf.IndexedSlices)]
        with tf.init_scope():
            self._set_apart(sorted(set().union(*self.transport.gather_objects(mine))))

    def _set_apart(self, sparse: list[int]) -> None:
        self._sparse = sparse
        if sparse:
            self.buckets = self._cut(sparse)
            dense = self.buckets[: len(self.buckets) - len(sparse)]
            share = sum(bucket.spec.size for bucket in dense) / sum(bucket.spec.size for bucket in self.buckets)
            self._codec_seconds = tuple(share * seconds for seconds in self._codec_seconds)
            self.pilot.resize(self._costs(dense))
            residuals = self._residuals()  # of a state of another framework
            self._make_lanes(sparse)
            for lane in self._lanes if residuals else ():
                self._hold_back(lane, residuals)

    def _costs(self, buckets: Sequence[Bucket]) -> tuple[LevelCost, ...]:
        with tf.init_scope():  # a class of Horovod's is asked by compressing zeros
            return level_costs(buckets, self._ladder.compressors, self._codec_seconds)

    def _make_lanes(self, sparse: Sequence[int]) -> None:
        with tf.init_scope():  # variables belong to no trace
            self._lanes = [] if self.idle else [self._make_lane(bucket, sparse) for bucket in self.buckets]

    def _cut(self, sparse: Sequence[int]) -> tuple[Bucket, ...]:
        """Buckets of all variables; each of the ``sparse`` ones has its own, at the end."""
        groups = [[i for i in range(len(self._shapes)) if i not in sparse], *([i] for i in sparse)]
        buckets: list[Bucket] = []
        for group in groups:
            for bucket in make_buckets(
                [self._shapes[i] for i in group],
                [self._dtypes[i] for i in group],
                bucket_bytes=self._settings.bucket_bytes,
                ranks=self.transport.size,
                seed=self._settings.seed,
            ):
                number = len(buckets)
                parameters = tuple(group[i] for i in bucket.parameters)
                spec = bucket.spec._replace(position=number)
                buckets.append(bucket._replace(number=number, parameters=parameters, spec=spec))
        return tuple(buckets)

    def _rows(self, lane: _Lane, grads: Sequence[Any]) -> tf.Tensor:
        (i,) = lane.bucket.parameters
        name = f"{self._prefix}.{lane.bucket.number}.mask"
        return union_of_rows(self.ops, grads[i], lane.height, self.transport.size, self._sum, name)

    def _make_lane(self, bucket: Bucket, sparse: Sequence[int]) -> _Lane:
        states, arrays = {}, {}
        height = bucket.shapes[0][0] if bucket.parameters[0] in sparse else 0
        if bucket.dtype == DENSE_ONLY:
            return _Lane(bucket, None, {}, {}, height)
        for level, compressor in enumerate(self._ladder.compressors):
            state = compressor.init(self.ops, bucket.spec).state
            if state:
                arrays[level] = [(tuple(array.shape), array.dtype) for array in state]
                name = f"hvdplus_context_{bucket.number}_{level}"
                states[level] = tf.Variable(_flat(state), trainable=False, name=name)
        residual = (
            tf.Variable(tf.zeros(bucket.spec.size), trainable=False, name=f"hvdplus_residual_{bucket.number}")
            if self._loses
            else None
        )
        return _Lane(bucket, residual, states, arrays, height)

    def _context(self, lane: _Lane, level: int, phase: int, flat: tf.Tensor | None) -> Context:
        state, start = [], 0
        for shape, dtype in lane.arrays.get(level, []):
            assert flat is not None
            part = flat[start : start + math.prod(shape)]
            state.append(tf.reshape(tf.bitcast(part, dtype), shape))
            start += math.prod(shape)
        return Context(lane.bucket.spec, phase, tuple(state))

    def _compressor(self, lane: _Lane, program: Program) -> Compressor:
        return compressor_for(lane.bucket, self._ladder.compressors[program.level])

    def _pack(self, lane: _Lane, dense: Sequence[tf.Tensor]) -> tf.Tensor:
        dtype = tf.float64 if lane.bucket.dtype == DENSE_ONLY else tf.float32
        return tf.concat([tf.reshape(tf.cast(dense[i], dtype), [-1]) for i in lane.bucket.parameters], axis=0)

    def _branch(
        self, lane: _Lane, number: int, flat: tf.Tensor, release: tf.Tensor, rows: tf.Tensor | None
    ) -> Callable[[], tuple[tf.Tensor, ...]]:
        """A program for a bucket: sum, next residual, next context, payload finite, sum finite, checksum, row bytes.

        Variables are read outside, so that no branch is stateful: TensorFlow would run stateful ones one by one.
        """
        program = self._ladder.programs[number]
        compressor = self._compressor(lane, program)
        touches = lane.residual is not None and (compressor.keeps_residual or program.drains)
        residual = lane.residual.read_value() if touches and lane.residual is not None else None
        settles = lane.bucket.dtype != DENSE_ONLY and (touches or compressor.settles or program.warms > 0)
        learner = self._ladder.compressors[program.warms] if program.warms else compressor
        level = program.warms or program.level
        state = lane.states[level].read_value() if level in lane.states else None
        # The name does not depend on release, so any plan of this program will do.
        name = self._ladder.tensor_name(self._prefix, lane.bucket.number, Plan(program.level, program.phase))

        yes, none = tf.constant(True), tf.constant(0, tf.int64)
        # Rows that are not shared are exchanged as all buckets are.
        with tf.init_scope():
            size = bytes_per_step([lane.bucket], compressor) if lane.height else 0
        bytes_sent = tf.constant(size)

        def checksum() -> tf.Tensor:
            return none if state is None else self.ops.checksum(state)

        def run() -> tuple[tf.Tensor, ...]:
            ctx = self._context(lane, level, program.phase, state)
            sent = flat if residual is None else join(flat, residual, release)
            left, sane = tf.zeros(0), yes
            if compressor.keeps_residual:
                payload, left, sane, _ = compressor.send(self.ops, ctx, sent, residual)
            else:
                payload = compressor.encode(self.ops, ctx, sent)
                if settles and not compressor.narrow:
                    # A narrow payload may overflow: it is sent again, and the sum tells.
                    sane = compressor.sound(self.ops, sent, payload)
                if residual is not None:
                    left = unreleased(residual, release)
            total = self._sum(payload, name)
            summed = compressor.decode(self.ops, ctx, total)
            if compressor.narrow:
                # Every rank holds this same sum, so every rank sends the bucket again, in full width.
                again = functools.partial(self._sum, sent, name + ".again")
                total = summed = tf.cond(self.ops.all_finite(total), lambda: summed, again)
            if not settles:
                return summed, tf.zeros(0), tf.zeros(0), yes, yes, none, bytes_sent
            learn = learner.warm if program.warms else learner.advance
            after = _flat(learn(self.ops, ctx, total).state)
            # Finite payloads can still have a sum beyond float32; it is the same on every rank.
            return summed, left, after, sane, self.ops.all_finite(total), checksum(), bytes_sent

        def share() -> tuple[tf.Tensor, ...]:
            """Exact, so the residual waits; contexts learn from it only where they would learn from a dense step."""
            summed, sent = sum_of_rows(flat, rows, lane.height, self._sum, name + ".rows")
            if not settles:
                return summed, tf.zeros(0), tf.zeros(0), yes, yes, none, sent
            ctx = self._context(lane, level, program.phase, state)
            after = _flat((learner.warm(self.ops, ctx, summed) if program.warms else ctx).state)
            left = tf.zeros(0) if residual is None else residual
            return summed, left, after, yes, self.ops.all_finite(summed), checksum(), sent

        if rows is None or program.drains:
            return run
        few = tf.shape(rows)[0] <= int(SPARSE * lane.height)
        return lambda: tf.cond(few, share, run)

    def _sum(self, array: tf.Tensor, name: str) -> tf.Tensor:
        return self.transport.wait(self.transport.start(array, name))

    def _sound(self, size: tf.Tensor, done: Sequence[tf.Tensor]) -> tf.Tensor:
        """Seconds that a sum of ``size`` bytes takes once all others are ``done``; 0 where it is of none."""

        def run() -> tf.Tensor:
            with tf.control_dependencies(done):
                zeros, began = _timed(tf.zeros([size // 4]))
            total = self._sum(zeros, f"{self._prefix}.sounding")
            # A sum whose value nobody uses would be optimized away.
            return _time_after([total]) - began + tf.cast(total[0], tf.float64)

        nothing = tf.constant(0.0, tf.float64)
        return nothing if self.transport.size == 1 else tf.cond(size > 0, run, lambda: nothing)

    def _norms(
        self, gauge: tf.Tensor, program: tf.Tensor, dense: Sequence[tf.Tensor], kept: list[list[tf.Tensor]]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Norms of this rank's gradients and of what sending leaves behind, where they are asked for."""
        nothing = tf.constant(0.0), tf.constant(0.0)
        if not kept:
            return nothing
        keeps = [self._ladder.compressors[used.level].keeps_residual for used in self._ladder.programs]

        def norms() -> tuple[tf.Tensor, tf.Tensor]:
            left = tf.linalg.global_norm([residual for residual, _ in kept])
            return (
                tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in dense]),
                tf.where(tf.gather(tf.constant(keeps), program), left, 0.0),
            )

        return tf.cond(gauge, norms, lambda: nothing)

    def _known(
        self,
        finite: tf.Tensor,
        checksum: tf.Tensor,
        loss: tf.Tensor | None,
        learning_rate: Any,
        norms: tuple[tf.Tensor, tf.Tensor],
        absent: Sequence[bool],
    ) -> SideSlot:
        """This rank's slot, of 0-d tensors."""

        def number(value: Any) -> tf.Tensor:
            return (
                tf.constant(0.0) if value is None else tf.cast(tf.reshape(tf.convert_to_tensor(value), []), tf.float32)
            )

        bits = tf.bitwise.bitwise_and(checksum, 0xFFFFFFFF)
        return SideSlot(
            nonfinite=tf.where(finite, 0.0, 1.0),
            checksum_high=tf.cast(tf.bitwise.right_shift(bits, tf.constant(16, tf.int64)), tf.float32),
            checksum_low=tf.cast(tf.bitwise.bitwise_and(bits, 0xFFFF), tf.float32),
            **dict(zip(StepTimes._fields, tf.unstack(self._times.read_value()), strict=True)),
            loss=number(loss),
            has_loss=tf.constant(0.0 if loss is None else 1.0),
            learning_rate=number(learning_rate),
            gradient_norm=norms[0],
            residual_norm=norms[1],
            absent=tf.constant(told_apart(absent)),
        )

    def _side(self, known: SideSlot) -> tf.Tensor:
        """This rank's side tensor, laid out as ``hvdplus.exchange.side_tensor`` does, with no parameters to count."""
        before = tf.zeros(self.transport.rank * SLOT_FLOATS)
        after = tf.zeros((self.transport.size - 1 - self.transport.rank) * SLOT_FLOATS)
        return tf.concat([before, tf.stack(list(known)), after], axis=0)

    def _between_steps(
        self,
        total: np.ndarray,
        sums_finite: Any,
        program: Any,
        release: Any,
        gauge: Any,
        data: Any,
        ready: Any,
        done: Any,
        begins: np.ndarray,
        ends: np.ndarray,
        row_bytes: Any,
        sounding: Any,
        sounded: Any,
    ) -> np.ndarray:
        """On the host, once a step: (next program, its release, 1 to gauge, bytes of its sounding, 1 if all was finite,
        this step's times)."""
        if self._closed:
            raise RuntimeError(
                "Ranks have come or gone since this step was compiled. Make its tf.function anew inside of what "
                "hvd.elastic.run runs."
            )
        used = self._ladder.programs[int(program)]
        plan = Plan(used.level, used.phase, float(release), used.warms, bool(gauge), int(sounding))
        slots, _ = read_side(total, self.transport.size)
        healthy = bool(sums_finite) and not any(slot.nonfinite for slot in slots)
        self._consolidated = False
        self.pilot.row_bytes = int(row_bytes)
        self.pilot.observe(plan, total, healthy)
        sounded = max(0.0, float(sounded))  # clocks are set back now and then
        times = self._step_times(plan.level, float(data), float(ready), float(done), sounded, begins, ends)
        self._last_done = float(done) + sounded
        following = self.pilot.advance()
        coming = self._ladder.program(following), following.release, following.gauge, following.sounding
        return np.array([*coming, healthy, *times], dtype=np.float64)

    def _step_times(
        self,
        level: int,
        data: float,
        ready: float,
        done: float,
        sounded: float,
        begins: np.ndarray,
        ends: np.ndarray,
    ) -> StepTimes:
        """Times of the step that ends now. Arguments are seconds since the epoch: when the input was there, all
        gradients, all sums; and for every bucket, when its gradients and when its sum. But the level, and the seconds
        that a sounding then took."""
        if not self._last_done:
            return StepTimes()
        step = done - self._last_done
        waited = min(max(0.0, done - ready), step)
        input_wait = max(0.0, data - self._last_end) if self._last_end and data < ready else 0.0
        input_wait = min(input_wait, step - waited)
        if self.transport.size == 1:
            return StepTimes(step, input_wait=input_wait)
        codec = min(self._codec_seconds[level], waited)
        # A bucket is encoded before its sum begins, and only then is the wire busy with it.
        sizes = np.array([lane.bucket.spec.size for lane in self._lanes])
        sent = np.maximum(begins, self._last_done) + codec * sizes / sizes.sum()
        exposed = waited - codec
        overlapped = max(0.0, union_seconds(zip(sent, ends, strict=True)) - exposed)
        return StepTimes(step + sounded, codec, exposed, input_wait, overlapped, sounded)

    def _note_end(self, now: Any) -> None:
        self._last_end = float(now)

    def _commit(
        self, program: tf.Tensor, healthy: tf.Tensor, kept: list[list[tf.Tensor]], absent: Sequence[bool]
    ) -> None:
        """Store residuals and contexts, unless some rank's gradient was not finite. What is held back of variables
        that are ``absent`` in this step stays: nobody takes what was sent of it."""

        def store(number: int) -> Callable[[], tf.Tensor]:
            used = self._ladder.programs[number]
            keeps = self._ladder.compressors[used.level].keeps_residual

            def run() -> tf.Tensor:
                for lane, (left, state) in zip(self._lanes, kept, strict=True):
                    if lane.residual is not None and (keeps or used.drains):
                        left = tf.ensure_shape(left, lane.residual.shape)
                        lane.residual.assign(_with_parts(left, lane.residual, lane.bucket, absent))
                    variable = lane.states.get(used.warms or used.level)
                    if variable is not None:
                        variable.assign(tf.ensure_shape(state, variable.shape))
                return tf.constant(0)

            return run

        if self._lanes:
            branches = [store(number) for number in range(len(self._ladder.programs))]
            nothing = len(branches)
            tf.switch_case(tf.where(healthy, program, nothing), [*branches, lambda: tf.constant(0)])

    def _hand_over(self, program: tf.Tensor, following: tf.Tensor) -> None:
        """Where the coming level follows the last one, it takes over its contexts."""
        levels = tf.constant([used.level for used in self._ladder.programs])
        last, coming = tf.gather(levels, program), tf.gather(levels, following)
        compressors = self._ladder.compressors

        def take(old: int, new: int) -> Callable[[], tf.Tensor]:
            def run() -> tf.Tensor:
                for lane in self._lanes:
                    if new in lane.states:
                        before = lane.states[old].read_value() if old in lane.states else None
                        ctx = compressors[new].inherit(
                            self.ops,
                            compressors[new].init(self.ops, lane.bucket.spec),
                            self._context(lane, old, 0, before),
                        )
                        lane.states[new].assign(_flat(ctx.state))
                return tf.constant(0)

            return run

        for new, compressor in enumerate(compressors):
            for old, other in enumerate(compressors):
                if old != new and compressor.follows(other):
                    both = tf.logical_and(tf.equal(last, old), tf.equal(coming, new))
                    tf.cond(both, take(old, new), lambda: tf.constant(0))

    def _unpack(
        self, sums: list[tf.Tensor], dense: Sequence[tf.Tensor], program: tf.Tensor, healthy: tf.Tensor
    ) -> list[tf.Tensor]:
        lossy = [self._ladder.compressors[p.level].settles for p in self._ladder.programs]
        # A payload can hide a NaN that a plain all-reduce would have delivered to every rank: deliver it.
        hidden = tf.logical_and(tf.gather(tf.constant(lossy), program), tf.logical_not(healthy))
        reduced = list(dense)
        for lane, total in zip(self._lanes, sums, strict=True):
            if lane.bucket.dtype != DENSE_ONLY and any(lossy):
                total = tf.cond(
                    hidden, lambda total=total: tf.fill(tf.shape(total), math.nan), lambda total=total: total
                )
            offsets = lane.bucket.offsets
            for place, i in enumerate(lane.bucket.parameters):
                part = tf.reshape(total[offsets[place] : offsets[place + 1]], lane.bucket.shapes[place])
                reduced[i] = tf.cast(part * tf.cast(self._scale, part.dtype), dense[i].dtype)
        return reduced


def _flat(state: Sequence[tf.Tensor]) -> tf.Tensor:
    """A context's arrays as one vector of float32."""
    parts = [tf.bitcast(tf.reshape(array, [-1]), tf.float32) for array in state]
    return tf.concat(parts, axis=0) if parts else tf.zeros(0)


def _time_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Seconds since the epoch when all of them are there.

    TensorFlow would keep timestamps in the order of the program, and everything else that has effects with them.
    """
    with tf.control_dependencies(tensors):
        now = tf.timestamp()
    if not tf.executing_eagerly():
        order = getattr(now.graph, "experimental_acd_manager", None)
        if order is not None:
            order.run_independently(now.op)
    return now


def _timed(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A tensor and when it was there. Its users wait for the timestamp: left to itself, it may be taken late."""
    now = _time_after([tensor])
    with tf.control_dependencies([now]):
        return tf.identity(tensor), now


def check_place(size: int) -> None:
    """Raise ValueError where an exchange could hang, or cannot be compiled."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise ValueError(
            "XLA cannot compile sums over ranks. Received: a step with jit_compile=True. Use "
            "model.compile(..., jit_compile=False), or tf.function(jit_compile=False)."
        )
    if size > 1 and getattr(graph, "name", "").startswith("cond_"):
        raise ValueError(
            "The optimizer is applied inside a condition that ranks could decide differently, and so wait for each "
            "other for ever. Apply it in every step, on every rank."
        )


def _with_parts(new: tf.Tensor, old: tf.Tensor, bucket: Bucket, of: Sequence[bool]) -> tf.Tensor:
    """``new``, with the parts of ``old`` that belong to those parameters ``of`` whom it is so."""
    if not any(of[i] for i in bucket.parameters):
        return new
    places = itertools.pairwise(bucket.offsets)
    return tf.concat([(old if of[i] else new)[a:b] for i, (a, b) in zip(bucket.parameters, places, strict=True)], 0)


def _divided(grad: Any, scale: tf.Tensor) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / tf.cast(scale, grad.dtype), grad.indices, grad.dense_shape)
    return grad / tf.cast(scale, grad.dtype)


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
