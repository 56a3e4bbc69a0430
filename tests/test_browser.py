"""The report's page in a real browser: it opens from a file, offline, without a complaint, and is drawn."""

from __future__ import annotations

import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from PIL import Image
from test_page import uneven
from test_report import demo

from hvdplus.log.page import write_page
from hvdplus.log.words import closing

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium"),
]


def browse(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The page in a browser that can reach nothing but files."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-dev-shm-usage", f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--timeout=20000", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_the_page_opens_offline_without_a_complaint(tmp_path: Path) -> None:
    records = demo().records
    done = browse(write_page({"run.jsonl": records}, tmp_path / "run.html"), "--dump-dom")
    assert closing(records) in unescape(done.stdout) and done.stdout.count("<svg") >= 3
    assert "CONSOLE" not in done.stderr, done.stderr


def test_panels_are_drawn(tmp_path: Path) -> None:
    """Bars in their colours, next to each other as far as the page is wide."""
    page = write_page({"run.jsonl": demo().records, "uneven.jsonl": uneven().records}, tmp_path / "run.html")
    picture = tmp_path / "run.png"
    browse(page, f"--screenshot={picture}", "--window-size=1200,1600")
    with Image.open(picture) as image:
        pixels = image.convert("RGB")
        assert pixels.size == (1200, 1600)
        colours = dict(map(reversed, pixels.getcolors(1 << 24) or []))
        for colour in ((0xC3, 0xCA, 0xD3), (0xD5, 0x5E, 0x00)):  # computation, exposed communication
            assert colours.get(colour, 0) > 500
        grey = [x for x in range(1200) if (0xC3, 0xCA, 0xD3) in {pixels.getpixel((x, y)) for y in range(0, 1600, 3)}]
    assert max(grey) - min(grey) > 700
