"""Effects: whatever the program changes ends as eager leaves it, in order, also when it raises or breaks in the middle."""
import collections
import copy
import dis
import inspect
import io
import itertools
import threading
import types

import pytest
import torch

import firesteel as fs


@pytest.fixture(autouse=True)
def _fresh():
    fs.reset()


class Thing:
    """An object with whatever a program may change."""
    shared = 0

    def __init__(self):
        self.n, self.items, self.table, self.words = 1, [1, 2], {"a": 1}, {"x"}
        self.queue = collections.deque([1, 2, 3], maxlen=4)
        self.counts = collections.Counter("aab")
        self.lists = collections.defaultdict(list)
        self.ordered = collections.OrderedDict(a=1, b=2)
        self.file = io.StringIO()
        self.iterator = iter(range(10))
        self.pairs = [("a", 1)]
        self.array = bytearray(b"abc")
        self.tensors = [torch.ones(2)]
        self.log = []

    def state(self):
        found = {k: v for k, v in vars(self).items() if k not in ("file", "iterator")}
        return [found, self.file.getvalue(), list(copy.copy(self.iterator)), type(self).shared]


def equal(a, b):
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b)
    elif isinstance(a, dict):
        equal(list(a.items()), list(b.items()))
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b):
            equal(x, y)
    else:
        assert isinstance(a, Thing) or a == b, (a, b)


def tried(fn, *args):
    try:
        return "returned", fn(*args)
    except Exception as error:
        return "raised", type(error), str(error)


def lists(t, x):
    t.items.append(x.shape[0])
    t.items += [5, 6]
    t.items.insert(1, 9)
    t.items[0] = 7
    del t.items[2]
    t.items.extend(i * 2 for i in range(3))
    t.items.reverse()
    t.items.sort(key=lambda v: -v)
    last = t.items.pop()
    t.items[1:3] = [0, 0, 0]
    t.items.remove(0)
    t.tensors.append(x * 2)
    t.tensors[0] = t.tensors[0] + x.sum()
    return x + last + len(t.items)


def dicts(t, x):
    t.table["b"] = x.shape[0]
    t.table.update(c=3, a=5)
    t.table.setdefault("d", []).append(1)
    t.table.setdefault("d", []).append(2)
    first = t.table.pop("a")
    t.table |= {"z": 1}
    t.lists["k"].append(x.shape[0])
    t.lists["k"].append(2)
    t.ordered.move_to_end("a")
    t.ordered["c"] = 3
    t.ordered.popitem(last=False)
    t.counts["q"] += 2
    t.counts.update("aq")
    return x * first + t.table.get("b", 0)


def sets_and_queues(t, x):
    t.words.add("y")
    t.words |= {"z", "w"}
    t.words.discard("x")
    t.queue.append(7)
    t.queue.appendleft(8)
    t.queue.rotate(1)
    got = t.queue.popleft()
    t.array.append(100)
    return x + got + len(t.words)


def attributes(t, x):
    t.n += 1
    t.new = {"inner": [t.n]}
    t.new["inner"].append(t)
    setattr(t, "other", x * 2)      # noqa: B010  the builtin is what is tested
    del t.pairs
    t.n = t.n * 10
    Thing.shared += 1
    t.new["inner"].pop()
    return x * t.n + t.other


def files_and_iterators(t, x):
    t.file.write("one")
    a = next(t.iterator)
    print("two", a, file=t.file)
    b = next(t.iterator) + sum(itertools.islice(t.iterator, 2))
    t.file.write(str(b))
    return x * b


COUNT = 0
NAMES = ["a"]


def global_names(t, x):
    global COUNT
    COUNT += 1
    NAMES.append(COUNT)
    t.log.append(COUNT)
    return x * COUNT


def make_closure():
    total, seen = 0, []

    def closed(t, x):
        nonlocal total

        def add(n):
            nonlocal total
            total += n
            seen.append(total)
        add(1)
        add(x.shape[0])
        t.log.append((total, list(seen)))
        return x * total
    return closed


def order(t, x):
    t.log.append("a")
    t.items.append(len(t.log))
    t.log.append(("b", tuple(t.items)))
    t.items = t.log
    t.log.append("c")
    t.items.append("d")
    t.table["log"] = t.log
    return x.sin()


def aliases(t, x):
    t.left = t.right = [1]
    t.left.append(2)
    t.right.append(t.left[0] + 2)
    t.loop = []
    t.loop.append(t.left)
    t.again = t.loop[0]
    t.again += [9]
    return x + len(t.right)


PROGRAMS = [lists, dicts, sets_and_queues, attributes, files_and_iterators, global_names, make_closure, order, aliases]


def instance(program):
    return program() if program is make_closure else program


def run(program, compiled, count=3):
    """The states after each of some calls."""
    global COUNT, NAMES
    COUNT, NAMES, Thing.shared = 0, ["a"], 0
    t, found = Thing(), []
    fn = compiled(instance(program))
    for n in range(count):
        outcome = tried(fn, t, torch.arange(2.0 + n))
        found.append((outcome, [tuple(copy.copy(part)) if isinstance(part, list) else copy.copy(part) for part in t.state()], COUNT, list(NAMES)))
        if "pairs" not in vars(t):
            t.pairs = []
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_effects_are_eagers(program):
    equal(run(program, lambda fn: fs.compile(fn, backend="eager")), run(program, lambda fn: fn))


def raising_at(program, place):
    """The program, which raises when it has come to its statement number `place`."""
    lines = [instr.starts_line for instr in dis.get_instructions(program) if instr.starts_line]
    wanted = sorted(set(lines))[place]
    source = inspect.getsource(program).splitlines()
    first = program.__code__.co_firstlineno
    indent = " " * 4
    source.insert(wanted - first, f"{indent}raise ValueError(f'at {place}')")
    scope = dict(globals())
    exec(compile("\n".join(source), f"<raising {program.__name__} {place}>", "exec"), globals(), scope)
    return scope[program.__name__]


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("program", [lists, dicts, sets_and_queues, attributes, files_and_iterators, order, aliases], ids=lambda p: p.__name__)
def test_effects_before_an_exception(program, place):
    if place >= len({i.starts_line for i in dis.get_instructions(program) if i.starts_line}):
        return
    broken = raising_at(program, place)
    theirs, ours = run(broken, lambda fn: fn), run(broken, lambda fn: fs.compile(fn, backend="eager"))
    assert theirs[0][0][0] == "raised"
    equal(ours, theirs)


def test_an_error_of_the_real_call_in_the_middle():
    def fn(t, x, y):
        t.log.append("before")
        t.items.append(x.shape[0])
        z = x @ y
        t.log.append("behind")
        return z
    compiled = fs.compile(fn, backend="eager")
    mine, theirs = Thing(), Thing()
    for shape in [(2, 2), (3, 3), (2, 2)]:
        args = torch.ones(2, 2), torch.ones(*shape)
        assert tried(compiled, mine, *args)[0] == tried(fn, theirs, *args)[0]
        equal(mine.state(), theirs.state())


@pytest.mark.parametrize("caught", [False, True])
def test_an_exception_from_the_middle_of_nested_calls(caught):
    def deep(t, x, n):
        t.log.append(n)
        if n == 0:
            raise KeyError("deep")
        with Noting(t):
            deep(t, x * 2, n - 1)
        t.log.append("never")

    def fn(t, x):
        try:
            deep(t, x, 3)
        except KeyError as error:
            t.log.append(error.args)
            if not caught:
                raise ValueError("outer") from error
        finally:
            t.log.append("finally")
        return x + len(t.log)
    mine, theirs = Thing(), Thing()
    compiled = fs.compile(fn, backend="eager")
    for _ in range(2):
        equal(tried(compiled, mine, torch.ones(2)), tried(fn, theirs, torch.ones(2)))
        assert mine.log == theirs.log


class Noting:
    def __init__(self, t):
        self.t = t

    def __enter__(self):
        self.t.log.append("in")

    def __exit__(self, kind, error, trace):
        self.t.log.append(("out", kind.__name__ if kind else None))


def test_effects_before_and_behind_a_break(capsys):
    def fn(t, x):
        t.items.append(1)
        t.n += 1
        print(t.items, t.n)
        t.items.append(2)
        t.n += 1
        print(t.items, t.n)
        return x * t.n
    mine, theirs = Thing(), Thing()
    compiled = fs.compile(fn, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(fn(theirs, torch.ones(2)), compiled(mine, torch.ones(2)))
        equal(mine.state(), theirs.state())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0:2] == lines[2:4]


def test_effects_on_tensors_and_their_attributes():
    def fn(x, p):
        x.mul_(2)
        p.grad = x * 3
        view = x[0]
        view.add_(1)
        return x + p.grad
    found = []
    for run_ in (fn, fs.compile(fn, backend="aot_eager", fullgraph=True)):
        x, p = torch.ones(2, 2), torch.nn.Parameter(torch.zeros(2, 2))
        out = run_(x, p)
        found.append((out, x, p.grad))
    torch.testing.assert_close(found[1], found[0])


def test_generators_of_the_caller():
    def numbers():
        for n in itertools.count():     # noqa: UP028  the caller's own frame is what waits
            yield n

    def fn(gen, x):
        return x * next(gen) + next(gen)
    mine, theirs = numbers(), numbers()
    compiled = fs.compile(fn, backend="eager")
    for _ in range(4):
        torch.testing.assert_close(compiled(mine, torch.ones(2)), fn(theirs, torch.ones(2)))
    assert next(mine) == next(theirs)


# -- threads ------------------------------------------------------------------------------------------------------------
def in_threads(work, count=8):
    errors, barrier = [], threading.Barrier(count)

    def body(n):
        try:
            barrier.wait()
            work(n)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=body, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_compiling_and_calling_one_function_from_many_threads(backend):
    @fs.compile(backend=backend)
    def fn(x, scale):
        y = x.sin() * scale
        if x.shape[0] > 4:
            y = y + 1
        return (y * y).sum()

    def work(n):
        for repeat in range(6):
            rows = 2 + (n + repeat) % 5
            x = torch.arange(rows * 3.0).view(rows, 3).requires_grad_()
            out = fn(x, 2.0 + repeat % 2)
            out.backward()
            z = torch.arange(rows * 3.0).view(rows, 3).requires_grad_()
            y = z.sin() * (2.0 + repeat % 2)
            y = y + 1 if rows > 4 else y
            (y * y).sum().backward()
            torch.testing.assert_close(x.grad, z.grad)
    in_threads(work)


def test_each_thread_compiles_its_own():
    def work(n):
        torch.manual_seed(n)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        compiled = fs.compile(net, backend="aot_eager")
        with torch.no_grad() if n % 2 else torch.enable_grad():
            for rows in (2, 3):
                x = torch.ones(rows, 4)
                out = compiled(x)
                assert out.requires_grad == (n % 2 == 0)
                torch.testing.assert_close(out, net(x))
    in_threads(work)


def test_breaks_and_effects_from_many_threads():
    @fs.disable
    def outside(x):
        return x + 1

    @fs.compile(backend="eager")
    def fn(x, log):
        for i in range(3):
            log.append(i)
            x = outside(x * 2)
        return x
    logs = collections.defaultdict(list)

    def work(n):
        for _ in range(5):
            torch.testing.assert_close(fn(torch.ones(2) * n, logs[n]), torch.full((2,), n * 8.0 + 7))
        assert logs[n] == [0, 1, 2] * 5
    in_threads(work)


def test_a_module_of_the_interpreter_is_written():
    module = types.ModuleType("made_up")
    module.value = 1

    def fn(x):
        module.value += 1
        module.fresh = [module.value]
        return x * module.value
    compiled = fs.compile(fn, backend="eager")
    for n in (2, 3, 4):
        torch.testing.assert_close(compiled(torch.ones(1)), torch.full((1,), float(n)))
        assert module.value == n and module.fresh == [n]


# -- generators that are dropped before they end ------------------------------------------------------------------------
def numbers(log):
    log.append("start")
    try:
        for i in range(3):
            yield i
            log.append(i)
    finally:
        log.append("closed")


def left_by_break(log, x):
    for v in numbers(log):
        x = x + v
        if v == 1:
            break
    log.append("after")
    return x


def left_by_break_under_enumerate(log, x):
    for i, v in enumerate(numbers(log)):
        x = x + v
        if i == 1:
            break
    log.append("after")
    return x


def left_in_a_variable(log, x):
    def inner(x):
        generator = numbers(log)
        return x + next(generator) + next(generator)
    y = inner(x)
    log.append("after")
    return y


def left_by_another_value(log, x):
    generator = numbers(log)
    x = x + next(generator)
    generator = None
    log.append("after")
    return x


def left_while_it_waits_for_another(log, x):
    def outer():
        yield from numbers(log)
    for v in outer():
        x = x + v
        break
    log.append("after")
    return x


def kept_in_a_list(log, x):
    generator = numbers(log)
    kept = [generator]
    x = x + next(generator)
    generator = None
    log.append("kept")
    return x + sum(kept[0])


LEFT = [left_by_break, left_by_break_under_enumerate, left_in_a_variable, left_by_another_value, left_while_it_waits_for_another, kept_in_a_list]


@pytest.mark.parametrize("program", LEFT, ids=[p.__name__ for p in LEFT])
def test_generators_are_closed_where_the_last_reference_goes(program):
    ours, theirs = [], []
    compiled = fs.compile(program, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(ours, torch.ones(2)), program(theirs, torch.ones(2)))
    assert ours == theirs


REFUSED = {
    "index": lambda x, i: x[i], "index_select": lambda x, i: x.index_select(0, i), "gather": lambda x, i: x.gather(0, i), "embedding": lambda x, i: torch.embedding(x[:, None], i),
}


@pytest.mark.parametrize("name", REFUSED)
def test_effects_before_an_operator_that_refuses_its_data_are_made(name, capsys):
    """Those behind it are not, and the program runs once, up to the error."""
    def program(thing, x, i):
        thing.n += 1
        thing.items.append(x.shape[0])
        print("before")
        y = REFUSED[name](x * 2, i)
        thing.log.append("behind")
        return y + 1
    seen = []
    for function in (program, fs.compile(program)):
        for i in ([1], [7]):
            thing = Thing()
            error = None
            try:
                function(thing, torch.ones(3), torch.tensor(i))
            except (IndexError, RuntimeError) as raised:
                error = type(raised), str(raised)
            seen.append((thing.n, thing.items, thing.log, error, capsys.readouterr().out))
    assert seen[:2] == seen[2:] and seen[1][3] is not None


def test_effects_of_a_program_that_writes_its_input_are_not_made_twice():
    def program(thing, x, i):
        thing.items.append(1)
        x.add_(1)
        return x[i]
    compiled, thing, x = fs.compile(program), Thing(), torch.ones(3)
    with pytest.raises(IndexError):
        compiled(thing, x, torch.tensor([7]))
    assert float(x.max()) <= 2 and thing.items.count(1) <= 2
