"""The code in the documentation runs, and prints what its comments say. Tables name what there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import sidestream
from sidestream import Engine, cli, errors

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / "docs" / "python.md"


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/structured.md"])
def test_the_code_of_a_page_runs(page: str, default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`print(...)  # text` prints that text, spaces around it aside."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
        printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert printed == re.findall(r"^ *print\(.*\)  # (.*)$", block, flags=re.MULTILINE)


def test_the_readme_shows_what_commands_print(default_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"^\$ sidestream (.*)\n((?:(?!\$|```).*\n)+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(shown) == 3
    for words, output in shown:
        assert cli.main(shlex.split(words)) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(output.removesuffix("...\n")) and (output.endswith("...\n") or printed == output)


def flat(tree: Mapping[str, Any], prefix: str = "") -> set[str]:
    return {
        name for key, value in tree.items() for name in (flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"})
    }


def test_the_page_of_python_names_every_method_error_and_statistic(default_model: Path) -> None:
    page = PYTHON.read_text()
    for name in (name for name in vars(Engine) if not name.startswith("_")):
        assert re.search(rf"`(engine\.)?{name}\b", page), name
    public = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.SidestreamError)}
    assert public < set(sidestream.__all__)
    assert public == set(re.findall(r"^\| `(\w+)`", page[page.index("| error |") :], flags=re.MULTILINE))
    with Engine("smollm2", kv_tokens=64) as engine:
        table = page[page.index("| field |") : page.index("[outputs.md](outputs.md#the-ledger)")]
        first_cells = "".join(re.findall(r"^\|([^|]*)\|", table, flags=re.MULTILINE))
        assert set(re.findall(r"`([\w.]+)`", first_cells)) == flat(engine.stats())


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", page.read_text())):
            if target.startswith("http"):
                continue
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE) if anchor else []
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert not anchor or anchor in anchors, f"{page.name}: {target}#{anchor}"
