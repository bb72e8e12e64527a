"""The command line: each command does what its sentence says."""
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import firesteel as fs
from firesteel import cli


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent('''
        import sys
        import torch
        import firesteel as fs

        @fs.compile(backend="eager")
        def f(x):
            y = x.sin()
            print(*sys.argv[1:])
            return y.cos()

        f(torch.randn(3))
    '''))
    return path



def test_explain_runs_the_script_and_names_the_line_of_a_break(script, capsys):
    fs.reset()
    assert cli.main(["explain", str(script), "one", "two"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("one two\n2 graph(s), 2 calls captured, 1 break(s)")
    assert f"print writes output, which a graph cannot hold.\n    at {script}:9 in f\n    print(*sys.argv[1:])\n    Hint: Print outside" in out
    assert "\n  capture " in out


def test_explain_runs_scripts_as_python_does(tmp_path, capsys):
    """Modules beside it, the exit status, exceptions; what was compiled is told all the same."""
    (tmp_path / "beside_it.py").write_text("def f(x):\n    return x * 2\n")
    script = tmp_path / "main.py"
    script.write_text("import sys, torch, firesteel as fs\nfrom beside_it import f\n"
                      "fs.compile(f)(torch.ones(3))\nsys.exit(3) if sys.argv[1:] else 1 / 0\n")
    path = sys.path[:]
    assert cli.main(["explain", str(script), "leave"]) == 3
    assert "1 graph(s)" in capsys.readouterr().out
    assert cli.main(["explain", str(script)]) == 1
    out, err = capsys.readouterr()
    own = err.split("another exception occurred:")[-1]      # whoever runs the tests may be handling one
    assert "1 graph(s)" in out and own.count("File ") == 1 and "ZeroDivisionError" in own
    assert sys.path == path
    sys.modules.pop("beside_it", None)


def test_cache_is_shown_and_cleared(tmp_path, capsys):
    with fs.config.patch(cache_dir=str(tmp_path)):
        assert cli.main(["cache", "show"]) == 0
        assert "0 files" in capsys.readouterr().out
        assert cli.main(["cache", "clear"]) == 0


@pytest.mark.parametrize("file, told", [(__file__, "is no package of firesteel, or it is damaged (BadZipFile: "), ("no/such", "cannot be read: [Errno 2]")])
def test_what_is_no_cache_to_import(file, told, tmp_path, capsys):
    with fs.config.patch(cache_dir=str(tmp_path)):
        assert cli.main(["cache", "import", file]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"firesteel: {file} {told}") and err.endswith(" Such files are written by firesteel cache export FILE.\n") and err.count("\n") == 1


def test_report_lists_dumps(tmp_path, capsys):
    (tmp_path / "001-captured.py").write_text("a\nb\n")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == ["001-captured.py", "2", "lines"]


def test_the_package_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "firesteel", "--version"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, f"firesteel {fs.__version__}\n"), found.stderr


def test_bench_needs_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench"]) == 2
    assert "checkout" in capsys.readouterr().err


@pytest.mark.parametrize("argv, sentence", [
    (["compile"], "firesteel: There is no command 'compile'. Commands are doctor, explain,"),
    (["cache", "burn"], "firesteel: firesteel cache burn was not understood. Say cache show,"),
    (["cache", "export"], "firesteel: firesteel cache export was not understood. Say cache show,"),
    (["explain"], "firesteel: explain takes a script. Say firesteel explain SCRIPT"),
    (["bisect"], "firesteel: bisect takes a script. Say firesteel bisect SCRIPT"),
    (["doctor", "nose"], "firesteel: doctor takes no arguments."),
    (["cache", "clear", "old"], "firesteel: firesteel cache clear old was not understood."),
    (["report", "no/such/folder"], "firesteel: There are no stage dumps in 'no/such/folder'."),
    (["replay", "no/such/folder"], "firesteel: There is no dump of graph in 'no/such/folder'."),
])
def test_what_is_not_understood_is_one_sentence(argv, sentence, capsys):
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith(sentence) and err.count("\n") == 1 and not out


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"firesteel {fs.__version__}\n"
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "replay"])     # which has flags, and argparse's page
def test_each_command_has_help(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert capsys.readouterr().out == f"firesteel {command}: {cli.COMMANDS[command].__doc__}\n"


def test_help_without_docstrings():
    done = subprocess.run([sys.executable, "-OO", "-m", "firesteel.cli"], text=True, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(pathlib.Path(fs.__file__).parents[1])})
    assert done.returncode == 0 and all(f"{name:8} {fn.__doc__}" in done.stdout for name, fn in cli.COMMANDS.items()), done


@pytest.mark.parametrize("where, status, told", [("left", 1, ""), ("/dev/full", 1, "firesteel: [Errno 28] No space left on device\n"), ("&-", 0, "")])
def test_an_output_that_takes_nothing(where, status, told, tmp_path):
    """A reader that left, a full disk, no output at all: one sentence at most."""
    (tmp_path / "silent.py").write_text("")
    reading, writing = os.pipe()
    os.close(reading)
    target = f"&{writing}" if where == "left" else where
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m firesteel.cli explain silent.py >{target}"], stderr=subprocess.PIPE, text=True, cwd=tmp_path,
                          pass_fds=(writing,), env={**os.environ, "PYTHONPATH": str(pathlib.Path(fs.__file__).parents[1])})
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, told)
