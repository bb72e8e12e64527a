"""A concrete executor of normalised instructions: what each of them means, in Python, on real objects.

It is the twin of the machine for tests: running a function here must give what Python gives, on every version, and stopping at any
instruction gives the state from which `resume.py` must be able to go on.  No torch.
"""
import builtins
import operator
import types

from firesteel.capture.code import program
from firesteel.capture.resume import HANDLED, HANDLED_AGAIN, LASTI, NULL, VALUE

BINARY = {"+": operator.add, "&": operator.and_, "//": operator.floordiv, "<<": operator.lshift, "@": operator.matmul, "*": operator.mul,
          "%": operator.mod, "|": operator.or_, "**": operator.pow, ">>": operator.rshift, "-": operator.sub, "/": operator.truediv, "^": operator.xor}
INPLACE = {"+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "|=": operator.ior, "//=": operator.ifloordiv}
COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge}


class Mark:
    """A stack item that is no object."""

    def __init__(self, kind, previous=None, error=None):
        self.kind, self.previous, self.error = kind, previous, error


NULL_ITEM = Mark(NULL)


class Frame:
    """A frame that can be stopped between any two instructions."""

    def __init__(self, function, args):
        self.function, self.code = function, function.__code__
        self.steps = program(self.code)
        self.slots = dict(zip(self.code.co_varnames, args))
        self.stack, self.at, self.done, self.result, self.handled = [], 0, False, None, None

    def step(self):
        """Executes one instruction; an exception goes to its handler."""
        instr = self.steps[self.at]
        self.at += 1
        try:
            getattr(self, "do_" + instr.opname.lower())(instr)
        except Exception as error:
            if error.__context__ is None and error is not self.handled:
                error.__context__ = self.handled
            if instr.handler is None:
                raise
            del self.stack[instr.handler.depth:]
            if instr.handler.lasti:
                self.stack.append(Mark(LASTI))
            self.stack.append(error)
            self.at = instr.handler.target.index

    def kinds(self):
        marks = [item if isinstance(item, Mark) else None for item in self.stack]
        return [VALUE if mark is None else HANDLED_AGAIN if mark.kind == HANDLED and mark in marks[:n] else mark.kind
                for n, mark in enumerate(marks)]

    def values(self):
        items = [item.error if isinstance(item, Mark) else item for item in self.stack]
        return [item for item, kind in zip(items, self.kinds()) if kind in (VALUE, HANDLED)]

    def cells(self):
        names = (*self.code.co_cellvars, *self.code.co_freevars)
        return {name: self.slots[name] for name in names if isinstance(self.slots.get(name), types.CellType)}

    def bound(self):
        cells = {*self.code.co_cellvars, *self.code.co_freevars}
        return [name for name in self.code.co_varnames if name in self.slots and name not in cells]

    def _pop_many(self, n):
        items = self.stack[len(self.stack) - n:]
        del self.stack[len(self.stack) - n:]
        return items

    def _goto(self, instr):
        self.at = instr.target.index

    # one method an instruction

    def do_nop(self, i): pass
    do_resume = do_nop
    def do_pop_top(self, i): self.stack.pop()
    def do_push_null(self, i): self.stack.append(NULL_ITEM)
    def do_copy(self, i): self.stack.append(self.stack[-i.arg])
    def do_swap(self, i): self.stack[-1], self.stack[-i.arg] = self.stack[-i.arg], self.stack[-1]
    def do_load_const(self, i): self.stack.append(i.argval)

    def do_load_fast(self, i):
        if i.argval not in self.slots:
            raise UnboundLocalError(i.argval)
        self.stack.append(self.slots[i.argval])

    def do_load_fast_and_clear(self, i): self.stack.append(self.slots.pop(i.argval, NULL_ITEM))

    def do_store_fast(self, i):
        value = self.stack.pop()
        if value is NULL_ITEM:
            self.slots.pop(i.argval, None)
        else:
            self.slots[i.argval] = value

    def do_delete_fast(self, i):
        if i.argval not in self.slots:
            raise UnboundLocalError(i.argval)
        del self.slots[i.argval]

    def do_load_closure(self, i): self.stack.append(self.slots[i.argval])

    def do_make_cell(self, i):
        cell = types.CellType()
        if i.argval in self.slots:
            cell.cell_contents = self.slots[i.argval]
        self.slots[i.argval] = cell

    def do_copy_free_vars(self, i): self.slots.update(zip(self.code.co_freevars, self.function.__closure__))
    def do_load_deref(self, i): self.stack.append(self.slots[i.argval].cell_contents)
    def do_store_deref(self, i): self.slots[i.argval].cell_contents = self.stack.pop()
    def do_delete_deref(self, i): del self.slots[i.argval].cell_contents

    def do_load_global(self, i):
        scope = self.function.__globals__
        self.stack.append(scope[i.argval] if i.argval in scope else getattr(builtins, i.argval))

    def do_load_assertion_error(self, i): self.stack.append(AssertionError)
    def do_load_attr(self, i): self.stack.append(getattr(self.stack.pop(), i.argval))

    def do_load_super_attr(self, i):
        which, cls, self_ = self._pop_many(3)
        self.stack.append(getattr(which(cls, self_), i.argval))

    def do_store_attr(self, i):
        value, obj = self._pop_many(2)
        setattr(obj, i.argval, value)

    def do_delete_attr(self, i): delattr(self.stack.pop(), i.argval)

    def do_binary_subscr(self, i):
        obj, key = self._pop_many(2)
        self.stack.append(obj[key])

    def do_store_subscr(self, i):
        value, obj, key = self._pop_many(3)
        obj[key] = value

    def do_delete_subscr(self, i):
        obj, key = self._pop_many(2)
        del obj[key]

    def do_unary_negative(self, i): self.stack.append(-self.stack.pop())
    def do_unary_positive(self, i): self.stack.append(+self.stack.pop())
    def do_unary_invert(self, i): self.stack.append(~self.stack.pop())
    def do_unary_not(self, i): self.stack.append(not self.stack.pop())
    def do_to_bool(self, i): self.stack.append(bool(self.stack.pop()))

    def do_binary_op(self, i):
        a, b = self._pop_many(2)
        self.stack.append((BINARY.get(i.argval) or INPLACE[i.argval])(a, b))

    def do_compare_op(self, i):
        a, b = self._pop_many(2)
        self.stack.append(COMPARE[i.argval](a, b))

    def do_is_op(self, i):
        a, b = self._pop_many(2)
        self.stack.append((a is b) != bool(i.arg))

    def do_contains_op(self, i):
        a, b = self._pop_many(2)
        self.stack.append((a in b) != bool(i.arg))

    def do_build_tuple(self, i): self.stack.append(tuple(self._pop_many(i.arg)))
    def do_build_list(self, i): self.stack.append(self._pop_many(i.arg))
    def do_build_set(self, i): self.stack.append(set(self._pop_many(i.arg)))
    def do_build_string(self, i): self.stack.append("".join(self._pop_many(i.arg)))
    def do_build_slice(self, i): self.stack.append(slice(*self._pop_many(i.arg)))

    def do_build_map(self, i):
        items = self._pop_many(2 * i.arg)
        self.stack.append(dict(zip(items[::2], items[1::2])))

    def do_build_const_key_map(self, i):
        keys = self.stack.pop()
        self.stack.append(dict(zip(keys, self._pop_many(i.arg))))

    def _into(self, i, method, n=1):
        args = self._pop_many(n)
        getattr(self.stack[-i.arg], method)(*args)

    def do_list_append(self, i): self._into(i, "append")
    def do_set_add(self, i): self._into(i, "add")
    def do_map_add(self, i): self._into(i, "__setitem__", 2)
    def do_list_extend(self, i): self._into(i, "extend")
    def do_set_update(self, i): self._into(i, "update")
    def do_dict_update(self, i): self._into(i, "update")
    do_dict_merge = do_dict_update
    def do_list_to_tuple(self, i): self.stack.append(tuple(self.stack.pop()))
    def do_unpack_sequence(self, i): self.stack.extend(reversed(list(self.stack.pop())))

    def do_unpack_ex(self, i):
        before, after = i.argval
        items = list(self.stack.pop())
        middle = items[before:len(items) - after]
        self.stack.extend(reversed([*items[:before], middle, *items[len(items) - after:]]))

    def do_convert_value(self, i): self.stack.append(i.argval(self.stack.pop()))
    def do_format_simple(self, i): self.stack.append(format(self.stack.pop(), ""))

    def do_format_with_spec(self, i):
        value, spec = self._pop_many(2)
        self.stack.append(format(value, spec))

    def take_call(self, i):
        """Pops a call's operands; gives a function that makes the call."""
        args = self._pop_many(i.arg)
        x, y = self._pop_many(2)
        if x is NULL_ITEM:
            x = y
        elif y is not NULL_ITEM:
            args.insert(0, y)
        split = len(args) - len(i.kwnames)
        return lambda: x(*args[:split], **dict(zip(i.kwnames, args[split:])))

    def do_call(self, i): self.stack.append(self.take_call(i)())

    def do_call_function_ex(self, i):
        kwargs = self.stack.pop() if i.arg & 1 else {}
        args = self.stack.pop()
        x, y = self._pop_many(2)
        self.stack.append((y if x is NULL_ITEM else x)(*args, **kwargs))

    def do_make_function(self, i):
        code = self.stack.pop()
        closure = self.stack.pop() if i.arg & 8 else None
        annotations = self.stack.pop() if i.arg & 4 else None
        kwdefaults = self.stack.pop() if i.arg & 2 else None
        defaults = self.stack.pop() if i.arg & 1 else None
        made = types.FunctionType(code, self.function.__globals__, code.co_name, defaults, closure)
        made.__kwdefaults__ = kwdefaults
        made.__annotations__ = dict(zip(annotations[::2], annotations[1::2])) if annotations else {}
        self.stack.append(made)

    def do_get_iter(self, i): self.stack.append(iter(self.stack.pop()))

    def do_for_iter(self, i):
        try:
            self.stack.append(next(self.stack[-1]))
        except StopIteration:
            self.stack.pop()
            self._goto(i)

    def do_jump(self, i): self._goto(i)

    def _jump_if(self, i, condition):
        if condition:
            self._goto(i)

    def do_pop_jump_if_true(self, i): self._jump_if(i, self.stack.pop())
    def do_pop_jump_if_false(self, i): self._jump_if(i, not self.stack.pop())
    def do_pop_jump_if_none(self, i): self._jump_if(i, self.stack.pop() is None)
    def do_pop_jump_if_not_none(self, i): self._jump_if(i, self.stack.pop() is not None)

    def do_return_value(self, i): self.result, self.done = self.stack.pop(), True

    def do_raise_varargs(self, i):
        if i.arg == 0:
            raise self.handled
        if i.arg == 1:
            raise self.stack.pop()
        error, cause = self._pop_many(2)
        raise error from cause

    def do_push_exc_info(self, i):
        error = self.stack.pop()
        self.stack += [Mark(HANDLED, self.handled, error), error]
        self.handled = error

    def do_pop_except(self, i):
        mark = self.stack.pop()
        self.handled = mark.previous
        self.stack = [None if item is mark else item for item in self.stack]    # a slot that nothing reads any more

    def do_check_exc_match(self, i):
        kind = self.stack.pop()
        self.stack.append(isinstance(self.stack[-1], kind))

    def do_reraise(self, i): raise self.stack.pop()

    def do_before_with(self, i):
        manager = self.stack.pop()
        self.stack.append(manager.__exit__)
        self.stack.append(manager.__enter__())

    def do_with_except_start(self, i):
        error = self.stack[-1]
        self.stack.append(self.stack[-4](type(error), error, error.__traceback__))


def run(function, args):
    frame = Frame(function, args)
    while not frame.done:
        frame.step()
    return frame.result
