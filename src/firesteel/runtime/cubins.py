"""Triton text -> machine code of a GPU, in worker processes.

In: a Job, a dict of plain values.  Out: (name, bytes of shared memory, cubin).  Triton's own compiler is Python that holds the GIL half of the time,
so kernels are compiled by a few processes side by side.  This file is their program too: it imports neither torch nor firesteel, and a
worker is ready in a tenth of a second: it looks for no packages (`site`, Triton's search for other back ends), and loads what every job needs
while its owner still captures.  What always holds:
 - A worker ends when its owner does (its input is closed) or after IDLE seconds without a job; the next job starts another.
 - A job whose worker dies is compiled in this process, and logged.  A text that Triton refuses is the same RuntimeError from both.
 - Jobs and results are lines of JSON.

    workers.start(4); [made.result() for made in begin([job, ...])]
"""
from __future__ import annotations

import base64
import contextlib
import functools
import importlib
import inspect
import json
import linecache
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

IDLE = 60
MOST = 8        # more wait for each other's front ends
# text, function, signature, pointers (their numbers), alignment (0: none known), target, capability, options, helpers, helper_names
Job = dict[str, Any]
Made = tuple[str, int, bytes]


# ---------------------------------------------------------------- by Triton

def executed(name: str, text: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Runs a text whose functions Triton will read: it asks `inspect`, which asks `linecache`, so no file is needed."""
    file = f"<firesteel {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope["__name__"] = f"firesteel.kernels.{name}"
    exec(compile(text, file, "exec"), scope)
    return scope


@functools.cache
def _common(helpers: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What kernels may name: Triton's language, the CUDA math library, our helpers, and `jit` for functions that they call."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    scope = executed("helpers", helpers, {"tl": tl, "libdevice": libdevice})
    scope.update({name: triton.jit(scope[name]) for name in names})
    return {"jit": triton.jit, **{name: scope[name] for name in ("tl", "libdevice", *names)}}


def compile_here(job: Job) -> Made:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    scope = executed(job["function"], job["text"], dict(_common(job["helpers"], tuple(job["helper_names"]))))
    function = triton.jit(scope[job["function"]])
    known = {(i,): [["tt.divisibility", job["alignment"]]] for i in job["pointers"]} if job["alignment"] else {}
    source = ASTSource(function, dict(zip(function.arg_names, job["signature"])), {}, known)
    return _run_stages(source, GPUTarget(job["target"], job["capability"], 32), job["options"])


def _run_stages(source: Any, target: Any, options: dict[str, Any]) -> Made:
    """What triton.compile does for a source, without its cache: that hashes Triton's own library first (0.3 s) and writes nine files a kernel.
    A Triton whose stages take other arguments is left to do it itself."""
    import triton
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend
    if [*inspect.signature(source.make_ir).parameters] != ["target", "options", "codegen_fns", "module_map", "context"]:
        compiled = triton.compile(source, target=target, options=options)
        return compiled.metadata.name, compiled.metadata.shared, compiled.asm["cubin"]
    backend = make_backend(target)
    parsed, context, stages = backend.parse_options(options), ir.context(), dict[str, Any]()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    facts: dict[str, Any] = {"target": target, **parsed.__dict__}
    backend.add_stages(stages, parsed, source.language)
    for stage in stages.values():
        made = stage(made, facts)
    return facts["name"], facts["shared"], made


# ---------------------------------------------------------------- a worker

def work() -> None:
    """Answers jobs until the input ends, or none came for a while."""
    sys.path[:] = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)       # what Triton prints is no answer
    with contextlib.suppress(BrokenPipeError):
        _load_compiler()
        while line := _next_line():
            answers.write(json.dumps(_answer(json.loads(line))) + "\n")
            answers.flush()


def _load_compiler() -> None:
    """What the first job would load."""
    from triton._C.libtriton import llvm
    with contextlib.suppress(ImportError):      # in another Triton it is elsewhere
        importlib.import_module("triton.compiler.code_generator")
    llvm.init_targets()
    _common("", ())


def _next_line() -> str:
    signal.alarm(IDLE)      # ends the process
    line = sys.stdin.readline()
    signal.alarm(0)
    return line


def _answer(job: Job) -> dict[str, Any]:
    try:
        name, shared, cubin = compile_here(job)
    except Exception:
        return {"error": traceback.format_exc()}
    return {"name": name, "shared": shared, "cubin": base64.b64encode(cubin).decode()}


# ---------------------------------------------------------------- their owner

class Worker:
    """A process that waits for jobs."""

    def __init__(self) -> None:
        # a session of its own: Ctrl-C is for the owner
        self.process = subprocess.Popen([sys.executable, "-P", "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "TRITON_BACKENDS_IN_TREE": "1"})
        self._send(sys.path)

    def _send(self, value: Any) -> None:
        stream = self.process.stdin
        assert stream is not None
        stream.write(json.dumps(value).encode() + b"\n")
        stream.flush()

    def ask(self, job: Job) -> dict[str, Any] | None:
        """Its answer; None where it died."""
        answers = self.process.stdout
        assert answers is not None
        try:
            self._send(job)
            return json.loads(answers.readline())
        except (OSError, ValueError):
            self.end()
            return None
        except BaseException:       # interrupted: its answer would be taken for the next one's
            self.end()
            raise

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Workers:
    """Those that have nothing to do, and how many there are in all."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self.count = 0
        self.lock = threading.Lock()

    def start(self, wanted: int) -> None:
        """Has so many workers, at most one a core; none where no process can be started."""
        with self.lock, contextlib.suppress(OSError):
            for _ in range(self.count, min(wanted, os.cpu_count() or 1, MOST)):
                self.idle.put(Worker())
                self.count += 1

    def compiled(self, job: Job) -> Made:
        answer = self._asked(job) if self.count else None
        if answer is None:
            logging.getLogger("firesteel").info("no process to compile %s: it is compiled in this one", job["function"])
            return compile_here(job)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["name"], answer["shared"], base64.b64decode(answer["cubin"])

    def _asked(self, job: Job) -> dict[str, Any] | None:
        worker = self.idle.get()
        try:
            if worker.process.poll() is not None:       # it waited for too long
                worker = Worker()
            return worker.ask(job)
        except OSError:
            return None
        finally:
            self.idle.put(worker)       # one that ended too, so that the count stays right: the next job starts another


workers = Workers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=workers.clear)       # those it knows of are its parent's


def begin(jobs: Sequence[Job]) -> list[Future[Made]]:
    """Has all of them compiled side by side, and waits for none, unless there is no other process."""
    if jobs:
        workers.start(len(jobs))
    return [_begun(job) for job in jobs]


def _begun(job: Job) -> Future[Made]:
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(workers.compiled(job))
        except BaseException as error:
            made.set_exception(error)
    if workers.count:
        with contextlib.suppress(RuntimeError):     # Python, which ends, starts no thread any more
            threading.Thread(target=run, daemon=True).start()       # waits for a worker
            return made
    run()
    return made


if __name__ == "__main__":
    work()
