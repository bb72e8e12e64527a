"""fs.explain: what became of a program, by the user's names and lines."""
import pytest
import torch

import firesteel as fs
from firesteel import artifacts
from firesteel.tools.explain import by_index, collecting


def program(x, n):
    y = x * n
    print("hello")
    return torch.nn.functional.gelu(y @ y.t()).sum()


@pytest.mark.usefixtures("library_products")
def test_a_page_has_everything(capsys):
    page = fs.explain(program)(torch.randn(6, 6, requires_grad=True), 3)
    capsys.readouterr()
    assert page.graph_count == 2 and page.graph_break_count == 1
    assert page.break_reasons[0].source == 'print("hello")'
    assert any(text.startswith("x.shape == (6, 6)") for text in page.specializations) and any(text.startswith("n == 3") for text in page.specializations)
    assert "x is a float32 tensor (6, 6) that needs a gradient" in page.guard_words and "n == 3" in page.guard_words
    assert page.saved_bytes > 0 and page.compile_times["capture"] > 0
    lines = {line for kernel in page.kernels for line in kernel.lines}
    assert f"{__file__}:{program.__code__.co_firstlineno + 1} in program" in lines
    assert [call.lines for call in page.library_calls if call.phase == "forward"] == [(f"{__file__}:{program.__code__.co_firstlineno + 3} in program",)]
    assert all(f"{name}:\n" in str(page) for name in ("breaks", "specialised", "guards", "kernels", "library calls"))
    assert "\ntime, " in str(page)


def test_breaks_are_told_when_as_many_as_are_kept_came_before(capsys):
    for number in range(artifacts.breaks.maxlen):
        artifacts.note_break(f"break {number}", None, "")
    page = fs.explain(program)(torch.randn(6, 6), 3)
    capsys.readouterr()
    assert [one.source for one in page.break_reasons] == ['print("hello")']


@pytest.mark.usefixtures("library_products")
def test_the_backward_is_told_before_it_runs():
    def f(x, w):
        y = (x @ w).relu()
        return y.square().sum()
    page = fs.explain(f)(torch.randn(4, 4), torch.randn(4, 4, requires_grad=True))
    lines = {line for kernel in page.kernels if kernel.phase == "backward" for line in kernel.lines}
    assert lines and lines <= {f"{__file__}:{f.__code__.co_firstlineno + n} in test_the_backward_is_told_before_it_runs.<locals>.f" for n in (1, 2)}, lines
    assert any(call.phase == "backward" for call in page.library_calls)
    assert fs.explain(f, backend="aot_eager")(torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)).kernels == []


def test_recompiles_have_the_value_that_changed():
    def f(x):
        return sum(part(x, mode) for mode in ("a", "b"))

    @fs.compile
    def part(x, mode):
        return x * 2 if mode == "a" else x
    with collecting() as found:
        f(torch.ones(3))
    assert [text.split(": ", 1)[1] for text in found().recompiles] == ["mode is 'b'; it was 'a'"]


def test_guards_of_a_module_are_folded_and_called_by_its_names():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))
            self.scale = 2

        def forward(self, picture):
            for layer in self.layers:
                picture = layer(picture) * self.scale
            return picture
    page = fs.explain(Model())(torch.randn(2, 4))
    assert "picture is a float32 tensor (2, 4)" in page.guard_words and "self.scale == 2" in page.guard_words
    assert "10 parameters keep their shapes, dtypes and devices" in page.guard_words
    assert len(page.guard_words) < 8 < len(page.guards)


@pytest.mark.usefixtures("library_products")
def test_layers_are_rows_of_one():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(5))

        def forward(self, tokens):
            for layer in self.layers:
                tokens = layer(tokens @ tokens)
            return tokens
    with torch.no_grad():
        page = fs.explain(Model())(torch.randn(4, 4))
    assert page.guard_words[0] == "tokens is a float32 tensor (4, 4)" and "self.layers[0 to 4].eps == 1e-05" in page.guard_words
    assert sum("eps" in row for row in page.specializations) == 5 and str(page).count(".eps == 1e-05: a number") == 1
    kernels = str(page).split("\nkernels:\n")[1].split("\nlibrary calls:")[0]
    assert len(page.kernels) == 5 and kernels.count("\n") == 0 and " and 2 more: " in kernels


def test_rows_that_differ_in_an_index():
    rows = [f"a[{i}].b[{j}].c == 2" for i in (0, 1, 3) for j in (1, 2, 3)]
    assert by_index([*rows, "k == [3]", "k == [4]", "e[1] is 2", "e[2] is 3", "plain", "plain"]) == \
        ["a[0, 1, 3].b[1 to 3].c == 2", "k == [3]", "k == [4]", "e[1] is 2", "e[2] is 3", "plain"]


def test_names_and_keys_in_messages():
    """A module's arguments by the names of its forward, in logs too; no elements of a tensor that is a key; a bad call is eager's error."""
    class Model(torch.nn.Module):
        def forward(self, tokens, **more):
            return tokens * 2
    model, table = fs.compile(Model()), {}
    key = torch.randn(20, 20)
    lookup = fs.compile(lambda table: table[key] * torch.ones(2))
    with collecting() as found:
        for n in (2, 3):
            model(torch.ones(n))
            table[key] = n
            lookup(table)
    assert [text.split(": ", 1)[1] for text in found().recompiles] == ["tokens has size 3 in dimension 0; it was 2", "table[a tensor (20, 20)] is 3; it was 2"]
    for name in ("tokens", "self"):
        with pytest.raises(TypeError, match=f"multiple values for argument '{name}'"):
            model(torch.ones(2), **{name: 1})


def test_fall_backs_are_told():
    page = fs.explain(lambda x: torch.linalg.eigvals(x).abs())(torch.randn(3, 3))
    assert page.fallbacks == ["abs has no kernel, torch runs it: 1"]        # of complex numbers


def test_a_notebook_shows_it(tmp_path):
    page = fs.explain(lambda x: x * 2)(torch.ones(3))
    assert page._repr_html_().count("<details") == 4 and "<b>1 graph(s)" in page._repr_html_()
    page.to_html(tmp_path / "page.html")
    assert "graph 1" in (tmp_path / "page.html").read_text()


def test_what_is_saved_may_have_sizes_of_data():
    def loss(log_probs, labels, lengths):
        return torch.nn.functional.ctc_loss(log_probs, labels, lengths, (labels > 0).sum(-1))
    log_probs = torch.randn(9, 2, 5).log_softmax(-1).requires_grad_()
    page = fs.explain(loss)(log_probs, torch.tensor([[1, 2, 3], [4, 1, 1]]), torch.tensor([9, 8]))
    assert page.graph_count == 1


def test_a_compiled_function_is_told_with_its_names_settings_and_recompiles():
    @fs.compile(dynamic=False)
    def scaled(x, factor):
        return x * factor
    for factor in (2, 3):
        scaled(torch.ones(3), factor)
    page = fs.explain(scaled)(torch.ones(4), 5)
    assert page.recompiles == [f"{scaled.__qualname__}: factor is 3; it was 2"]
    assert any(text.startswith("factor == 5") for text in page.specializations)     # nothing is dynamic
    model = fs.compile(torch.nn.Linear(3, 3))
    for n in (2, 4):
        model(torch.ones(n, 3))
    page = fs.explain(model)(torch.ones(5, 3))
    assert page.recompiles == ["Linear: input has size 4 in dimension 0; it was 2"] and "input is a float32 tensor (any, 3)" in page.guard_words


def test_a_break_in_a_loop_is_told_once_and_the_loop_by_its_name(capsys):
    def loop(x):
        for i in range(3):
            x = x + i
            print(i)
        return x
    page = fs.explain(loop)(torch.ones(3))
    capsys.readouterr()
    text = str(page)
    assert page.graph_break_count == 3 and text.count("print writes output") == 1 and "    3 times\n" in text
    assert "the loop's next value is 2; it was 1" in text and "stack item" not in text and "9223372036854775807" not in text


def test_guards_on_what_has_no_name_are_folded():
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def step(x):
        loss = net(x).sum()
        loss.backward()
        return loss.detach()
    page = fs.explain(step)(torch.ones(2, 4))
    assert "4 parameters have no gradient yet (.grad is None)" in page.guard_words
    net[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    words = [*page.guard_words, *fs.explain(net)(torch.ones(2, 4)).guard_words]
    assert len(words) < 12 and not [text for text in words for name in ("_facts", "layout", "__closure__", "pybind11", "._", "engine") if name in text]
    scale = torch.tensor(2.0)
    assert "scale is a float32 tensor ()" in fs.explain(lambda x: x * scale)(torch.ones(3)).guard_words        # a closure's own name


def test_lines_of_a_users_autograd_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x ** 3

        @staticmethod
        def backward(ctx, grad):
            x, = ctx.saved_tensors
            return grad * 3 * x * x
    page = fs.explain(lambda x: Cube.apply(x) + 1)(torch.ones(3, requires_grad=True))
    lines = {kernel.phase: [line.rpartition(".")[2] for line in kernel.lines] for kernel in page.kernels}
    assert lines == {"forward": ["forward", "<lambda>"], "backward": ["backward"]}
