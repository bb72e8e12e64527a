"""Writes the tables of lines into docs/README.md and docs/departures.md, between their two markers: `make lines`."""
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


def replaced(text: str, made: str) -> str:
    """The page with a table of today."""
    before, rest = text.split(START)
    return before + START + made + END + rest.split(END)[1]


# ---------------------------------------------------------------- docs/departures.md: what features added

# files that exist for a feature alone
FEATURES = {
    "compiled autograd": """autograd/compiled autograd/engine autograd/engine_order autograd/backward_calls autograd/pieces autograd/groups
        autograd/arrived capture/values/engine_objects""",
    "checkpointing: policies, budgets, recomputed regions": """autograd/budget autograd/recomputations autograd/regions autograd/optimes
        graph/policies graph/random_state""",
    "branches and loops on data": """autograd/branches capture/joins capture/arms capture/rounds capture/values/nested_regions capture/control_flow capture/values/comparisons
        capture/values/known_data""",
    "distributed": "autograd/ranks capture/collectives capture/dtensors ops/collectives",
    "programs and regions between processes, code without LLVM, tiers, a quick import": """programcache autograd/outline runtime/elf tiers regioncache
        capture/region_text graph/float_arguments capture/prints records""",
    "packages": "shipping/archive shipping/caches shipping/info shipping/kinds shipping/load shipping/pack shipping/processors shipping/values",
    "dumps and replay": "dumps replay stages",
    "tools, and errors that show the user's own lines": "tracebacks tools/bisect tools/cases tools/debug tools/doctor tools/explain tools/failures tools/report tools/scripts",
    "drop-in": "dropin options support public watchers capture/flex capture/shape_specs capture/replaced graph/tracing_context",
    "more of torch captured: forward-mode AD, hooks on saved tensors, scripted modules, nested tensors, optimisers": """capture/values/duals
        capture/values/saved_tensors capture/values/scripted capture/values/jagged graph/answers capture/polyfills_optim""",
    "kernels: CUDA graphs, measured warps, layouts, guard zones, sums, writes in place, optimiser steps": """runtime/graphs runtime/cubins
        runtime/tuning graph/layouts graph/sums
        codegen/zones codegen/side_by_side codegen/one_pass codegen/turning loops/inplace loops/loads ops/optimisers native_tensors""",
}
GOAL = 51_250           # lines in all when the goals were written down
BEGAN = {".": 1_413, "autograd": 2_999, "capture": 8_754, "capture/values": 10_321, "codegen": 3_868, "graph": 4_623, "graph/decomp": 912,
         "graph/rules": 3_516, "loops": 3_185, "loops/lower": 2_883, "ops": 0, "runtime": 919, "shipping": 0, "sym": 3_333, "tools": 0}


def length(path: pathlib.Path) -> int:
    return len(path.read_text().splitlines())


def accounted() -> str:
    """Lines by feature, then by folder: before the round, now, in files of features, and the rest."""
    files = {name: [SRC / f"{file}.py" for file in named.split()] for name, named in FEATURES.items()}
    new = {path for paths in files.values() for path in paths}
    rows = [f"| {name} | {len(paths)} | {sum(map(length, paths)):,} |" for name, paths in files.items()]
    by_folder, totals = [], [0, 0, 0, 0]
    every = [path for path in SRC.rglob("*.py") if path.stat().st_size]
    for name, before in BEGAN.items():
        here = [path for path in every if folder(path) == name]
        now, of_features = sum(map(length, here)), sum(length(path) for path in here if path in new)
        numbers = [before, now, of_features, now - of_features]
        totals = [total + number for total, number in zip(totals, numbers)]
        by_folder.append(f"| `{name}` | {' | '.join(f'{number:,}' for number in numbers)} |")
    began, now, of_features, rest = totals
    against = f"{abs(GOAL - rest):,} {'fewer' if rest < GOAL else 'more'} than {GOAL:,}"
    return "\n".join([
        f"Files that exist for features of the round alone have {of_features:,} lines:", "",
        "| feature | files | lines |", "| --- | --- | --- |", *rows, "",
        "| folder | before the round | now | of it files of new features | the rest |", "| --- | --- | --- | --- | --- |", *by_folder,
        f"| all | {began:,} | {now:,} | {of_features:,} | {rest:,} |", "",
        f"The rest is {rest - began:,} lines more than before the round and {against}.", ""])


if __name__ == "__main__":
    for page, made in ((DOCS / "README.md", table()), (DOCS / "departures.md", accounted())):
        page.write_text(replaced(page.read_text(), made))
