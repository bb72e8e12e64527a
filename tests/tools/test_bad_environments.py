"""Places where programs run badly: one clear message at most, the program's results are there, and the next process works."""
from __future__ import annotations

import os
import pathlib
import pty
import signal
import subprocess
import sys
import time

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import torch, firesteel as fs
f = lambda x: (x.sin() @ x).exp().sum(1)
x = torch.randn(8, 8, requires_grad=True)
compiled = fs.compile(f)
torch.testing.assert_close(compiled(x), f(x))
compiled(x).sum().backward()
torch.testing.assert_close(compiled(torch.ones(9, 9)), f(torch.ones(9, 9)))
"""
SILENT = ""


def environment(**variables):
    """Of this process without settings of ours; None takes a variable away."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("FIRESTEEL_")}
    given |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "FIRESTEEL_CACHE_DIR": "", **variables}
    return {name: value for name, value in given.items() if value is not None}


def run(*code, **variables):
    """A fresh process; its exit status and what it wrote to stderr."""
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], text=True, capture_output=True, timeout=300, env=environment(**variables))
    return done.returncode, done.stderr


def check(told, *code, **variables):
    """The program runs, and stderr is one line with this text, or nothing."""
    status, err = run(*code, PROGRAM, **variables)
    assert status == 0, err
    assert err == SILENT if told == SILENT else told in err and err.count("\n") == 1, err


@pytest.fixture
def blocked(tmp_path):
    """A path below which nothing can be written, whoever asks: a file is in the way."""
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "below")


def test_a_home_that_cannot_be_written(blocked):
    check(SILENT, HOME=blocked, XDG_CACHE_HOME=None, XDG_RUNTIME_DIR=None, FIRESTEEL_CACHE_DIR=None)


def test_no_home(tmp_path):
    check(SILENT, HOME=None, XDG_CACHE_HOME=str(tmp_path), FIRESTEEL_CACHE_DIR=None)


def test_a_cache_that_cannot_be_written(blocked):
    check("is not usable", FIRESTEEL_CACHE_DIR=blocked)


def test_a_cache_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    check("is not usable", FIRESTEEL_CACHE_DIR=str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


# no file grows beyond 40 bytes, which is what a full disk says too: an OSError at a write
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))"


def test_a_full_disk(tmp_path):
    check("is not usable ([Errno 27] File too large)", FULL, FIRESTEEL_CACHE_DIR=str(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]     # nothing half written
    check(SILENT, FIRESTEEL_CACHE_DIR=str(tmp_path))
    assert list(tmp_path.rglob("*.o"))


@pytest.mark.parametrize("variable, told", [("FIRESTEEL_DUMP_DIR", "/below: Not a directory"),
                                            ("FIRESTEEL_REPORT", "firesteel: the report could not be written: [Errno 20] Not a directory")])
def test_a_folder_for_products_that_cannot_be_made(blocked, variable, told):
    check(told, **{variable: blocked})


def test_a_full_disk_for_products(tmp_path):
    check("the report could not be written: [Errno 27] File too large", FULL, FIRESTEEL_REPORT=str(tmp_path))


def test_no_folder_for_temporary_files(tmp_path):
    check(SILENT, TMPDIR="/no/such/folder")
    check(SILENT, TMPDIR="/no/such/folder", FIRESTEEL_PROFILE="1")


def test_a_failure_that_can_be_written_nowhere(blocked):
    """The error itself is told all the same."""
    broken = "from firesteel.loops.lower.build import LOWERINGS; LOWERINGS._rows['aten::sin'] = lambda *a, **k: 1 / 0"
    status, err = run("import firesteel.public, firesteel.ops", broken, "import tempfile; tempfile.tempdir = '/no/such/folder'", PROGRAM, FIRESTEEL_CACHE_DIR=blocked)
    assert status == 1 and "ZeroDivisionError: division by zero\nThis is a failure of firesteel itself; fs.disable on" in err


def test_texts_in_ascii(tmp_path):
    script = tmp_path / "größe.py"
    script.write_text(f"{PROGRAM}\ndef größe(x): return x * 2\nfs.compile(größe)(x)\nfs.report('r.html')", encoding="utf-8")
    plain = environment(LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", FIRESTEEL_DUMP_DIR="dumps", FIRESTEEL_LOGS="graph,kernels")
    done = subprocess.run([sys.executable, "-m", "firesteel.cli", "explain", script.name], capture_output=True, env=plain, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"gr\\xf6\\xdfe" in done.stdout and (tmp_path / "r.html").exists() and list((tmp_path / "dumps").rglob("*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_driver():
    code = "try:\n    fs.compile(lambda x: x.to('cuda') + 1)(torch.ones(3))\nexcept (AssertionError, RuntimeError) as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", f"import torch, firesteel as fs\n{code}\n{PROGRAM}"], text=True, capture_output=True, env=environment())
    assert done.returncode == 0 and ("CUDA" in done.stdout or "NVIDIA" in done.stdout) and done.stdout.count("\n") == 1, done


# ---------------------------------------------------------------- llvmlite

WITHOUT = """
import importlib.metadata, sys
sys.modules["llvmlite"] = sys.modules["llvmlite.binding"] = None
version = importlib.metadata.version
def versions(name):
    if name == "llvmlite":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = versions
"""


def test_no_llvmlite():
    status, err = run(WITHOUT, PROGRAM)
    assert status == 1 and "UserError: Kernels of the CPU need llvmlite, which cannot be imported" in err and "Hint: pip install llvmlite" in err
    assert "failure of firesteel itself" not in err and err.count("firesteel/") <= 2
    assert run(WITHOUT, PROGRAM.replace("compile(f)", "compile(f, backend='aot_eager')"))[0] == 0


def test_a_library_of_llvm_that_cannot_be_loaded():
    """Too little memory for it, say."""
    finder = "import sys\nclass Finder:\n    def find_spec(name, *args):\n        if name == 'llvmlite.binding': raise OSError('cannot map it.')\nsys.meta_path.insert(0, Finder)"
    status, err = run(finder, PROGRAM)
    assert status == 1 and "UserError: Kernels of the CPU need llvmlite, which cannot be imported: cannot map it.\n" in err and "firesteel itself" not in err, err


def test_the_doctor_says_what_is_missing(blocked):
    done = subprocess.run([sys.executable, "-c", f"{WITHOUT}\nfrom firesteel import cli; sys.exit(cli.main(['doctor']))"], text=True, capture_output=True,
                          env=environment(FIRESTEEL_CACHE_DIR=blocked))
    assert done.returncode == 1 and "-> Kernels of the CPU need it: pip install llvmlite" in done.stdout, done
    assert "is no folder" in done.stdout and "Set FIRESTEEL_CACHE_DIR to a folder that you can write" in done.stdout


def test_no_executable_memory():
    """What systemd and SELinux forbid, by prctl(PR_SET_MDWE): no failure of the compiler, and the rest of the program goes on."""
    asked = "import ctypes, sys\nif ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): sys.exit(77)"
    code = "import torch, firesteel as fs\nfor n in (2, 3):\n    try: fs.compile(torch.sin)(torch.ones(n))\n    except fs.errors.UserError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", f"{asked}\n{code}\nprint(fs.compile(torch.sin, backend='aot_eager')(torch.zeros(1)))"], text=True,
                          capture_output=True, timeout=300, env=environment())
    if done.returncode == 77:
        pytest.skip("an older kernel")
    assert done.returncode == 0 and done.stdout.count("Kernels of the CPU need executable memory, which the system refuses: ") == 2, done
    assert "firesteel itself" not in done.stdout and done.stdout.endswith("tensor([0.])\n"), done      # LLVM itself writes a line to stderr


def test_another_torch_is_in_the_way(tmp_path):
    (tmp_path / "torch.py").write_text("x = 1")
    done = subprocess.run([sys.executable, "-c", "import firesteel"], text=True, capture_output=True, cwd=tmp_path, env=environment())
    told = f"ImportError: the torch that Python found is not PyTorch but {tmp_path / 'torch.py'}: rename it, or pip install torch\n"
    assert done.returncode == 1 and done.stderr.endswith(told), done.stderr


# ---------------------------------------------------------------- settings

@pytest.mark.parametrize("name, value, told", [
    ("RECOMPILE_LIMIT", "-3", "the setting takes an int from 1."), ("COMPILE_THREADS", "0", "the setting takes an int from 1."),
    ("MEMORY_BUDGET", "nan", "the setting takes a float from 0 to 1."), ("PROGRESS", "perhaps", "the setting takes a bool."),
])
def test_a_setting_out_of_range_is_refused(name, value, told):
    status, err = run("import firesteel", **{f"FIRESTEEL_{name}": value})
    assert status == 1 and err.splitlines()[-1].startswith(f"ValueError: FIRESTEEL_{name}={value!r}: {told}")


@pytest.mark.parametrize("name, value, told", [
    ("RECOMPILE_LIMITS", "3", "There is no setting FIRESTEEL_RECOMPILE_LIMITS; FIRESTEEL_RECOMPILE_LIMIT?"),
    ("LOGS", "nonsense", "FIRESTEEL_LOGS: there is no log nonsense; there are "),
    ("INSTALL", "perhaps", "FIRESTEEL_INSTALL='perhaps' is neither 0 nor 1: nothing is installed"),
])
def test_a_setting_that_nothing_reads_is_told(name, value, told):
    check(told, **{f"FIRESTEEL_{name}": value})


# ---------------------------------------------------------------- processes

def test_two_processes_on_one_cache(tmp_path):
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, env=environment(FIRESTEEL_CACHE_DIR=str(tmp_path))) for _ in range(2)]
    assert [(process.communicate(timeout=300)[1], process.returncode) for process in both] == [(b"", 0)] * 2
    check(SILENT, FIRESTEEL_CACHE_DIR=str(tmp_path))


SLOW = """
import signal, time, torch, firesteel as fs
signal.signal(signal.SIGINT, signal.default_int_handler)        # a process in the background may have been told to ignore it
def slow(gm, inputs):
    print("compiling", flush=True)
    if not done:
        time.sleep(100)
    return gm.forward
done = []
compiled = fs.compile(lambda x: x * 2, backend=slow)
try:
    compiled(torch.ones(3))
except KeyboardInterrupt as interrupt:
    import traceback
    own = [f for f in traceback.extract_tb(interrupt.__traceback__) if "capture" in f.filename]
    assert len(own) == 1, own
    done.append(1)
assert compiled(torch.ones(3)).tolist() == [2.0] * 3 and done
"""


def test_control_c_while_compiling():
    process = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stdout.readline() == "compiling\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and out == "compiling\n" and not err, err


CLOSED = "import os, sys; os.close(1); os.close(2); sys.stdout = sys.stderr = None"


@pytest.mark.parametrize("code", [CLOSED, "import sys; sys.stdout.close(); sys.stderr.close()"], ids=["none", "closed"])
def test_nowhere_to_write(code, tmp_path):
    """The progress line and the report's own line are lost, the program is not."""
    at_once = "from firesteel import watchers; watchers.AFTER = -1.0"
    status, _ = run(code, at_once, PROGRAM, f"open({str(tmp_path / 'done')!r}, 'w').write('done')", FIRESTEEL_REPORT=str(tmp_path))
    assert status == 0 and (tmp_path / "done").read_text() == "done" and list(tmp_path.glob("*.html"))


def test_a_terminal_that_goes_away():
    """stderr is a terminal whose other end is closed while the line is shown."""
    ours, theirs = pty.openpty()
    code = f"from firesteel import watchers; watchers.AFTER = -1.0\nprint('ready', flush=True); input()\n{PROGRAM}"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=environment(), text=True)
    os.close(theirs)
    assert process.stdout.readline() == "ready\n"
    os.close(ours)
    process.stdin.write("\n")
    process.stdin.close()
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.stdout.close()
    assert process.returncode == 0
