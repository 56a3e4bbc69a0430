"""When ranks exchange: in every step (*lock-step*), or after several steps of their own (*local steps*).

    steps        1   2   3   4   5   6   7   8   9  10  11  12
    every=4                  x               x               x       all parameters, at once
    + overlap=2              b───────c       b───────c       b──     sums run while ranks go on
    + fragments=2    f       x       f       x       f       x       one half of the parameters after the other

A fragment's exchange *begins* after one step and is *complete* ``overlap`` steps later. Lock-step steps may come first
(post-local SGD, arXiv 1808.07217); fragments in turn are Streaming DiLoCo's (arXiv 2501.18512).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hvdplus.control.interval import START, Interval
from hvdplus.control.meter import StepTimes
from hvdplus.exchange.form import is_count, is_list, require, require_fields

if TYPE_CHECKING:
    from hvdplus.exchange.coordinator import Coordinator

NESTEROV = (0.7, 0.9)
"""Learning rate and momentum of an outer step (DiLoCo, arXiv 2311.08105)."""


def split(sizes: Sequence[int], count: int) -> list[list[int]]:
    """``count`` fragments of parameters of these ``sizes``, in order, of about as many elements each.

    Raises:
        ValueError: there are fewer parameters than fragments.
    """
    if not 1 <= count <= len(sizes):
        raise ValueError(f"fragments has to be at most the {len(sizes)} parameters. Received: fragments={count}")
    total, seen, parts = sum(sizes), 0, [[0]]
    for i in range(1, len(sizes)):
        seen += sizes[i - 1]
        behind = count - len(parts)
        if behind and (len(sizes) - i == behind or seen >= total * len(parts) / count):
            parts.append([])
        parts[-1].append(i)
    return parts


class Rhythm:
    """Counts this rank's steps, and says after which of them a fragment's exchange begins or is complete.

    Where ranks wait for each other they take the same steps, so it is equal on all of them without a word.
    """

    def __init__(
        self, every: int, *, fragments: int = 1, overlap: int = 0, lock_steps: int = 0, overlaps: bool = False
    ) -> None:
        """
        Args:
            every: 0: from measurements, see ``interval.py``.
            overlaps: whether measurements may choose ``overlap``, too.

        Raises:
            ValueError: more fragments than steps, or an exchange that would not be complete before its next one.
        """
        self.interval = None if every else Interval(overlaps)
        """Chooses ``every`` and ``overlap``."""
        self._lengths: list[int]
        """Local steps before each of the first fragment's exchanges whose times are not known yet."""
        self._latest: list[int]
        """Step after which each fragment's last exchange began, or all parameters were equal; -1: not known."""
        self._done: int
        """Step after which the first fragment's last exchange was complete."""
        self._heard: bool
        """Whether times were heard of since then; the first ones are of before."""
        self._told = every or START
        """Local steps of a period, as far as whoever chooses the level was told."""
        if self.interval and (fragments > 1 or overlap):
            raise ValueError(
                "every=auto exchanges all parameters at once, and chooses overlap_steps itself. "
                f"Received: fragments={fragments}, overlap_steps={overlap}"
            )
        every = every or START
        if not 1 <= fragments <= every:
            raise ValueError(f"fragments has to be from 1 to the {every} local steps. Received: fragments={fragments}")
        if not 0 <= overlap < every and overlap:
            raise ValueError(
                f"overlap_steps has to be below the {every} local steps, so that an exchange is complete before the "
                f"next one begins. Received: overlap_steps={overlap}"
            )
        self.every, self.fragments, self.overlap, self.lock_steps = every, fragments, overlap, lock_steps
        self.steps = 0
        """Steps so far."""
        self._began: list[int | None]
        """Step after which each fragment's exchange began that is not complete; None: there is none."""
        self._begins: list[int]
        """Step after which each fragment's next exchange begins."""
        self.restart()

    @property
    def locked(self) -> bool:
        """Whether the coming step is one in lock-step."""
        return self.steps < self.lock_steps

    def step(self) -> None:
        """A step was taken."""
        self.steps += 1

    def complete(self, *, all_of_them: bool = False) -> list[int]:
        """Fragments whose exchange is to be completed now, in the order in which they began. ``all_of_them``: whatever
        step it is."""
        began = [(at, number) for number, at in enumerate(self._began) if at is not None]
        due = [number for at, number in sorted(began) if all_of_them or self.steps >= at + self.overlap]
        for number in due:
            self._began[number] = None
        if self.interval and 0 in due:
            self._lengths.append(self.steps - self._done)
            self._done = self.steps
        return due

    def begin(self) -> list[int]:
        """Fragments whose exchange begins now."""
        due = [number for number, at in enumerate(self._begins) if self.steps >= at]
        for number in due:
            self._begin(number, self.steps + self.every)
        return due

    def begin_all(self, tell: Callable[[list[int]], Iterable[list[int]]] = lambda mine: [mine]) -> list[int]:
        """All fragments whose exchange has to begin now, whatever step it is: not where the last one has just begun, as
        no step was taken since. The next ones come in turns again.

        ``tell``: gives what all ranks say. One of them may have taken a step more, and none exchanges alone.
        """
        mine = [number for number, at in enumerate(self._latest) if at != self.steps]
        due = sorted(set().union(*tell(mine)))
        for number in due:
            self._begin(number, self.steps + self._turn(number))
        return due

    def _begin(self, number: int, then: int) -> None:
        self._began[number] = self._latest[number] = self.steps
        self._begins[number] = then

    def _turn(self, number: int) -> int:
        """Steps from where all are equal to a fragment's exchange."""
        return (number + 1) * self.every // self.fragments

    def follow(self, coordinators: Sequence[Coordinator], staleness: int | str = 0) -> None:
        """Hear of the exchanges that the first fragment's coordinator plans; say in every one's log how often they
        come."""
        coordinators[0].listener = self.hear
        for coordinator in coordinators:
            coordinator.tell_rhythm(
                every="auto" if self.interval else self.every,
                fragments=self.fragments,
                overlap_steps=self.overlap,
                staleness=staleness,
            )

    def hear(self, times: StepTimes, learning_rate: float) -> tuple[int, float] | None:
        """What the oldest exchange whose times were not known yet took, and the local steps before it.

        Returns the number of these steps and by what factor they are more than before, if they are the first so many.
        """
        longer = None
        if self.interval and self._heard and self._lengths:
            length = self._lengths.pop(0)
            if length == self.every != self._told:  # other lengths are of a single period
                longer, self._told = (length, length / self._told), length
            self.every, self.overlap = self.interval.observe(times, length, learning_rate)
            self._begins[0] = max(self.steps, self._latest[0] + self.every)
        self._heard = True
        return longer

    def forget(self) -> None:
        """Nobody completes the exchanges under way."""
        self._began = [None] * self.fragments

    def restart(self) -> None:
        """Forget exchanges under way, and begin the next ones as if lock-step had just ended."""
        self.forget()
        self._done = start = max(self.steps, self.lock_steps)
        self._lengths, self._heard = [], False
        self._begins, self._latest = [start + self._turn(n) for n in range(self.fragments)], [start] * self.fragments

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return {
            "steps": self.steps,
            "began": list(self._began),
            "begins": list(self._begins),
            "latest": list(self._latest),
            "told": self._told,
            "interval": self.interval.state() if self.interval else None,
        }

    def check(self, state: Any, shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
        """Raise ValueError unless an optimizer's state is one of local steps, for fragments whose parameters have these
        ``shapes``. Rhythm and exchange check their own parts when they load."""
        require_fields(state, ("local", "fragments"), "its local steps")
        require_fields(state["local"], ("began",), "its local steps")
        began, fragments = state["local"]["began"], state["fragments"]
        require(fragments is None or is_list(fragments, lambda each: True), "its fragments", "a list", fragments)
        if not fragments:
            return
        self._require_as_many(fragments)
        for number, (fragment, wanted) in enumerate(zip(fragments, shapes, strict=True)):
            require_fields(fragment, ("anchors", "outer"), f"fragment {number}")
            under_way = is_list(began, lambda at: True) and number < len(began) and began[number] is not None
            for name in ("anchors", "sent") if under_way and "sent" in fragment else ("anchors",):
                arrays = fragment[name]
                is_whole = is_list(arrays, lambda array: hasattr(array, "shape"))
                received = [tuple(array.shape) for array in arrays] if is_whole else arrays
                what = f"what fragment {number} has as {name}"
                require(received == [tuple(shape) for shape in wanted], what, f"arrays of {wanted}", received)

    def _require_as_many(self, fragments: Sequence[Any]) -> None:
        if len(fragments) != self.fragments:
            raise ValueError(
                f"The checkpoint has {len(fragments)} fragments, and this optimizer {self.fragments}: give it the same "
                "setting."
            )

    def load(self, state: Any) -> list[int]:
        """Continue from a ``state`` that ``state()`` returned; returns the fragments whose exchange was under way.

        Raises:
            ValueError: it is damaged, or has another number of fragments.
        """
        require_fields(state, ("steps", "began", "begins", "interval"), "its local steps")
        steps, began, begins = state["steps"], state["began"], state["begins"]
        latest = state.get("latest", [-1] * self.fragments)  # earlier checkpoints have none
        require(is_count(steps), "its number of steps", "a whole number of at least 0", steps)
        told = state.get("told", 1)
        require(is_count(told) and told > 0, "its local steps' told", "a number of steps", told)
        for name, values in (("began", began), ("begins", begins), ("latest", latest)):
            fits = is_list(values, lambda value: value in (None, -1) or is_count(value))
            require(fits, f"its local steps' {name}", "step numbers", values)
            require(name == "began" or None not in values, f"its local steps' {name}", "step numbers", values)
            self._require_as_many(values)
        if self.interval and state["interval"]:
            try:
                self.interval.load(state["interval"])
            except ValueError as error:
                raise ValueError(f"The state of hvdplus is damaged: its number of local steps: {error}") from None
            self.every, self.overlap = self.interval.choice
        self._told = state.get("told", self.every)
        self.steps = steps
        self.restart()
        # With other settings, exchanges may be due earlier.
        self._begins = [min(at, max(steps, self.lock_steps) + self.every) for at in begins]
        self._began, self._latest = list(began), list(latest)
        for number, at in enumerate(began):
            if at is not None:  # and not before the one under way is complete
                self._begins[number] = max(self._begins[number], at + self.overlap)
        return [number for number, at in enumerate(began) if at is not None]
