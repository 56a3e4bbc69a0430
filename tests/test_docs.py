"""What docs/ says of formats and rooms is what the sources do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PARSED = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("hvdplus", "adapters")  # links are not followed
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TREES = PARSED.values()


def written() -> Iterator[tuple[str, str]]:
    """(kind, field) of every record that the sources write into a run log."""
    for tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("log.write"):
                kind = ast.literal_eval(node.args[0])
                for keyword in node.keywords:
                    if keyword.arg not in (None, "keep"):
                        yield kind, str(keyword.arg)


def stored() -> set[str]:
    """Keys of what an exchange or its coordinator puts into a checkpoint: of the dictionaries that ``state`` makes."""
    return {
        key.value
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("state", "save")
        for inner in ast.walk(node)
        if isinstance(inner, ast.Dict)
        for key in inner.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def test_every_record_of_the_run_log_is_described() -> None:
    text = (DOCS / "log-format.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## `(\w+)`(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL))
    sections |= dict(re.findall(r"^\| `(\w+)` (\| .*)$", text.partition("## The others")[2], flags=re.MULTILINE))
    records = set(written())
    assert {"run", "window", "trace", "resize", "forbid", "resume", "end"} <= {kind for kind, _ in records}
    assert [f"{kind}.{field}" for kind, field in sorted(records) if f"`{field}`" not in sections.get(kind, "")] == []


def test_every_field_of_a_checkpoint_is_described() -> None:
    text, fields = (DOCS / "checkpoint-format.md").read_text(encoding="utf-8"), stored()
    assert {"format", "residuals", "contexts", "level", "controller"} <= fields
    assert sorted(field for field in fields if f"`{field}`" not in text) == []


def test_formats_have_the_numbers_of_the_sources() -> None:
    for module, page in (("runlog", "log-format.md"), ("checkpoint", "checkpoint-format.md")):
        (tree,) = (tree for path, tree in PARSED.items() if path.stem == module)
        (number,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FORMAT"
        )
        assert f", format {number}\n" in (DOCS / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def messages() -> Iterator[str]:
    """Of all errors that a job may end with, without what is filled in."""
    for path, tree in PARSED.items():
        if path.name == "in_process.py" or path.parent.name == "cli":
            continue
        for node in ast.walk(tree):
            error = node.exc if isinstance(node, ast.Raise) else None
            if not (isinstance(error, ast.Call) and error.args):
                continue
            if ast.unparse(error.func) in ("TransportError", "RuntimeError", "NeedsHorovod"):
                parts = getattr(error.args[0], "values", [error.args[0]])
                yield "...".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


def test_every_error_leads_to_troubleshooting() -> None:
    """The page has some words of each."""
    page = " ".join((DOCS / "troubleshooting.md").read_text(encoding="utf-8").split())
    found = [message for message in messages() if re.search(r"\w{3,} \w+ \w+", message)]
    assert len(found) > 40
    lost = [
        message
        for message in found
        if not any(len(part) > 14 and part.strip()[:25].strip() in page for part in message.split("..."))
    ]
    assert not lost
