"""Generated text of a few programs, kept under tests/goldens: a refactoring shows here that it changes nothing, a change shows what it changes.

    make goldens        # writes the files again; `git diff tests/goldens` is then read like code

LLVM text is printed for one fixed processor, so that the files are the same on every machine; Triton text depends on none.  `CASES` has a row a program.
"""
from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).parent / "loops"))
from traced import fused, nests  # noqa: E402

import firesteel as fs  # noqa: E402
from firesteel.codegen import llvm, triton  # noqa: E402
from firesteel.codegen.target import Target  # noqa: E402
from firesteel.loops.plan import plan  # noqa: E402

FOLDER = pathlib.Path(__file__).parent / "goldens"
# AVX2 without masks: the widest vectors that every printer of loops has a tail for
TARGET = Target("haswell", "+avx2,+fma", 32, False, True, "d", frozenset({"expf", "tanhf", "erff"}))


@dataclass(frozen=True)
class Case:
    function: Callable
    inputs: Callable[[], tuple]


CASES = {
    "pointwise": Case(lambda a, b: (a + b).relu(), lambda: (torch.ones(3, 5), torch.ones(5))),
    "softmax": Case(lambda x: torch.softmax(x, -1), lambda: (torch.ones(4, 100),)),
    "layer_norm": Case(lambda x, w: F.gelu(F.layer_norm(x, (64,), w)), lambda: (torch.ones(8, 64), torch.ones(64))),
    "gather": Case(lambda table, index: table[index] * 2, lambda: (torch.ones(10, 16), torch.zeros(7, dtype=torch.int64))),
    "bf16_sum": Case(lambda x: (x * x).sum(0), lambda: (torch.ones(300, 40, dtype=torch.bfloat16),)),
    "linear": Case(lambda x, w, b: F.linear(x, w, b).relu(), lambda: (torch.ones(8, 128), torch.ones(80, 128), torch.ones(80))),
    "product": Case(lambda a, b: (a @ b).relu(), lambda: (torch.ones(4, 8), torch.ones(8, 16))),
}


def loops(case: Case) -> dict[str, str]:
    """Text by extension: the program with its plan, and the kernels for either target."""
    program = fused(case.function, *case.inputs())
    return {"loops": f"{program}\n\n{plan(program)}",
            "ll": "\n".join(llvm.print_nest(nest, program.buffers, TARGET).text for nest in nests(program)),
            "triton": "\n".join(triton.print_nest(nest, program.buffers).text for nest in nests(program))}


def guards(case: Case) -> str:
    """The guard functions of two calls: constant sizes, then symbols."""
    compiled = fs.compile(case.function, backend="eager")
    first, *others = case.inputs()
    for x in (first, torch.cat([first, first])):
        compiled(x, *others)
    entries = [entry for region in compiled.__firesteel_root__.all_regions() for entry in region.variants()]
    text = "\n".join("\n".join([*map(str, entry.guard.guards), entry.guard.text]) for entry in entries)
    return re.sub("0x[0-9a-f]+", "0x", re.sub(r" from '[^']*'>", ">", text))        # addresses of objects, paths of modules


def texts(name: str) -> dict[str, str]:
    """File name -> text of one program."""
    case = CASES[name]
    return {f"{name}.{kind}": text.rstrip("\n") + "\n" for kind, text in {**loops(case), "guards": guards(case)}.items()}


def write() -> None:
    """Every file again."""
    for path in FOLDER.glob("*"):
        path.unlink()
    for name in CASES:
        for file, text in texts(name).items():
            (FOLDER / file).write_text(text)


if __name__ == "__main__":
    import golden_texts  # guards name the module of a function: the one that the test imports
    golden_texts.write()
