"""One rank's part in the metadata: it reports its own, reads all ranks', and checks them.

If a step's result depends on the metadata (residuals, contexts), ranks read them in the step itself; else one step
later, while they wait for other sums anyway. All ranks observe them at the same point, because plans follow from them.
Where the host runs ahead of the device (``ahead.py``), what the device has found out is reported a step late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from hvdplus.exchange.backend import EagerArray, Found
from hvdplus.exchange.metadata import (
    Metadata,
    Report,
    Slot,
    Sums,
    flag,
    fold24,
    hash24,
    pack,
    read,
    weights_differ,
)
from hvdplus.exchange.plan import Plan
from hvdplus.exchange.sketch import CELLS, part_of, square

if TYPE_CHECKING:
    from hvdplus.exchange.bucket import BucketState
    from hvdplus.exchange.eager import EagerExchange


NORMS = 3
"""Norms that a step measures, in front of its sketches."""


class MetadataInFlight:
    """The metadata of one step under way; read once."""

    def __init__(self, wait: Callable[[], np.ndarray], ranks: int, checksums: Sequence[int]) -> None:
        self._wait, self._ranks = wait, ranks
        self._read: Metadata | None = None
        self.checksums = checksums
        """Of this rank's parameters, in steps that check them."""

    def read(self) -> Metadata:
        """All ranks' metadata; the first call waits for the sum."""
        if self._read is None:
            self._read = read(self._wait(), self._ranks)
        return self._read


class Reporter(Generic[EagerArray]):
    """Reports this rank's metadata, and observes all ranks'.

    Holds no reference to its exchange, so that an exchange is freed as soon as it is dropped.
    """

    def __init__(self, parameters: int) -> None:
        self.loss: Any = math.nan
        """Of the current step, for the run log, as a number or a device's; NaN: not reported."""
        self.metadata = MetadataInFlight(lambda: np.zeros(0, np.float32), 0, ())
        """Of the current step."""
        self.observed_in_step = self.read_in_step = False
        """Whether every rank reads the current step's metadata before its end; whether this rank does."""
        self._told = Plan()
        """The plan that the current step's metadata are observed with: where the host runs ahead, they bring what the
        step before has measured."""
        self._measurement = 0, 0
        """Number of the last step's measurement, and its level; 0: none."""
        self.overflowed = self.answers = False
        """Where the host runs ahead: whether values of a rank were found to overflow, which is not answered yet, and
        whether the current step answers that."""
        self._late: tuple[Plan, MetadataInFlight] | None = None
        self._found: Callable[[], Found] = Found
        """What the device has found out about the last step, where the host runs ahead."""
        self._norms: list[EagerArray] = []
        self._sketch: EagerArray | None = None
        self._sketched: list[EagerArray] = []
        """Norms of the gradients that it shows."""
        self._steps = self._sums = 0
        self._unseen = set(range(parameters))
        """Parameters without a gradient on any rank so far. While there are any, all ranks read metadata in the step,
        so that they agree whether a gradient is sparse before an optimizer sees it."""

    def members_changed(self, parameters: int, moved: Mapping[int, int]) -> None:
        """Take over a new number of ``parameters``. ``moved``: old position -> new position of those that stay."""
        fresh = set(range(parameters)) - set(moved.values())
        self._unseen = fresh | {moved[i] for i in self._unseen if i in moved}

    def note_norms(self, x: EagerExchange[EagerArray], arrays: Sequence[EagerArray]) -> None:
        """Keep the norms of gradients, in steps that measure them."""
        if x.plan.measurement:
            self._norms += [x.backend.norm(array) for array in arrays]

    def note_gradients(
        self, x: EagerExchange[EagerArray], parameters: Sequence[int], arrays: Sequence[EagerArray]
    ) -> None:
        """Keep norms and the sketch of the gradients of these parameters, in steps that measure them."""
        self.note_norms(x, arrays)
        for place, parameter in enumerate(parameters if x.plan.measurement else ()):
            part = part_of(x.shapes[parameter], parameter, x.plan.measurement)
            if part and len(arrays[place]):
                cells = x.backend.sketch(arrays[place], part)
                self._sketch = cells if self._sketch is None else self._sketch + cells
                self._sketched.append(self._norms[place - len(arrays)])

    def start(
        self, x: EagerExchange[EagerArray], used: Sequence[bool], learning_rate: float, added: int, missing: float
    ) -> None:
        """Send this rank's metadata. Arguments as in ``step.finish``; ``used``: which parameters have a gradient."""
        ranks = x.transport.size
        flags = list(map(float, used))
        for i in () if x.idle else x.backend.sparse():
            if i not in x.sparse:
                flags[i] = flag(True, True, ranks)
        checksums = x.backend.checksums() if self._checks_weights(x) else []
        report = self._report(x, learning_rate, added, missing, checksums)
        wait = self._start_sum(x, x.backend.metadata_array(pack(x.transport.rank, ranks, report, flags)))
        self.metadata = MetadataInFlight(wait, ranks, checksums)
        self._told = self._told_with(x) if x.runs_ahead else x.plan
        self.observed_in_step = (x.checks and not x.runs_ahead) or bool(self._unseen and not x.idle)
        # Only a rank without a gradient needs to know whether other ranks have one.
        self.read_in_step = self.observed_in_step or added > 0 or not all(used)

    def observe_last(self, x: EagerExchange[EagerArray]) -> None:
        """Read the last step's metadata, if that was not done in the step."""
        if self._late:
            (plan, metadata), self._late = self._late, None
            self._observe(x, plan, metadata, counts=False)

    def end_step(self, x: EagerExchange[EagerArray], healthy: bool) -> None:
        """Observe the step, or leave its metadata to the next one."""
        if x.runs_ahead or not self.observed_in_step:
            x.coordinator.schedule.commit(x.plan)
        if self.observed_in_step:
            self._observe(x, self._told, self.metadata, healthy and not x.runs_ahead)
        else:
            self._late = self._told, self.metadata
        x.coordinator.unread_steps = int(not self.observed_in_step)
        self._steps += 1
        self.loss = math.nan

    def taken(self) -> None:
        """The optimizer has taken the step."""
        self.overflowed, self.answers = self.overflowed and not self.answers, False

    def forget(self) -> None:
        """Drop metadata in flight, without waiting, norms and sketch."""
        self._late, self._found, self._measurement = None, Found, (0, 0)
        self.overflowed = self.answers = False
        self._norms, self._sketch, self._sketched = [], None, []

    def finish_last(self) -> None:
        """Wait for metadata in flight, and drop them: another state is loaded."""
        if self._late:
            self._late[1].read()
        self.forget()

    def _observe(self, x: EagerExchange[EagerArray], plan: Plan, in_flight: MetadataInFlight, counts: bool) -> None:
        metadata = in_flight.read()
        if "weights" in metadata.odd:
            everyone = x.transport.gather_objects(list(in_flight.checksums), f"weights of {x.prefix}")
            message = weights_differ(metadata.odd["weights"], everyone, x.backend.names)
            raise RuntimeError(message + x.coordinator.note)
        x.coordinator.observe(plan, metadata, counts)
        if x.runs_ahead and metadata.overflow and not metadata.nonfinite:
            self.overflowed = True
        if self._unseen:
            self._unseen -= set(np.flatnonzero(metadata.used > 0).tolist())
        x.sparse.update(metadata.turned)

    def _told_with(self, x: EagerExchange[EagerArray]) -> Plan:
        """This step's plan, with the number of the last step's measurement if that ran the same level."""
        (number, level), self._measurement = self._measurement, (x.plan.measurement, x.plan.level)
        return x.plan._replace(measurement=number if level == x.plan.level else 0)

    def _start_sum(self, x: EagerExchange[EagerArray], array: EagerArray) -> Callable[[], np.ndarray]:
        # The returned closure must not refer to the exchange either.
        transport, to_host = x.bare, x.backend.to_host
        # Two names alternate: the last sum may still be in flight where it was not awaited.
        self._sums += 1
        handle = transport.start(array, f"{x.prefix}.metadata.{self._sums % 2}")
        return lambda: to_host(transport.wait(handle))

    def _report(
        self, x: EagerExchange[EagerArray], learning_rate: float, added: int, missing: float, checksums: Sequence[int]
    ) -> Report:
        # Elsewhere nothing is looked at, and there are no contexts.
        states: list[BucketState[EagerArray]] = [*x.now.states, *x.tables_now] if x.checks else []
        finite = [state.finite for state in states if state.finite is not None]
        overflow = [state.overflow for state in states if state.overflow is not None]
        found = x.backend.found(finite, overflow, self._contexts(x, states), self.loss, self._measured(x))
        if x.runs_ahead:
            found, self._found = self._found, found
        sound, over, contexts, loss, measured = found()
        times = x.meter.last
        gradient_norm, residual_norm, sketched_norm = measured[:NORMS] or (0.0,) * NORMS
        sketch, residual_sketch = measured[NORMS : NORMS + CELLS], measured[NORMS + CELLS :]
        sums = Sums(
            nonfinite=float(not sound),
            overflow=float(over and not x.settings.secure_aggregation),  # what overflows stays in the residual
            step=times.step,
            loss=0.0 if math.isnan(loss) else loss,
            losses=float(not math.isnan(loss)),
            sketch_square=square(sketch) if measured else 0.0,
            sketched_square=sketched_norm**2,
            residual_sketch_square=square(residual_sketch) if measured else 0.0,
        )
        slot = Slot(
            codec=times.codec,
            exposed_comm=times.exposed_comm,
            comm=times.comm,
            input_wait=times.input_wait,
            probe=times.probe,
            gradient_norm=gradient_norm,
            residual_norm=residual_norm,
            learning_rate=learning_rate,
            contexts=fold24(contexts),
            weights=hash24(np.array(checksums, np.int64).tobytes()) if checksums else 0.0,
            missing=missing,
            added=added,
        )
        return Report(sums, slot, sketch, residual_sketch) if measured else Report(sums, slot)

    def _contexts(self, x: EagerExchange[EagerArray], states: Sequence[BucketState[EagerArray]]) -> list[EagerArray]:
        """The arrays of all contexts that the step uses."""
        used = [x.context(state, x.plan.level) for state in states if state.bucket.compressible]
        return [array for ctx in used for array in ctx.state]

    def _measured(self, x: EagerExchange[EagerArray]) -> list[EagerArray]:
        """In steps that measure: norms of this rank's own gradients, taken when they were packed, of its next residual,
        and of the gradients in the sketch; the sketch, and that of the residual."""
        if not x.plan.measurement or x.idle:
            return []
        with x.meter.codec():
            left = x.states if x.ladder.keeps_residual(x.plan) else []
            norms = [
                x.backend.norm_of_all(self._norms) * (1.0 / x.loss_scale),
                x.backend.norm_of_all([x.backend.norm(s.pending) for s in left if s.pending is not None]),
                x.backend.norm_of_all(self._sketched),
            ]
            sketches = [self._sketch, None if x.two_level else _sketch_of_residual(x, left)]
            self._norms, self._sketched, self._sketch = [], [], None
            return [*norms, *(x.backend.zeros(CELLS) if cells is None else cells for cells in sketches)]

    def _checks_weights(self, x: EagerExchange[EagerArray]) -> bool:
        """Whether this step checks weights, so that ranks notice if they drift apart: in the second step and then in
        every ``weights_check_steps``-th."""
        every = x.settings.weights_check_steps
        if not every or x.idle or x.transport.size == 1:
            return False
        return self._steps == 1 or (self._steps > 0 and self._steps % every == 0)


def _sketch_of_residual(x: EagerExchange[EagerArray], states: Sequence[BucketState[EagerArray]]) -> EagerArray | None:
    """Of the next residuals of these buckets; None: there are none, or they have too few elements."""
    total: EagerArray | None = None
    for state in states:
        for parameter, (place, shape) in state.places.items():
            part = part_of(shape, parameter, x.plan.measurement)
            if part and state.pending is not None:
                cells = x.backend.sketch(state.pending[place], part)
                total = cells if total is None else total + cells
    return total
