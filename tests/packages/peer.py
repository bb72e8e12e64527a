"""Graphs and breaks of each use (uses.py) under fs.compile and under torch's own compiler, each in a process of its own:

    python tests/packages/peer.py [-k EXPRESSION] [FILE ...]

Torch's compiler is counted with its backend "eager", which needs no C++ compiler; a graph and a break are what its own counters call so.
"""
import argparse
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def names(files, keyword):
    found = subprocess.run([sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", *(["-k", keyword] if keyword else []), *files], capture_output=True, text=True).stdout
    return [line for line in found.splitlines() if "::" in line]


def counted(name, who):
    """"graphs/breaks" of one use, or the error that it ends with."""
    said = subprocess.run([sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", name], capture_output=True, text=True, env={**os.environ, "COUNT_USES": who}).stdout
    rows = [line.split("COUNTED ")[1] for line in said.splitlines() if "COUNTED " in line]
    return rows[0] if rows else said.strip().splitlines()[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", dest="keyword")
    parser.add_argument("files", nargs="*", default=[str(HERE)])
    arguments = parser.parse_args()
    print("| use | graphs/breaks here | torch.compile |\n| --- | --- | --- |", flush=True)
    for name in names(arguments.files, arguments.keyword):
        print(f"| {name.split('::')[1]} | {counted(name, 'ours')} | {counted(name, 'peer')} |", flush=True)


if __name__ == "__main__":
    main()
