"""What ``benchmarks/rhythm.py`` makes of its figures."""

import json
import math
from pathlib import Path

import pytest
from rhythm import Price, Run, earlier, fit, joined, judge, judge_stragglers, overlap, period, reached, steps_ratio

LOSSES = (4.0, 3.3, 3.1, 2.9)


def training(seconds: float, losses: tuple[float, ...] = LOSSES) -> list[tuple[float, float]]:
    """A curve with a point every so many ``seconds``."""
    return [((place + 1) * seconds, loss) for place, loss in enumerate(losses)]


def test_a_loss_is_reached_on_a_straight_line_between_two_points() -> None:
    assert reached(training(10.0), 4.0) == 10.0
    assert reached(training(10.0), 3.2) == pytest.approx(25.0)
    assert reached(training(10.0), 2.0) == math.inf


def test_seeds_join_those_of_another_day(tmp_path: Path) -> None:
    first = [Run(2, rate, {"auto": [training(1.0)]}) for rate in ("20mbit", "1gbit")]
    path = tmp_path / "rhythm.json"
    path.write_text(json.dumps([run._asdict() for run in first]))
    second = [run._replace(curves={"auto": [training(2.0)]}) for run in first]
    both = joined(earlier(path, 1), second)
    assert [run.rate for run in both] == ["20mbit", "1gbit"]
    assert all(run.seconds("auto", 4.0) == 1.5 and len(run.final("auto")) == 2 for run in both)
    assert joined(earlier(path, 0), second) == second
    with pytest.raises(ValueError, match=r"wants so many seeds in .*rhythm.json. Received: \[1\]"):
        earlier(path, 2)
    with pytest.raises(ValueError, match="Received: no file"):
        earlier(tmp_path / "other.json", 1)


def test_names_say_how_often_and_how_late() -> None:
    assert [period(who) for who in ("auto", "horovod", "local 16 int4", "postlocal 4", "local auto auto")] == [
        1, 1, 16, 4, 1,
    ]  # fmt: skip
    assert overlap("local 8 int4 overlap_steps=4") == 4 and overlap("local 8 int4") == 0


def test_prices_are_found_again() -> None:
    """For models that gain and lose something by local steps, whatever their number."""
    found = [
        Price(model, every, late, base + 0.003 * (every - 1) + 0.1 * late / every)
        for model, base in (("text", 0.9), ("bytes", 1.1))
        for every, late in ((4, 0), (16, 0), (16, 8), (64, 0))
    ]
    assert fit(found) == pytest.approx((0.003, 0.1))


def test_steps_are_compared_all_along_the_way() -> None:
    twice = (4.35, 4.0, 3.65, 3.3, 3.2, 3.1, 3.0, 2.9)
    """LOSSES, half as fast."""
    assert steps_ratio(LOSSES, LOSSES) == 1.0
    assert steps_ratio(twice, LOSSES) == pytest.approx(2.0) and steps_ratio(LOSSES, twice) == pytest.approx(0.5)
    assert steps_ratio((*twice, 2.5), LOSSES) == pytest.approx(2.0), "to the last loss that both come to"
    behind = steps_ratio((4.5, 4.0, 3.3, 3.1), LOSSES)  # one step late at 3.3, 3.25, 3.2, 3.15 and 3.1
    assert behind == pytest.approx(math.prod((at + 1) / at for at in (2, 2.25, 2.5, 2.75, 3)) ** 0.2)
    assert steps_ratio((4.0, 3.9, 3.5, 3.4), LOSSES) == pytest.approx(4 / (1 + 6 / 7)), "never where dense soon is"


@pytest.mark.parametrize("mine", [5.0, 9.0])
def test_a_race_is_judged_at_every_loss_that_the_other_reaches(mine: float) -> None:
    others = ("auto", "horovod", "ddp powersgd:4:2", "postlocal 16", "local 16 int4")
    run = Run(2, "100mbit", {who: [training(10.0)] * 2 for who in others} | {"local auto auto": [training(mine)] * 2})
    verdicts = {each.line.partition(": ")[2]: each for each in judge(run)}
    sooner = verdicts["every=auto at least 1.5 x sooner than auto and PowerSGD"]
    assert sooner.passed == (mine == 5.0) and sooner.figures.startswith(f"{10 / mine:.2f} x")
    assert verdicts["every=auto ends as dense does"].passed
    worse = run.curves | {"local auto auto": [training(mine, (4.0, 3.3, 3.1, 2.95))] * 2}
    ends = "2 hosts, 100mbit: every=auto ends as dense does"
    assert not {each.line: each for each in judge(run._replace(curves=worse))}[ends].passed
    alone = {who: curves[:1] for who, curves in run.curves.items()}
    assert ends not in {each.line for each in judge(run._replace(curves=alone))}, "one seed does not say what seeds do"
    nobody = run.curves | {who: [training(10.0, (4.5, 4.4, 4.3, 4.2))] * 2 for who in ("auto", "ddp powersgd:4:2")}
    (unknown,) = (each for each in judge(run._replace(curves=nobody)) if "sooner than auto" in each.line)
    assert not unknown.passed and unknown.figures.startswith("none of auto, ddp powersgd:4:2 is at any of")


@pytest.mark.parametrize("seeds", [1, 2])
def test_the_best_of_local_steps_ends_as_dense_does(seeds: int) -> None:
    """With one seed nobody knows what it may end at, and the soonest is the best."""
    curves = {"auto": training(10.0), "horovod": training(10.0), "local 32 int4": training(4.0)}
    curves["local 64 int4"] = training(3.0, (4.0, 3.3, 3.1, 2.95))
    verdicts = judge(Run(2, "20mbit", {who: [curve] * seeds for who, curve in curves.items()}))
    (sooner,) = (each for each in verdicts if "sooner than auto" in each.line)
    assert ("local 32 int4" if seeds > 1 else "local 64 int4") in sooner.line and sooner.passed


def test_stragglers_are_judged_where_lock_step_ends() -> None:
    slow, fast = training(10.0), training(7.0)
    names = ("stale 3 every=4", "stale any every=4", "stale any every=8")
    curves = {"auto": [slow], "horovod": [slow], "local 8 fp16": [fast]} | {who: [slow] for who in names}
    assert not judge_stragglers(Run(2, "half speed", curves))[0].passed
    (verdict,) = judge_stragglers(Run(2, "half speed", curves | {names[1]: [fast]}))
    assert verdict.passed and names[1] in verdict.figures
    pairs = {who: [*each, training(10.0, (4.0, 3.6, 3.5, 3.4))] for who, each in curves.items()}
    pairs |= {names[1]: [fast, fast]}
    (verdict,) = judge_stragglers(Run(2, "half speed", pairs))
    assert verdict.passed and "inf" not in verdict.figures, "a loss that both seeds came to"
