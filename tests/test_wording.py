"""Numbers in sentences, and the words of the documentation and of messages."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documentation import NOTEBOOKS, PAGES, ROOT

from hf_minbert.settings.wording import counted


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 rows are"), (1, "1 row is"), (2, "2 rows are"), (1234, "1,234 rows are")]
)
def test_a_number_has_its_noun_and_its_verb(count, said):
    assert counted(count, "row", "is", "are") == said
    assert counted(count, "row") == said.rsplit(" ", 1)[0]


# ---- README, docs and the notebooks

#: Words to avoid, as regular expressions, and what to write in their place.
AVOID = {
    r"mend(s|ed|ing)?": "fix",
    r"shall": "should, must, or the present tense",
    r"trainings": "runs",
    r"poolings": "pooling methods",
    r"go(es)? on( with)?": "continue",
    r"whatever": "which, or name the cases",
    r"(it|there) lies|lie": "is",
    r"in the place of|in place of": "instead of",
    r"nothing stopped": "was not interrupted",
    r"in order to": "to",
    r"utili[sz]e[sd]?": "use",
    r"e\.g\.|i\.e\.|etc\.": "for example, that is, and so on",
    r"simply|obviously|of course": "nothing",
    r"hf-minbert|HF MinBERT": "hf_minbert",
}
#: Pages without code of their own to run.
FURTHER = [
    ROOT / "CODE_OF_CONDUCT.md",
    *(ROOT / "recipes" / name for name in ("README.md", "accelerate/README.md", "glue/README.md")),
]
#: Nobody should have to read a sentence twice. Tables and code are not counted.
MOST_WORDS = 28
#: Of the line that says what a key, an option or a choice does. More belongs on a page of docs.
MOST_OF_A_KEY = 30


def prose_of(path: Path) -> str:
    """The text of a page or a notebook, without code and addresses."""
    if path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    else:
        text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`\n]*`", "CODE", text)


def avoided_in(text: str) -> dict[str, str]:
    """The words to avoid that the text has, each with a plainer one."""
    return {
        match[0]: better for word, better in AVOID.items() for match in re.finditer(rf"\b(?:{word})(?!\w)", text, re.I)
    }


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS, *FURTHER], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_is_in_plain_words(path):
    assert avoided_in(prose_of(path)) == {}, "Each of these has a plainer word beside it."


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS, *FURTHER], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sentences_of_a_page_are_short(path):
    text = re.sub(r"^[#|].*$", "", prose_of(path), flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=- |\d+\. )", text)
    sentences = [one for part in parts for one in re.split(r"(?<=[.:?!;])\s+", " ".join(part.split()))]
    assert [one for one in sentences if len(one.split()) > MOST_WORDS] == []


# ---- Messages


def text_of(node: ast.expr) -> str:
    """The text of a message; values in it become CODE."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "CODE"


def messages() -> Iterator[str]:
    """All errors, log messages and lines printed by the package, and the help of its options."""
    for path in sorted((ROOT / "hf_minbert").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called.endswith(("Error", "typer.echo")) or called.startswith(("logger.", "typer.")):
                    said = [*node.args, *(word.value for word in node.keywords if word.arg == "help")]
                    for text in map(text_of, said):
                        yield re.sub(r"`[^`]*`|%[sdr]", "CODE", text)


def test_messages_are_in_plain_words_and_short_sentences():
    said = [text for text in messages() if len(text.split()) > 2]
    assert len(said) > 500
    assert [(text, found) for text in said if (found := avoided_in(text))] == []
    sentences = [one for text in said for one in re.split(r"(?<=[.:?!;])\s+", text)]
    assert [one for one in sentences if len(one.split()) > MOST_WORDS] == []


def docstrings() -> Iterator[str]:
    """Those of the package and of its scripts."""
    for path in sorted(path for folder in ("hf_minbert", "scripts") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def test_docstrings_are_in_plain_words():
    said = [text for text in docstrings() if text]
    assert len(said) > 1000
    assert [(text, found) for text in said if (found := avoided_in(text))] == []


def test_what_a_key_does_is_one_short_line():
    tables = re.findall(r"^\| (.*) \|$", (ROOT / "recipes" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line for row in tables for line in re.split(r" (?<!\\)\| ", row)[-1].split("<br>")]
    assert len(lines) > 200
    assert [line for line in lines if len(line.split()) > MOST_OF_A_KEY] == []
