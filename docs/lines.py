"""Writes the table of lines by folder into docs/README.md, between its two markers: `make lines`."""
from __future__ import annotations

import ast
import pathlib
import statistics

DOCS = pathlib.Path(__file__).parent
SRC = DOCS.parent / "src" / "firesteel"
START, END = "<!-- lines: made by `make lines` -->\n", "<!-- end of lines -->"


def folder(path: pathlib.Path) -> str:
    return "/".join(path.relative_to(SRC).parts[:-1]) or "."


def function_lines(path: pathlib.Path) -> list[int]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [node.end_lineno - node.lineno + 1 for node in functions]    # type: ignore[operator]


def row(name: str, files: list[pathlib.Path]) -> str:
    lines = sum(len(path.read_text().splitlines()) for path in files)
    functions = sorted(n for path in files for n in function_lines(path)) or [0]
    tenth = functions[len(functions) * 9 // 10]
    return f"| {name} | {len(files)} | {lines} | {len(functions)} | {statistics.median_low(functions)} | {tenth} | {functions[-1]} |\n"


def table() -> str:
    files = sorted(path for path in SRC.rglob("*.py") if path.stat().st_size)
    folders = sorted({folder(path) for path in files})
    head = "| folder | files | lines | functions | median lines | 9 of 10 within | longest |\n| --- | --- | --- | --- | --- | --- | --- |\n"
    rows = [row(f"`{name}`", [path for path in files if folder(path) == name]) for name in folders]
    return head + "".join(rows) + row("all", files)


def replaced(text: str) -> str:
    """The page with a table of today."""
    before, rest = text.split(START)
    return before + START + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    page = DOCS / "README.md"
    page.write_text(replaced(page.read_text()))
