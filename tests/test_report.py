"""The report: figures and sentences follow from the records, and the picture shows them legibly."""

from __future__ import annotations

import random
import re
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdplus.cli import main
from hvdplus.log.facts import DRAINING, Record, stretches
from hvdplus.log.picture import picture
from hvdplus.log.runlog import RunLog, read
from hvdplus.log.table import table
from hvdplus.log.words import closing, explain

SENT = {"none": 493824, "fp16": 246912, "lowrank:4": 23456}
TIMES = {"none": (11.0, 0.4, 8.0, 0.4), "fp16": (11.0, 0.6, 0.1, 0.4), "lowrank:4": (11.0, 1.6, 0.0, 0.4)}
"""Level -> compute, codec, exposed communication, input wait in ms."""


class Job:
    """Writes a run log step by step, as a job would."""

    def __init__(self, path: Path | None = None, **facts: Any) -> None:
        self.log = RunLog(path)
        self.step = 0
        self.level = "none"
        given = {"framework": "torch", "ranks": 2, "hosts": {"node1": 2}, "transport": "horovod-mpi"}
        given |= {"collective": "ring", "compression": "auto", "ladder": list(SENT), "parameters": 123456}
        self.log.write("run", **given | {"gradient_bytes": 493824, "payload_bytes": SENT} | facts)

    def run(
        self, level: str, steps: int, times: tuple[float, ...] = (), loss: float | None = None, **more: float | None
    ) -> Job:
        """Windows of 10 steps at most; ``times`` default to those of the level, and ``more`` overrides."""
        times = times or TIMES[level]
        while steps:
            count = min(steps, 10)
            names = ("compute_ms", "codec_ms", "exposed_comm_ms", "input_wait_ms")
            self.log.write(
                "window", first_step=self.step, last_step=self.step + count - 1, level=level, steps=count, loss=loss,
                **{"step_ms": sum(times), **dict(zip(names, times, strict=True)), **more},
            )  # fmt: skip
            self.step, steps = self.step + count, steps - count
        self.level = level
        return self

    def decide(self, to: str, reason: str, **evidence: float) -> Job:
        fields = {"step": self.step, "from": self.level, "to": to, "reason": reason, "evidence": evidence}
        self.log.write("decision", **fields)
        return self

    def write(self, kind: str, **fields: Any) -> Job:
        self.log.write(kind, **fields)
        return self

    def end(self, **facts: Any) -> Job:
        self.log.write("end", steps=self.step, wall_seconds=12.3, **facts)
        self.log.close()
        return self

    @property
    def records(self) -> list[Record]:
        """From the file, if there is one: memory holds the older windows of a long job taken together."""
        return read(self.log.path) if self.log.path else self.log.records


def demo(path: Path | None = None) -> Job:
    """A job whose communication fp16 hides."""
    job = Job(path).run("none", 15, loss=2.0)
    job.decide("fp16", "communication holds up 40% of a 19.80 ms step (8.00 ms exposed, limit 5%)")
    job.run("fp16", 12, loss=1.5).decide("fp16", "fp16 saves 39% of the dense step (none 19.80 ms, fp16 12.10 ms)")
    return job.run("fp16", 273, loss=0.112).end(accuracy=0.98615, identical_ranks="yes")


# ---------------------------------------------------------------------------------------------------- table


def test_the_table_of_a_designed_log() -> None:
    lines = table(demo().records).splitlines()
    assert lines[0] == "hvdplus run"
    facts = {key: rest for key, rest in (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines[1:7])}
    assert facts["framework"] == "PyTorch"
    assert facts["ranks"] == "2 ranks on 1 host (node1: 2)"
    assert facts["transport"] == "Horovod over MPI, collective ring"
    assert facts["compression"] == "auto: none -> fp16 -> lowrank:4"
    assert facts["gradient"] == "123,456 parameters, 0.494 MB in fp32"
    cells = [re.split(r"\s{2,}", line) for line in lines[8:12]]
    assert cells[0] == [
        *("steps", "level", "step", "compute", "codec", "exposed", "hidden", "input", "error", "MB sent", "ratio"),
        "loss",
    ]
    assert cells[1][1:] == [
        *("ms", "ms", "ms", "comm ms", "comm ms", "wait ms", "to gradient", "a step", "to fp32", "at end")
    ]
    assert cells[2] == ["0-14", "none", "19.80", "11.00", "0.40", "8.00", "-", "0.40", "-", "0.494", "1.0 x", "2.00"]
    assert cells[3] == ["15-299", "fp16", "12.10", "11.00", "0.60", "0.10", "-", "0.40", "-", "0.247", "2.0 x", "0.112"]
    text = "\n".join(lines)
    assert "  1. step 15, none -> fp16: communication holds up 40% of a 19.80 ms step" in text
    assert "  2. step 27, stays at fp16: fp16 saves 39% of the dense step" in text
    assert lines[-2] == "End: 300 steps in 12.3 s; accuracy 0.986; identical_ranks yes"
    assert lines[-1] == closing(demo().records)
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize(
    ("ranks", "cosines", "price", "said"),
    [
        # A step takes 24 of 12 ms, and is worth 1 / (0.5 + 0.5 / 2) of one rank's.
        (2, [0.5], 0.0, "1.5 x sooner than 2 ranks together: [...] (cosine 0.50), [...] worth 1.33 [...] 2.0 times"),
        (4, [0.5], 0.0, "1.2 x sooner than 4 ranks together: [...] (cosine 0.50), [...] worth 1.60 [...] 2.0 times"),
        (4, [1.25, 0.75], 0.0, "2.0 x sooner than 4 ranks together: [...] (cosine 1.00), [...] worth 1.00"),
        (4, [0.5], 0.25, "1.4 x sooner than 4 ranks together: [...] 2.2 times as long"),  # with an error of 0.5
        (2, [0.1], 0.0, ""),
        (2, [-0.5], 0.0, ""),
        (2, [], 0.0, ""),
        (1, [1.0], 0.0, ""),
    ],
)
def test_a_rank_that_would_be_sooner_alone_is_told_so_first(
    ranks: int, cosines: list[float], price: float, said: str
) -> None:
    """At the cosines of all windows, in the steps of the level that ran most; those that flush are none."""
    job = Job(ranks=ranks, limits={"delay_price": price}).run("none", 10, (12.0, 0.0, 88.0, 0.0))
    job.run(DRAINING, 90, (12.0, 0.0, 0.0, 0.0))
    for cosine in [*cosines, None]:
        job.run("lowrank:4", 10, (11.0, 4.0, 8.0, 1.0), cosine=cosine, error=0.5)
    first = table(job.records).split("\n\n")[0].replace("\n", " ")
    parts = said.split(" [...] ")
    assert first.startswith(
        "One rank alone would probably come to the same loss " + parts[0] if said else "hvdplus run"
    )
    assert all(part in first for part in parts)


def test_hidden_communication_and_error_have_columns() -> None:
    """Medians of what is known: gradients and residuals are not measured in every window."""
    job = Job().run("lowrank:4", 20, overlapped_comm_ms=3.25, error=None).run("lowrank:4", 10, error=1.5)
    row = re.split(r"\s{2,}", table(job.run("lowrank:4", 10, error=1.25).records).splitlines()[10])
    assert row[:9] == ["0-39", "lowrank:4", "13.00", "11.00", "1.60", "0.00", "3.25", "0.40", "1.38"]


def test_the_widest_table_fits() -> None:
    job = Job(ladder=["none", "topk:0.05+int8"]).run("none", 10_000, (1100.0, 100.0, 1000.0, 100.0), loss=0.00123)
    job.run("topk:0.05+int8", 10_000, (1100.0, 100.0, 1000.0, 100.0), overlapped_comm_ms=1000.0, error=3.9)
    job.decide("none", "a reason of many words " * 20, **{"topk:0.05+int8.step_ms": 1.0, "none.step_ms": 2.0})
    job.write("forbid", step=3, level="topk:0.05+int8", reason="for a reason of many words " * 5)
    assert 105 < max(map(len, table(job.records).splitlines())) <= 120


def test_parts_beyond_their_step_are_no_shares_beyond_100_percent() -> None:
    """As older logs have them, of sparse gradients."""
    job = Job(compression="none").run("none", 20, (-3.0, 0.4, 12.0, 0.4))
    assert "held up 100% of the step (9.80 ms)" in closing(job.records)
    job = Job(compression="fp16").run("fp16", 20, (-3.0, 0.4, 12.0, 0.4)).run("none", 10, (-3.0, 0.4, 22.0, 0.4))
    assert closing(job.records).endswith("communication still held up 100% of the step.")
    job = Job(compression="fp16").run("fp16", 20, (-3.0, 0.4, 12.0, 0.4)).run("none", 10)
    assert "9.80 ms a step against 8.40 ms dense with the same computation" in closing(job.records)  # which is none
    assert not re.search(r"-\d\.| -\d", table(job.records))


# ------------------------------------------------------------------------------------------------ decisions

EVIDENCE = {
    "none.step_ms": 19.8, "none.exposed_comm_ms": 8.0, "none.overlapped_comm_ms": 2.25, "none.codec_ms": 0.4,
    "topk:0.05.step_ms": 15.0, "topk:0.05.exposed_comm_ms": 0.1, "topk:0.05.codec_ms": 3.0,
    "fp16.predicted_step_ms": 14.9, "lowrank:4.predicted_step_ms": 12.5,
    "link.ms_per_allreduce": 0.125, "link.ms_per_MB": 20.0, "topk:0.05.error": 1.236,
}  # fmt: skip


def spoken(job: Job) -> list[str]:
    """The report's decisions, the heading first, each in a line."""
    block = next(block for block in table(job.records).split("\n\n") if block.startswith("Decisions"))
    return re.sub(r"\n     ", " ", block).split("\n")


def test_a_decision_is_read_out_with_what_it_rests_on() -> None:
    job = Job(limits={"memory_steps": 40}).run("none", 20).decide("fp16", "try it", **EVIDENCE)
    assert spoken(job) == [
        "Decisions and their evidence: lower quartiles over pairs of consecutive steps, a level's latest 40 at most",
        "  1. step 20, none -> fp16: try it Measured: none 19.80 ms a step (8.00 ms exposed, 2.25 ms hidden, 0.40 ms "
        "codec), topk:0.05 15.00 ms a step (0.10 ms exposed, 3.00 ms codec). Predicted: fp16 14.90 ms, lowrank:4 12.50 "
        "ms. Link: 0.12 ms an all-reduce and 50.0 MB/s. Residual over gradient: topk:0.05 1.24.",
    ]


@pytest.mark.parametrize("words", range(0, 100, 3))
def test_a_figure_and_its_unit_stay_together(words: int) -> None:
    lines = explain(1, {"from": "a" * words, "to": "b", "reason": "10 ms " * 50, "evidence": EVIDENCE}).split("\n")
    assert len(lines) > 5 and not [line for line in lines if re.match(r" +(ms|MB/s)\b", line)]


def test_a_link_whose_time_does_not_depend_on_bytes_has_no_rate() -> None:
    job = Job().run("none", 20).decide("none", "no", **{"link.ms_per_allreduce": 3.0, "link.ms_per_MB": 0.0})
    assert spoken(job) == [
        "Decisions",
        "  1. step 20, stays at none: no Link: 3.00 ms an all-reduce, whatever it sends.",
    ]


def test_of_a_trial_stands_what_came_of_it_unless_all_is_asked_for() -> None:
    job = Job().run("none", 20).decide("fp16", "fp16 is expected to cost 0.90 times none", **EVIDENCE)
    job.run("fp16", 10).decide("none", "fp16 costs 0.950 [0.800, 1.100] times none, 1 pair: in turns", **EVIDENCE)
    job.run("none", 10).decide("none", "fp16 costs 1.100 [1.050, 1.150] times none, 2 pairs; none is best", **EVIDENCE)
    job.run("none", 40)
    head, first, last, *_ = spoken(job)
    assert head == "Decisions (`hvdplus report --why` has all, with their figures)"
    assert first.startswith("  1. ") and "Measured" not in first
    assert last.startswith("  3. ") and "Measured: none 19.80 ms" in last
    everything = table(job.records, why=True)
    assert "  2. " in everything and everything.count("Measured: ") == 3
    assert closing(job.records) == (
        "Compression did not pay: in turns with none, the best level tried, fp16, cost 1.10 times as much (time a "
        "step, with the price of delay), so 70 of 80 steps ran uncompressed."
    )


def test_a_decision_of_an_older_log_is_its_reason_alone() -> None:
    job = Job().run("none", 20).decide("none", "no", **{"none.error": 0.0})
    assert spoken(job) == ["Decisions", "  1. step 20, stays at none: no"]


def test_levels_that_send_no_less_are_passed_over_aloud() -> None:
    def levels(**sent: float) -> dict[str, Any]:
        return {"levels": {name: {"payload_bytes": count} for name, count in sent.items()}}

    sparse = levels(none=4e6, fp16=2e6, big=3e6, small=1e6)
    assert "  passed over  big (sends 3.00 MB, no less than fp16: 2.00 MB)\n" in table(Job(**sparse).records)
    # Since buckets were cut anew; what users write at the end under that name is theirs.
    job = Job(**sparse).write("resize", **levels(none=4e6, fp16=2e6, big=1.5e6, small=1.5e6)).end(levels=7)
    assert "  passed over  small (sends 1.50 MB, no less than big: 1.50 MB)\n" in table(job.records)
    assert "passed over" not in table(Job(**levels(none=4e6, fp16=2e6)).records)
    same = levels(none=4e6, late=1e6, soon=1e6, later=1e6)
    same["levels"]["soon"]["delay_weight"] = 0.6
    assert "  passed over  later (sends 1.00 MB, no less than late: 1.00 MB)\n" in table(Job(**same).records)
    assert "passed over" not in table(Job(compression="big", **sparse).records)
    assert "passed over" not in table(Job().records)  # an older log


def test_refused_levels_are_named_with_their_reasons() -> None:
    def fact() -> str:
        return re.sub(r"\s+", " ", table(job.records).split("\n\n")[0].partition("\n  refused ")[2])

    job = Job(ladder=["none", "fp16", "int8", "lowrank:4", "topk:0.01"]).run("lowrank:4", 30)
    job.decide("fp16", "the residual at lowrank:4 is 5.10 times the gradient (budget 4); fp16 promises 3.00 ms")
    why = "from step 30 on, since the residual at lowrank:4 is 5.10 times the gradient (budget 4)"
    assert fact() == f" lowrank:4 {why}"
    job.run("fp16", 9).write("forbid", step=39, level="int8", reason="it may not")
    assert fact() == " lowrank:4, int8, topk:0.01 from step 39 on, since it may not"


def test_what_is_not_refused_is_not_named() -> None:
    assert "refused" not in table(demo().records)


def test_columns_are_aligned() -> None:
    job = Job().run("none", 20, loss=123.0).run("lowrank:4", 20000, loss=0.5)
    head, units, *rows = table(job.records).splitlines()[8:12]
    assert len({len(line) for line in (head, *rows)}) == 1 and len(units) <= len(head)
    assert all(row.startswith(f"{steps:<8}  {level:<9}  ") for row, steps, level in zip(
        rows, ("0-19", "20-20019"), ("none", "lowrank:4"), strict=True
    ))  # fmt: skip


def test_stretches_weigh_windows_by_their_steps() -> None:
    job = Job().run("none", 3, (480.0, 0.0, 0.0, 0.0)).run("none", 20).run("fp16", 5).run("none", 10)
    first, second, third = stretches(job.records)
    assert (first.level, first.first_step, first.last_step, first.steps) == ("none", 0, 22, 23)
    assert first.step_ms == pytest.approx(19.8)  # the compilation is 3 of 23 steps
    assert (second.level, second.steps, third.level, third.first_step) == ("fp16", 5, "none", 28)
    assert first.exposed_share == pytest.approx(8 / 19.8)


def test_what_the_records_do_not_hold_is_a_dash() -> None:
    log = RunLog(None)
    log.write("window", first_step=0, last_step=9, level="none")
    lines = table(log.records).splitlines()
    assert lines[0] == "hvdplus run: the log does not describe the run."
    assert re.split(r"\s{2,}", lines[4]) == ["0-9", "none", *["-"] * 10]
    assert lines[-2] == "The log has no end: the job is still running, or was stopped."
    assert lines[-1] == "Too little was measured (10 steps) to say what hvdplus did."


def test_many_hosts_are_counted() -> None:
    job = Job(ranks=16, hosts={f"node{i}": 2 for i in range(8)})
    assert "16 ranks on 8 hosts (node0: 2, node1: 2, node2: 2, node3: 2, +4 more)" in table(job.records)


# ------------------------------------------------------------------------------------------ closing sentence

DENSE_BOUND, DENSE_FREE = TIMES["none"], (19.0, 0.2, 0.4, 0.2)

PROMISES = {
    "none.step_ms": 19.8, "none.exposed_comm_ms": 8.0, "fp16.predicted_step_ms": 20.9,
    "lowrank:4.predicted_step_ms": 20.1,
}  # fmt: skip

CASES: dict[str, tuple[Callable[[], Job], str]] = {
    "hidden": (
        demo,
        "Communication was hidden at level fp16: 12.1 ms a step against 19.8 ms dense (1.64 x).",
    ),
    "shorter, not hidden": (
        lambda: Job().run("none", 15).run("fp16", 100, (11.0, 0.6, 4.0, 0.4)),
        "Level fp16 made the step shorter: 16.0 ms a step against 19.8 ms dense (1.24 x); communication still held up "
        "25% of the step.",
    ),
    "no shorter": (
        lambda: Job().run("none", 15).run("lowrank:4", 100, (11.0, 8.4, 0.2, 0.4)),
        "Level lowrank:4 made the step no shorter: 20.0 ms a step against 19.8 ms dense (0.99 x). With 20.0 ms a step "
        "it comes to the same loss no sooner than at none (19.8 ms a step).",
    ),
    "delay has its price": (
        lambda: (
            Job(limits={"delay_price": 0.1}).run("none", 15).run("lowrank:4", 100, (11.0, 0.6, 4.0, 0.4), error=1.0)
        ),
        "Level lowrank:4 made the step shorter: 16.0 ms a step against 19.8 ms dense (1.24 x); communication still "
        "held up 25% of the step. With 16.0 ms a step and 10.0% more steps for what arrives late it comes to the same "
        "loss 1.12 x sooner than at none (19.8 ms a step).",
    ),
    "held against what was predicted": (
        lambda: (
            Job()
            .run("lowrank:4", 50)
            .decide("lowrank:4", "best", **{"none.predicted_step_ms": 19.8, "fp16.predicted_step_ms": 15.0})
            .run("lowrank:4", 50)
        ),
        "100 of 100 steps ran at level lowrank:4 (13.0 ms, communication 0% of the step); too few ran dense to compare "
        "with. With 13.0 ms a step it comes to the same loss 1.15 x sooner than at fp16 (15.0 ms a step as predicted).",
    ),
    "fixed level": (
        lambda: Job(compression="fp16").run("fp16", 100),
        "100 of 100 steps ran at level fp16, as asked for (12.1 ms, communication 1% of the step); too few ran dense "
        "to compare with.",
    ),
    "too few dense steps": (
        lambda: Job().run("none", 4).run("fp16", 96),
        "96 of 100 steps ran at level fp16 (12.1 ms, communication 1% of the step); too few ran dense to compare with.",
    ),
    "fixed dense": (
        lambda: Job(compression="none").run("none", 100),
        "Gradients were sent uncompressed, as asked for: communication held up 40% of the step (19.8 ms).",
    ),
    "no bottleneck": (
        lambda: Job().run("none", 100, DENSE_FREE),
        "Communication was never the bottleneck (2% of the step): gradients were sent uncompressed.",
    ),
    "does not pay": (
        lambda: Job().run("none", 15).run("fp16", 12, (19.0, 0.6, 0.1, 0.0)).run("none", 100),
        "Compression did not pay: the best level tried, fp16, took 19.7 ms a step against 19.8 ms dense (1.01 x; its "
        "computation and input wait took 7.60 ms longer), so 115 of 127 steps ran uncompressed.",
    ),
    "shorter by computation alone": (
        lambda: Job().run("none", 15).run("fp16", 100, (5.0, 0.4, 8.0, 0.4)),
        "Level fp16 made the step no shorter: 13.8 ms a step against 13.8 ms dense with the same computation (1.00 x; "
        "dense as it ran: 19.8 ms).",
    ),
    "shorter by computation too": (
        lambda: Job().run("none", 15).run("fp16", 100, (9.0, 0.6, 0.1, 0.4)),
        "Communication was hidden at level fp16: 10.1 ms a step against 17.8 ms dense with the same computation "
        "(1.76 x; dense as it ran: 19.8 ms).",
    ),
    "as good as equal computation": (
        lambda: Job().run("none", 15).run("fp16", 100, (10.7, 0.6, 0.1, 0.4)),
        "Communication was hidden at level fp16: 11.8 ms a step against 19.8 ms dense (1.68 x).",
    ),
    "nothing saved but 2%": (
        lambda: Job().run("none", 15).run("fp16", 100, (11.0, 0.4, 7.62, 0.4)),
        "Level fp16 made the step no shorter: 19.4 ms a step against 19.8 ms dense (1.02 x).",
    ),
    "the best is what saved most, not what computed least": (
        lambda: (
            Job()
            .run("none", 100)
            .run("fp16", 12, (9.0, 0.4, 9.0, 0.4))
            .run("lowrank:4", 12, (11.0, 8.1, 0.0, 0.4))
            .run("none", 100)
        ),
        "Compression did not pay: the best level tried, lowrank:4, took 19.5 ms a step against 19.8 ms dense (1.02 x), "
        "so 200 of 224 steps ran uncompressed.",
    ),
    "a bottleneck, and no level promised enough": (
        lambda: (
            Job()
            .run("none", 20)
            .decide("none", "does not pay", **PROMISES)
            .run("none", 100, DENSE_FREE)
            .decide("none", "no bottleneck", **{**PROMISES, "none.exposed_comm_ms": 0.9, "none.step_ms": 18.5})
            .run("none", 100, DENSE_FREE)
        ),
        "Communication held up 40% of a 19.8 ms step (step 20), but no level promised enough (the best, lowrank:4: "
        "20.1 ms): gradients were sent uncompressed.",
    ),
    "a bottleneck, and no other level": (
        lambda: (
            Job()
            .run("none", 100, DENSE_FREE)
            .decide("none", "alas", **{"none.step_ms": 20.0, "none.exposed_comm_ms": 1.1})
        ),
        "Communication held up 6% of a 20.0 ms step (step 100), but no other level may run: gradients were sent "
        "uncompressed.",
    ),
    "a bottleneck, and the end": (
        lambda: Job().run("none", 100, DENSE_FREE).decide("fp16", "try it", **PROMISES).run("fp16", 4),
        "Communication held up 2% of the step, but no other level ran long enough to compare (104 steps).",
    ),
    "no bottleneck, for all decisions": (
        lambda: (
            Job()
            .run("none", 100, DENSE_FREE)
            .decide("none", "5%", **{**PROMISES, "none.exposed_comm_ms": 1.0, "none.step_ms": 20.0})
            .decide("none", "an older log")
        ),
        "Communication was never the bottleneck (2% of the step): gradients were sent uncompressed.",
    ),
    "good, but refused": (
        lambda: (
            Job()
            .run("none", 100)
            .run("lowrank:4", 12)
            .decide("none", "the residual at lowrank:4 is 9.00 times the gradient (budget 4)")
        ),
        "lowrank:4 took 13.0 ms a step against 19.8 ms dense (1.52 x), but was refused from step 112 on, since the "
        "residual at lowrank:4 is 9.00 times the gradient (budget 4).",
    ),
    "ended in a trial": (
        lambda: Job().run("none", 15).run("fp16", 7),
        "fp16 took 12.1 ms a step against 19.8 ms dense (1.64 x), but ran for only 7 of 22 steps.",
    ),
    "ended before a trial": (
        lambda: Job().run("none", 15).run("fp16", 3),
        "Communication held up 40% of the step, but no other level ran long enough to compare (18 steps).",
    ),
    "one rank": (
        lambda: Job(ranks=1, transport="local").run("none", 100, (20.0, 0.0, 0.0, 1.0)),
        "The job ran on one rank and had no communication to shorten (21.0 ms a step).",
    ),
    "draining is no level": (
        lambda: (
            Job()
            .run("none", 15)
            .run("fp16", 12, (19.0, 0.6, 0.1, 0.0))
            .run(DRAINING, 10, (9.0, 0.0, 0.0, 0.0))
            .run("none", 100)
        ),
        "Compression did not pay: the best level tried, fp16, took 19.7 ms a step against 19.8 ms dense (1.01 x; its "
        "computation and input wait took 7.60 ms longer), so 115 of 137 steps ran uncompressed.",
    ),
    "nearly nothing": (
        lambda: Job().run("none", 3),
        "Too little was measured (3 steps) to say what hvdplus did.",
    ),
    "nothing": (Job, "No steps were recorded: there is nothing to compare."),
}


@pytest.mark.parametrize("case", CASES)
def test_the_closing_sentence(case: str) -> None:
    job, sentence = CASES[case]
    assert closing(job().records) == sentence


def test_a_job_of_days_is_summed_up_in_a_moment(tmp_path: Path) -> None:
    records = Job(tmp_path / "run.jsonl").run("none", 20).run("fp16", 500_000).records
    began = time.perf_counter()
    closing(records)
    assert time.perf_counter() - began < 5  # takes half a second; every window against every other took minutes


# -------------------------------------------------------------------------------------------------- picture


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Job], Any]:
    """Draws a job's picture, checks the file, and returns the figure behind it."""
    figure_module = pytest.importorskip("matplotlib.figure")
    figures: list[Any] = []
    save = figure_module.Figure.savefig

    def savefig(figure: Any, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(figure_module.Figure, "savefig", savefig)

    def draw(job: Job) -> Any:
        path = picture(job.records, tmp_path / "deep" / "run.png")
        blank = tmp_path / "blank.png"
        save(figure_module.Figure(figsize=(14, 10), dpi=100), blank)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (1400, 1000)
        assert len(data) > 3 * blank.stat().st_size
        assert_legible(figures[-1])
        return figures[-1]

    return draw


def assert_legible(figure: Any) -> None:
    """Everything lies on the page, and no text is a formula that was not set."""
    from matplotlib.text import Text

    box = figure.get_tightbbox()  # in inches
    assert box.x0 >= 0 and box.x1 <= 14 and box.y0 >= 0 and box.y1 <= 10
    assert not [text for text in figure.findobj(Text) if text.get_visible() and "$" in text.get_text()]


def texts(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def remark(figure: Any) -> str:
    """What stands over the right end of the first panel."""
    return str(figure.axes[0].texts[0].get_text())


def test_a_picture_has_times_levels_and_loss(drawn: Callable[[Job], Any]) -> None:
    figure = drawn(demo())
    times, levels, loss = figure.axes
    assert [axis.get_ylabel() for axis in figure.axes] == ["ms a step", "level", "loss"]
    assert times.get_xlim() == levels.get_xlim() == loss.get_xlim() == (0, 300)
    assert [label.get_text() for label in levels.get_yticklabels()] == list(SENT)
    names = [text.get_text() for text in times.get_legend().get_texts()]
    assert names == ["compute", "codec", "exposed communication", "input wait"]
    assert {text.get_text() for text in levels.texts} == {"1", "2"}
    headline, sentence, first, second = texts(figure).split("\n")
    assert headline == (
        "PyTorch on 2 ranks on 1 host, Horovod over MPI (ring), compression auto: none → fp16 → lowrank:4"
    )
    assert sentence == closing(demo().records)
    assert first.startswith("1   step 15, none → fp16: communication holds up 40%")
    assert second.startswith("2   step 27, stays at fp16: fp16 saves 39%")
    assert remark(figure) == ""


def test_a_loss_over_decades_has_plain_figures(drawn: Callable[[Job], Any]) -> None:
    job = Job()
    for exponent in range(4):
        job.run("none", 10, loss=3 * 10.0**-exponent)
    axis = drawn(job).axes[2]
    assert axis.get_yscale() == "log"
    assert {"1", "0.1", "0.01"} <= {label.get_text() for label in axis.get_yticklabels()}


def test_draining_lies_below_dense(drawn: Callable[[Job], Any]) -> None:
    job = Job().run("none", 15).run("lowrank:4", 12).decide("none", "does not pay").run(DRAINING, 10, DENSE_BOUND)
    figure = drawn(job.run("none", 100))
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == [DRAINING, *SENT]


def test_numbers_of_decisions_do_not_overlap(drawn: Callable[[Job], Any]) -> None:
    job, lengths = Job(), random.Random(3)
    for _ in range(150):
        job.run("none", lengths.choice((5, 12, 40, 900))).decide("none", "still the best")
    labels = drawn(job).axes[1].texts
    boxes = [label.get_bbox_patch().get_window_extent() for label in labels]
    assert all(left.x1 <= right.x0 for left, right in zip(boxes[:-1], boxes[1:], strict=True))
    numbers = [[int(number) for number in label.get_text().split("–")] for label in labels]
    assert [first for first, *_ in numbers] == [1, *(last + 1 for *_, last in numbers[:-1])] and numbers[-1][-1] == 150


def test_one_window_without_loss(drawn: Callable[[Job], Any]) -> None:
    figure = drawn(Job(framework="keras").run("none", 10))
    assert [axis.get_ylabel() for axis in figure.axes] == ["ms a step", "level"]
    assert texts(figure).startswith("Keras on 2 ranks")


def test_a_first_window_with_a_compilation_is_cut_off_aloud(drawn: Callable[[Job], Any]) -> None:
    job = Job().run("none", 10, (480.0, 0.4, 8.0, 0.4)).run("none", 10).run("fp16", 100)
    figure = drawn(job)
    assert remark(figure) == "cut off: 1 window, up to 489 ms"
    assert 19.8 < figure.axes[0].get_ylim()[1] < 60


def test_a_slow_level_is_no_outlier(drawn: Callable[[Job], Any]) -> None:
    figure = drawn(Job().run("none", 20, (11.0, 0.4, 200.0, 0.4)).run("fp16", 2000))
    assert remark(figure) == "" and figure.axes[0].get_ylim()[1] > 211


def test_times_of_nothing_at_all(drawn: Callable[[Job], Any]) -> None:
    drawn(Job().run("none", 30, (0.0, 0.0, 0.0, 0.0)))


def test_a_very_long_run_takes_windows_together(drawn: Callable[[Job], Any], tmp_path: Path) -> None:
    figure = drawn(Job(tmp_path / "run.jsonl").run("none", 20).run("fp16", 100_000, loss=0.5))
    assert remark(figure) == "one column: median of 26 windows"
    assert len(figure.axes[2].lines[0].get_xdata()) <= 500


def test_at_the_end_of_a_very_long_run_the_picture_still_shows_all_of_it(drawn: Callable[[Job], Any]) -> None:
    """Memory holds nine windows of old in one by then, and a column four of those."""
    figure = drawn(Job().run("none", 20).run("fp16", 50_000, loss=0.5))
    assert figure.axes[0].get_xlim() == (0, 50_020)
    assert remark(figure) == "one column: median of 36 windows"
    assert len(figure.axes[2].lines[0].get_xdata()) <= 500


def test_decisions_that_do_not_fit_are_counted(drawn: Callable[[Job], Any]) -> None:
    job = Job(ladder=[*SENT, "topk:0.01+int8", "lowrank:1+fp16", "int2"], hosts={f"node{i}": 8 for i in range(40)})
    for number in range(120):
        level = list(SENT)[number % 3]
        job.decide(level, "the step changed by +34%, with more exposed communication than before " * 3)
        job.run(level, random.Random(number).randint(1, 900), loss=1.0)
    figure = drawn(job)
    listed = texts(figure).split("\n")
    more = re.fullmatch(r"\+(\d+) more in the log", listed[-1])
    assert more and int(more[1]) == 120 - sum(bool(re.match(r"\d+   step ", line)) for line in listed)


def test_names_are_no_formulas(drawn: Callable[[Job], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "assert_legible", lambda figure: None)  # dollars are right here
    figure = drawn(Job().run("none", 10, loss=1.0).decide("fp16", "costs $1_000^2 and \\frac{"))
    assert "costs $1_000^2 and \\frac{" in texts(figure)


def test_no_windows_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no window"):
        picture(Job().records, tmp_path / "run.png")
    assert not list(tmp_path.iterdir())


def test_drawing_leaves_the_scripts_own_matplotlib_alone(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.rcParams["lines.linewidth"] = 7.5
    before = dict(matplotlib.rcParams)
    try:
        picture(demo().records, tmp_path / "run.png")
        assert dict(matplotlib.rcParams) == before
    finally:
        matplotlib.rcdefaults()


# ------------------------------------------------------------------------------------------------------ CLI


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def test_report_prints_the_table_and_draws_beside_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    job = demo(tmp_path / "run.jsonl")
    assert main(["report", str(tmp_path / "run.jsonl")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{table(job.records)}\n\nPicture: {tmp_path / 'run.png'}\n" and err == ""
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_every_optimizers_log_has_a_picture_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name in ("run.jsonl", "run.jsonl.1", "run.jsonl.rejoined1"):
        demo(tmp_path / name)
        assert main(["report", str(tmp_path / name)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"run.png", "run.jsonl.1.png", "run.jsonl.rejoined1.png"}


def test_report_draws_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    demo(tmp_path / "run.jsonl")
    assert main(["report", str(tmp_path / "run.jsonl"), "--png", str(tmp_path / "a/b.png")]) == 0
    assert (tmp_path / "a/b.png").exists() and not (tmp_path / "run.png").exists()


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_table_still_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo(tmp_path / "run.jsonl")
    log = str(tmp_path / "run.jsonl")
    hint = "hvdplus report: no picture: the picture needs matplotlib: pip install 'hvdplus[viz]'\n"
    assert main(["report", log]) == 0
    out, err = capsys.readouterr()
    assert "Communication was hidden" in out and err == hint
    assert main(["report", log, "--png", str(tmp_path / "asked.png")]) == 2  # this one was asked for
    assert capsys.readouterr().err == hint
    assert main(["report", log, "--no-png"]) == 0
    assert capsys.readouterr().err == ""


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    demo(tmp_path / "run.jsonl")
    (tmp_path / "folder.png").mkdir()
    assert main(["report", str(tmp_path / "run.jsonl"), "--png", str(tmp_path / "folder.png")]) == 2
    assert f"no picture: cannot write {tmp_path / 'folder.png'}: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*run.jsonl: No such file or directory"),
        ("", ".*run.jsonl: the log is empty; the job wrote nothing"),
        ("loss went up\n", ".*run.jsonl, line 1: expected one JSON object"),
    ],
)
def test_a_log_that_cannot_be_read_is_code_2(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.match(f"hvdplus report: {message}", err)


def test_a_place_for_no_picture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["report", "run.jsonl", "--png", "a.png", "--no-png"])
    assert caught.value.code == 2
