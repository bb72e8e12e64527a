"""Programs for two ranks, compared with eager; run as `python ranks.py FILE...`, once a rank, by `run_ranks`.

A FILE has functions `program_*`, each run by both ranks one after the other.  What one returns, or the error it ends with, is written as a line of JSON by
rank 0.  `compared` is what most of them return: are values as eager's, how many graphs, how many breaks, and whether some ran in eager.  A hang ends with gloo's time limit, and the
whole with `LIMIT`.
"""
import datetime
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import traceback

LIMIT = 240         # seconds; starting alone takes ten of them on a busy machine
HANG = 40           # of one collective


def run_ranks(*paths, **environment):
    """name of a program -> what rank 0 said of it."""
    with tempfile.TemporaryDirectory() as folder:
        return _run_ranks(paths, {**environment, "RENDEZVOUS": (pathlib.Path(folder) / "store").as_uri()})


def has_loopback():
    return "lo" in [name for _, name in socket.if_nameindex()]


def _run_ranks(paths, environment):
    common = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
              "FIRESTEEL_VERIFY": "1", "FIRESTEEL_CACHE_DIR": "", **environment}
    ranks = [subprocess.Popen([sys.executable, "-W", "ignore", __file__, *map(str, paths)], env={**common, "RANK": str(rank)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(2)]
    said = []
    try:
        for rank in ranks:
            said.append(rank.communicate(timeout=LIMIT)[0])
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        texts = "\n".join(rank.communicate()[0][-2000:] for rank in ranks)
        raise AssertionError(f"two ranks did not end within {LIMIT} s:\n{texts}") from None
    assert not any(rank.returncode for rank in ranks), "\n".join(text[-3000:] for text in said)
    return dict(json.loads(line[7:]) for line in said[0].splitlines() if line.startswith("RESULT "))


def compared(fn, *args, compiled=None, tolerance=0.0, calls=1):
    """A function of tensors, or of what `args` makes anew, against eager."""
    import torch

    import firesteel as fs
    from firesteel.artifacts import counters

    def run(function):
        for _ in range(calls):
            result = function(*[arg.detach().clone().requires_grad_(arg.requires_grad) if type(arg) is torch.Tensor else arg for arg in args])
        return [plain(leaf) for leaf in torch.utils._pytree.tree_leaves(result)]
    want = run(fn)
    fs.reset()
    for part in ("graph_break", "stats", "aot"):
        counters[part].clear()
    got = run((compiled or fs.compile)(fn))
    aot = counters["aot"]
    equal = len(want) == len(got) and all(same(a, b, tolerance) for a, b in zip(want, got))
    return {"equal": equal, "graphs": counters["stats"].get("unique_graphs", 0), "breaks": list(counters["graph_break"]),
            **({} if equal else {"want": str(want), "got": str(got)}), **({} if aot["ok"] == aot["total"] else {"by eager": dict(aot)})}


def plain(leaf):
    return leaf.full_tensor().detach() if hasattr(leaf, "full_tensor") else leaf.detach() if hasattr(leaf, "detach") else leaf


def same(a, b, tolerance):
    import torch
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.shape == b.shape and a.stride() == b.stride() and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def main(paths):
    import torch.distributed as dist
    dist.init_process_group("gloo", os.environ["RENDEZVOUS"], datetime.timedelta(seconds=HANG), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    for path in paths:
        specification = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
        programs = importlib.util.module_from_spec(specification)
        sys.modules[specification.name] = programs
        specification.loader.exec_module(programs)
        for name, program in list(vars(programs).items()):
            if name.startswith("program_"):
                tell(name[len("program_"):], program, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)         # gloo's threads may abort a process that ends in the usual way


def tell(name, program, rank):
    import torch
    torch.manual_seed(0)
    try:
        result = program()
    except Exception:
        result = {"error": traceback.format_exc()[-2500:]}
    if rank == 0:
        print("RESULT " + json.dumps([name, result]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
