"""``hvdplus compressors`` and ``hvdplus plan``: figures are those of closed forms, and nothing breaks a table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvdplus import __version__
from hvdplus.cli import main
from hvdplus.compression import TABLE, NoCompression, register

MEASURED_WORDS = 8
"""Words behind the lanes of every bucket that quantisers send."""


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's ``HVDPLUS_*`` stay outside."""
    for name in [name for name in os.environ if name.startswith("HVDPLUS_")]:
        monkeypatch.delenv(name)


def cells(text: str) -> dict[str, list[str]]:
    """First cell of every line -> the others; cells stand two blanks or more apart."""
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines() if line and not line.startswith(" ")]
    return {row[0]: row[1:] for row in rows}


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Standard output of a command that succeeds."""
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(line == line.rstrip() for line in out.splitlines())
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a command that is refused."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"hvdplus {argv[0]}: ")
    return err


def hvdplus(*argv: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The real command line in a process of its own, which says at its end what it imported."""
    program = "import sys; from hvdplus.cli import main; code = main(); print('imported', *sys.modules); sys.exit(code)"
    environ = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run(
        [sys.executable, "-c", program, *argv], env=environ, capture_output=True, text=True, check=False
    )


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hvdplus {__version__}\n"


# -- compressors -------------------------------------------------------------------------------------------------------

MATRIX, TAIL = 4096 * 1024, 4096 + 1024
BLOCKS = MATRIX // 256


@pytest.mark.parametrize(
    ("ranks", "spelling", "kind", "floats", "keeps"),
    [
        (4, "none", "projection", MATRIX + TAIL, "nothing"),
        (4, "fp16", "projection", (MATRIX + TAIL) / 2, "nothing"),
        (4, "randomk:0.01", "projection", 164 * 256 + TAIL, "residual"),  # 1% of the blocks is 163.84
        (4, "topk:0.01", "projection", 164 * 256 + TAIL + BLOCKS, "residual"),
        (4, "lowrank:4", "projection", 4 * (4096 + 1024) / 2 + TAIL, "residual"),  # its sides take turns
        (4, "int8", "quantiser", MATRIX / 4 + TAIL + MEASURED_WORDS, "residual"),
        (4, "qsgd:8", "quantiser", MATRIX / 4 + TAIL + MEASURED_WORDS, "nothing"),
        (4, "terngrad", "quantiser", MATRIX / 8 + TAIL + MEASURED_WORDS, "nothing"),  # sums of 4 signs: 4 bits
        (4, "signsgd", "quantiser", MATRIX / 8 + TAIL + MEASURED_WORDS, "residual"),
        (200, "signsgd", "quantiser", -(-MATRIX // 7) * 2 + TAIL + 2 * MEASURED_WORDS, "residual"),  # 9 bits, 7 in 64
    ],
)
def test_a_row_of_the_list(
    ranks: int, spelling: str, kind: str, floats: float, keeps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = cells(printed(capsys, "compressors", "--ranks", str(ranks)))[spelling]
    assert row[:3] == [kind, f"{(MATRIX + TAIL) / floats:.1f} x", keeps]


def test_the_list_has_every_row_of_the_table_and_says_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "compressors")
    assert {row.usual for row in TABLE.values()} <= set(cells(text))
    assert "4096 x 1024 matrix and vectors of 4096 and 1024 (16.8 MB in fp32), on 4 ranks" in text
    assert re.search(r"^topk:0\.01 .* 1712\.01887,  the choice: block", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 105


def test_chains_and_how_to_add_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(printed(capsys, "compressors").split())
    topk = 819 * 256 / 4 + BLOCKS + TAIL + MEASURED_WORDS  # 5% of the blocks is 819.2
    lowrank = (4 * (4096 + 1024) / 2 + TAIL) / 2
    assert f"topk:0.05+int8 ({(MATRIX + TAIL) / topk:.1f} x)" in text
    assert f"lowrank:4+fp16 ({(MATRIX + TAIL) / lowrank:.1f} x)" in text
    assert 'hvdplus.compression.register("name", build)' in text and "hvdplus.compressors." in text


def test_a_compressor_that_cannot_serve_so_many_ranks_says_so_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "compressors", "--ranks", "200")
    reason = r"^int8 +int8 leaves no level for a sum over 200 ranks: .*; 9 bits are enough$"
    assert re.search(reason, text, re.MULTILINE)
    assert "topk:0.05+int8 (int8 leaves no level" in " ".join(text.split())


def test_registered_compressors_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    register("mine", NoCompression)
    try:
        assert cells(printed(capsys, "compressors"))["mine"][:2] == ["projection", "1.0 x"]
    finally:
        del TABLE["mine"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Another package with compressors: one that works, one that sends nothing, and trouble of all kinds."""
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    names = ("nightly", "hollow", "keen", "picky", "wrong", "absent")
    (tmp_path / "other-1.dist-info/entry_points.txt").write_text(
        "[hvdplus.compressors]\n" + "".join(f"{name} = other:{name}\n" for name in names) + "gone = no_such_module:x\n"
    )
    (tmp_path / "other.py").write_text(
        "from hvdplus.compression import NoCompression\n"
        "class nightly(NoCompression):\n    name, paper, learns = 'nightly', '2401.00001', 'the weather'\n"
        "class keen(NoCompression):\n    def payload_bytes(self, spec, side=0): raise RuntimeError('no\\nidea')\n"
        "class hollow(NoCompression):\n    def payload_bytes(self, spec, side=0): return 0\n"
        "def picky(text): return NoCompression()\n"
        "def wrong(): return 3\n"
    )
    return tmp_path


def test_compressors_of_other_packages_are_listed_and_break_nothing(package: Path) -> None:
    done = hvdplus("compressors", path=package)
    assert (done.returncode, done.stderr) == (0, "")
    rows = cells(done.stdout)
    assert rows["nightly"] == ["projection", "1.0 x", "nothing", "2401.00001", "the weather"]
    assert rows["hollow"][:2] == ["projection", "-"]
    assert rows["keen"] == ["RuntimeError: no idea"]
    missing = "picky() missing 1 required positional argument: 'text'"
    assert rows["picky"] == [f"does not load: Bad compression 'picky': {missing}"]
    assert rows["gone"] == ["does not load: ModuleNotFoundError: No module named 'no_such_module'"]
    wrong = "Bad compression 'wrong': other:wrong must return a Compressor. Received: 3"
    assert rows["wrong"] == [f"does not load: {wrong}"]
    assert rows["absent"] == ["does not load: AttributeError: module 'other' has no attribute 'absent'"]
    assert {row.usual for row in TABLE.values()} <= set(rows)


def test_a_plan_takes_compressors_of_other_packages(package: Path) -> None:
    done = hvdplus("plan", "--shape", "1000x1000", "nightly", "keen", path=package)
    assert cells(done.stdout)["nightly"] == ["4.000", "1.0 x", "0.0", "0.000"]
    assert cells(done.stdout)["keen"] == ["RuntimeError: no idea"]
    done = hvdplus("plan", "--shape", "1000x1000", "gone", path=package)
    assert done.returncode == 2 and "No module named 'no_such_module'. Received: 'gone'\n" in done.stderr


@pytest.mark.parametrize("argv", [("compressors",), ("plan", "--parameters", "1M")])
def test_no_framework_is_imported(argv: tuple[str, ...]) -> None:
    done = hvdplus(*argv)
    imported = done.stdout.splitlines()[-1].split()
    assert done.returncode == 0 and "hvdplus.exchange.bucket" in imported
    assert not {"torch", "tensorflow", "keras", "horovod", "mpi4py", "matplotlib"} & set(imported)


# -- plan --------------------------------------------------------------------------------------------------------------

MODEL = ("--shape", "1024", "--shape", "3x3x64x128", "--shape", "15x17", "--shape", "4096x1024")
"""A matrix that fills a bucket of its own, and in a second one a vector, a convolution and a tensor of 255 elements."""
CONVOLUTION, WHOLE = 3 * 3 * 64 * 128, 1024 + 15 * 17
ELEMENTS = MATRIX + CONVOLUTION + WHOLE


@pytest.mark.parametrize(
    ("spelling", "ranks", "sent_floats", "passes"),
    [
        ("none", 2, ELEMENTS, 0),
        ("fp16", 2, ELEMENTS / 2, 3),
        ("int8", 2, (MATRIX + CONVOLUTION) / 4 + WHOLE + 2 * MEASURED_WORDS, 6),
        ("int4", 4, (MATRIX + CONVOLUTION) / 8 + WHOLE + 2 * MEASURED_WORDS, 6),
        ("lowrank:4", 2, 2 * (4096 + 1024) + 2 * (576 + 128) + WHOLE, 5),  # sides in turns; convolution as 576 x 128
        ("lowrank:4+fp16", 2, (2 * (4096 + 1024) + 2 * (576 + 128) + WHOLE) / 2, 6),
        ("topk:0.01", 2, 164 * 256 + MATRIX / 256 + 3 * 256 + CONVOLUTION / 256 + WHOLE, 5),  # 2.88 of 288 blocks
        ("randomk:0.5:64", 8, (MATRIX + CONVOLUTION) / 2 + WHOLE, 3),
    ],
)
def test_a_row_of_the_plan(
    spelling: str, ranks: int, sent_floats: float, passes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "plan", *MODEL, "--ranks", str(ranks), "--gbit", "2.5", spelling)
    ring_ms = 2 * (ranks - 1) / ranks * 4 * sent_floats * 8 / 2.5e9 * 1e3
    assert cells(text)[spelling] == [
        f"{4 * sent_floats / 1e6:.3f}",
        f"{ELEMENTS / sent_floats:.1f} x",
        f"{passes}.0",
        f"{passes * 4 * ELEMENTS / 1e9:.3f}",
        f"{ring_ms:.2f}",
    ]
    size = f"4 tensors, {ELEMENTS:,} parameters, {4 * ELEMENTS / 1e6:.3f} MB in fp32, in 2 buckets; {ranks} ranks"
    assert f"Model: {size}. An estimate: nothing was run.\n" in text
    assert "latency is not included" in text and f"= {2 * (ranks - 1) / ranks:.3g} times" in text


def test_without_a_rate_there_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "plan", "--shape", "1000x1000")
    rows = cells(text)
    assert rows["none"] == ["4.000", "1.0 x", "0.0", "0.000"] and rows["fp16"] == ["2.000", "2.0 x", "3.0", "0.012"]
    assert {"int8", "lowrank:4", "topk:0.05+int8"} <= set(rows)
    assert "Gbit/s" not in text and "latency" not in text


def test_auto_stands_for_the_levels_of_its_ladder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDPLUS_LADDER", "none,int8,lowrank:2+fp16")
    rows = cells(printed(capsys, "plan", "--shape", "1000x1000", "auto", "fp16"))
    levels = ["none", "int8", "lowrank:2+fp16", "fp16"]
    assert [row for row in rows if row in levels] == levels and "int4" not in rows
    assert "lowrank:2+fp16" in cells(printed(capsys, "plan", "--shape", "1000x1000"))
    assert "auto chooses from none, int8, lowrank:2+fp16" in printed(capsys, "compressors")


def test_one_rank_sends_nothing_over_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert cells(printed(capsys, "plan", "--shape", "1000x1000", "--ranks", "1", "--gbit", "1"))["none"][-1] == "0.00"


def test_buckets_are_as_large_as_the_setting_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDPLUS_BUCKET_BYTES", "4")
    assert "in 4 buckets" in printed(capsys, "plan", *MODEL)
    monkeypatch.setenv("HVDPLUS_BUCKET_BYTES", "much")
    assert "HVDPLUS_BUCKET_BYTES='much'" in refused(capsys, "plan", *MODEL)


@pytest.mark.parametrize(
    ("text", "rows", "columns"),
    [("25M", 5000, 5000), ("1.5B", 38729, 38731), ("250k", 500, 500), ("60000", 244, 246), ("2", 1, 2)],
)
def test_parameters_alone_are_one_matrix_and_it_says_so(
    text: str, rows: int, columns: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, "plan", "--parameters", text, "none")
    assert f"One {rows} x {columns} matrix stands for all {text} parameters, an approximation" in out
    assert cells(out)["none"][0] == f"{4 * rows * columns / 1e6:.3f}"


def test_who_cannot_serve_so_many_ranks_says_so_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = cells(printed(capsys, "plan", "--shape", "1000x1000", "--ranks", "4", "int2", "int4", "topk:0.05+int2"))
    (why,) = rows["int2"]
    assert why.startswith("int2 leaves no level for a sum over 4 ranks") and why.endswith("; 4 bits are enough")
    assert rows["topk:0.05+int2"] == [why]
    assert rows["int4"][1] == "8.0 x"


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        ("--shape", ("4096x", "x4", "0x3", "-3", "a", "4 x 4", "4X4", "\u0663", "")),
        ("--parameters", ("25X", "0", "M", "-1", "1e6", "0.4", 400 * "9")),
        ("--ranks", ("0", "-1", "two", "1.5", "\u0663", "")),
        ("--gbit", ("0", "-1", "fast", "nan", "inf", "")),
    ],
)
def test_a_wrong_value_is_named_in_one_line(
    option: str, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    model = () if option in ("--shape", "--parameters") else ("--shape", "10")
    for text in texts:
        line = refused(capsys, "plan", *model, option, text)
        assert f"{option} wants" in line and f"Received: {text!r}" in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("plan",), "Received: neither"),
        (("plan", "--shape", "10", "--parameters", "10"), "Received: both"),
        (("plan", "--shape", "10", "fp17"), "'fp17'"),
        (("plan", "--shape", "10", "lowrank:x"), "'x'"),
        (("plan", "--shape", "10", "none", "topk:0.05+int99"), "'topk:0.05+int99', at 'int99'"),
        (("compressors", "--ranks", "none"), "--ranks wants a whole number of at least 1. Received: 'none'"),
    ],
)
def test_what_cannot_be_read_is_one_line(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(capsys, *argv)


def test_a_reader_that_has_seen_enough_sees_no_traceback() -> None:
    """As in ``hvdplus compressors | head -1``."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(["hvdplus", "compressors"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
