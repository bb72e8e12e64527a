"""Threads for kernels: torch's own pool, through the OpenMP library that torch has loaded.

`LAUNCH` is LLVM text of `i64 fs_launch(body, args, total, work, extra)`: runs `body(args, begin, end, chunk, extra)` for the
slices of [0, total), as many slices as there are threads and as the work is worth, and returns how many; and of
`fs_run(kernel, args, total, work)`, the same for a kernel of two roles: `kernel(p + 1)` where p points at {args, begin, end}.  The number of
threads is that of `torch.get_num_threads()`, or fs.config.cpu_threads.  Inside of a parallel region, and where no OpenMP
library is found, there is one slice.
"""
from __future__ import annotations

import ctypes
import functools
import os

from firesteel.config import config

GRAIN = 32768           # scalar operations that are worth a thread

_wanted = ctypes.c_int64(0)     # read by fs_launch; 0: as many as torch uses


def _want(count: int) -> None:
    _wanted.value = count


config.watch("cpu_threads", _want)


@functools.cache
def openmp() -> dict[str, int]:
    """Addresses of the entry points, or {} where there is no OpenMP library in this process."""
    for path in _loaded_libraries():
        try:
            library = ctypes.CDLL(path, mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE)
            return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                    for name in ("GOMP_parallel", "omp_get_max_threads", "omp_get_thread_num", "omp_get_num_threads", "omp_in_parallel")}
        except (OSError, AttributeError):
            continue        # not an OpenMP library with the GNU entry points: the next one may be
    return {}


def _loaded_libraries() -> list[str]:
    """Paths of the OpenMP libraries in this process, the one in use by torch first."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = dict.fromkeys(line.split(None, 5)[5].strip() for line in maps if line.count(" ") >= 5 and "/" in line)
    except (OSError, IndexError):
        return []
    names = [p for p in paths if os.path.basename(p).startswith(("libgomp", "libiomp", "libomp"))]
    return sorted(names, key=lambda p: {"torch", "torch.libs"}.isdisjoint(p.split(os.sep)))


def after_fork() -> None:
    """In a forked child the OpenMP library waits for ever for the threads that its pool had in the parent: kernels run on one thread."""
    _want(1)


def wanted_address() -> int:
    return ctypes.addressof(_wanted)


_RUN = """
define internal void @slice(ptr %args, i64 %begin, i64 %end, i64 %chunk, ptr %kernel) {
  %facts = alloca [3 x i64]
  store ptr %args, ptr %facts
  %at.begin = getelementptr i64, ptr %facts, i64 1
  store i64 %begin, ptr %at.begin
  %at.end = getelementptr i64, ptr %facts, i64 2
  store i64 %end, ptr %at.end
  %odd = getelementptr i8, ptr %facts, i64 1
  call void %kernel(ptr %odd)
  ret void
}

define void @fs_run(ptr %kernel, ptr %args, i64 %total, i64 %work) {
  %chunks = call i64 @fs_launch(ptr @slice, ptr %args, i64 %total, i64 %work, ptr %kernel)
  ret void
}
"""

LAUNCH_SERIAL = """
define i64 @fs_launch(ptr %body, ptr %args, i64 %total, i64 %work, ptr %extra) {
  %none = icmp sle i64 %total, 0
  br i1 %none, label %nothing, label %some
nothing:
  ret i64 0
some:
  call void %body(ptr %args, i64 0, i64 %total, i64 0, ptr %extra)
  ret i64 1
}
""" + _RUN

LAUNCH = f"""
@fs_wanted = external global i64
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_max_threads()
declare i32 @omp_in_parallel()
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare i64 @llvm.smin.i64(i64, i64)

define internal void @member(ptr %team) {{
  %body = load ptr, ptr %team
  %p.args = getelementptr i64, ptr %team, i64 1
  %args = load ptr, ptr %p.args
  %p.total = getelementptr i64, ptr %team, i64 2
  %total = load i64, ptr %p.total
  %p.chunks = getelementptr i64, ptr %team, i64 3
  %chunks = load i64, ptr %p.chunks
  %p.extra = getelementptr i64, ptr %team, i64 4
  %extra = load ptr, ptr %p.extra
  %me = call i32 @omp_get_thread_num()
  %all = call i32 @omp_get_num_threads()
  %first = sext i32 %me to i64
  %step = sext i32 %all to i64
  br label %next
next:
  %chunk = phi i64 [ %first, %0 ], [ %following, %done ]
  %left = icmp slt i64 %chunk, %chunks
  br i1 %left, label %run, label %end
run:
  %after = add i64 %chunk, 1
  %a = mul i64 %chunk, %total
  %b = mul i64 %after, %total
  %from = sdiv i64 %a, %chunks
  %to = sdiv i64 %b, %chunks
  %some = icmp slt i64 %from, %to
  br i1 %some, label %call, label %done
call:
  call void %body(ptr %args, i64 %from, i64 %to, i64 %chunk, ptr %extra)
  br label %done
done:
  %following = add i64 %chunk, %step
  br label %next
end:
  ret void
}}

define i64 @fs_launch(ptr %body, ptr %args, i64 %total, i64 %work, ptr %extra) {{
  %team = alloca [5 x i64]
  %none = icmp sle i64 %total, 0
  br i1 %none, label %nothing, label %some
nothing:
  ret i64 0
some:
  %worth = sdiv i64 %work, {GRAIN}
  %possible = call i64 @llvm.smin.i64(i64 %worth, i64 %total)
  %small = icmp sle i64 %possible, 1
  br i1 %small, label %serial, label %ask
ask:
  %nested = call i32 @omp_in_parallel()
  %outside = icmp eq i32 %nested, 0
  br i1 %outside, label %count, label %serial
count:
  %asked = load i64, ptr @fs_wanted
  %max32 = call i32 @omp_get_max_threads()
  %max = sext i32 %max32 to i64
  %free = icmp sle i64 %asked, 0
  %threads = select i1 %free, i64 %max, i64 %asked
  %less = call i64 @llvm.smin.i64(i64 %possible, i64 %threads)
  %chunks = call i64 @llvm.smin.i64(i64 %less, i64 256)
  %single = icmp sle i64 %chunks, 1
  br i1 %single, label %serial, label %parallel
serial:
  call void %body(ptr %args, i64 0, i64 %total, i64 0, ptr %extra)
  ret i64 1
parallel:
  store ptr %body, ptr %team
  %p.args = getelementptr i64, ptr %team, i64 1
  store ptr %args, ptr %p.args
  %p.total = getelementptr i64, ptr %team, i64 2
  store i64 %total, ptr %p.total
  %p.chunks = getelementptr i64, ptr %team, i64 3
  store i64 %chunks, ptr %p.chunks
  %p.extra = getelementptr i64, ptr %team, i64 4
  store ptr %extra, ptr %p.extra
  %chunks32 = trunc i64 %chunks to i32
  call void @GOMP_parallel(ptr @member, ptr %team, i32 %chunks32, i32 0)
  ret i64 %chunks
}}
""" + _RUN
