"""Worker processes for Triton, here with a worker that compiles nothing."""
from __future__ import annotations

import pytest

from firesteel.runtime import cubins

WORKER = """
import base64, json, os, sys, time
json.loads(sys.stdin.readline())
for line in sys.stdin:
    job = json.loads(line)
    time.sleep(job.get("seconds", 0))
    if "exit" in job:
        os._exit(1)
    made = {"name": job.get("name"), "shared": os.getpid(), "cubin": base64.b64encode(b"code").decode()}
    print(json.dumps({"error": job["error"]} if "error" in job else made), flush=True)
"""


@pytest.fixture(autouse=True)
def workers(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(cubins, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(cubins, "workers", cubins.Workers())
    monkeypatch.setattr(cubins, "compile_here", lambda job: (job["name"], 0, b"here"))
    monkeypatch.setattr(cubins.os, "cpu_count", lambda: 3)
    yield cubins.workers
    while not cubins.workers.idle.empty():
        cubins.workers.idle.get().end()


def compiled(jobs):
    return [made.result() for made in cubins.begin(jobs)]


def test_each_job_gets_its_answer_and_workers_share_them(workers):
    jobs = [{"name": str(k), "seconds": 0.01} for k in range(20)]
    made = compiled(jobs)
    assert [name for name, _, _ in made] == [str(k) for k in range(20)] and {code for _, _, code in made} == {b"code"}
    assert workers.count == 3 and len({pid for _, pid, _ in made}) == 3


def test_nothing_to_compile_starts_nothing(workers):
    assert compiled([]) == [] and not workers.count


def test_a_job_whose_worker_dies_is_compiled_here_and_others_go_on(workers, caplog):
    caplog.set_level("INFO", "firesteel")
    jobs = [{"name": "a"}, {"name": "b", "exit": 1, "function": "b_0"}, *({"name": str(k)} for k in range(6))]
    made = {name: code for name, _, code in compiled(jobs)}
    assert made.pop("b") == b"here" and set(made.values()) == {b"code"} and len(made) == 7
    assert [record.getMessage() for record in caplog.records] == ["no process to compile b_0: it is compiled in this one"]


def test_a_worker_that_ended_is_replaced(workers):
    (first,) = compiled([{"name": "a"}])
    worker = workers.idle.get()
    worker.process.kill()
    worker.process.wait()
    workers.idle.put(worker)
    (second,) = compiled([{"name": "a"}])
    assert second[1] not in (0, first[1]) and workers.count == 1


def test_what_triton_refuses_is_an_error_here(workers):
    with pytest.raises(RuntimeError, match="no such type"):
        compiled([{"name": "a", "error": "no such type"}])
    assert compiled([{"name": "b"}])[0][2] == b"code"


def test_where_no_process_can_be_started_this_one_compiles(workers, monkeypatch):
    monkeypatch.setattr(cubins.sys, "executable", "/nowhere/python")
    assert compiled([{"name": "a", "function": "a"}, {"name": "b", "function": "b"}]) == [("a", 0, b"here"), ("b", 0, b"here")]


def test_a_fork_has_no_workers(workers):
    compiled([{"name": "a"}])
    kept = workers.idle.get()
    workers.clear()
    assert not workers.count and workers.idle.empty()
    kept.end()
