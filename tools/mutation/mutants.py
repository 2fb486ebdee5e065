"""The faults that can be planted in a Python file: each a small change of one expression."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitAnd},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, order=True)
class Mutant:
    """One fault: the bytes from `start` to `end` of a file become `new`."""

    file: str
    line: int
    start: int
    end: int
    kind: str
    old: str
    new: str

    def planted(self, source: bytes) -> bytes:
        """The file with this fault."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All faults of one file in the order of its lines: `a < b` becomes `a <= b`, `n` `n + 1`, …

    Annotations, docstrings, imports and formatted strings are left as they are.
    """
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    made = {}
    for node, kind, new in _changes(ast.parse(source)):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = source.encode()[start:end].decode()
        mutant = Mutant(file, node.lineno, start, end, kind, old, new)
        if _compiles(mutant.planted(source.encode())):
            made[(start, end, new)] = mutant
    return sorted(made.values())


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Each node that can be changed, the kind of the change, and the text that replaces it."""
    for node in _running(tree):
        if isinstance(node, ast.expr):
            for kind, changed in _expressions(node):
                text = ast.unparse(changed)
                yield node, kind, text if isinstance(node, ast.Slice) else f"({text})"
        if isinstance(node, ast.stmt):
            yield from _statements(node)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that do something when the program runs."""
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, (ast.Import, ast.ImportFrom, ast.JoinedStr)):
                continue
            if isinstance(child, ast.Assign) and _names_a_type(child):
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from _running(child)


def _names_a_type(assignment: ast.Assign) -> bool:
    """Whether this is an alias of a type, as in Floats = NDArray[np.float64]."""
    return isinstance(assignment.value, ast.Subscript) and all(
        isinstance(name, ast.Name) and name.id[:1].isupper() and not name.id.isupper()
        for name in assignment.targets
    )


def _expressions(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        yield "arithmetic", ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right)  # type: ignore[arg-type]
    elif isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            ops = [*node.ops[:at], SWAPPED[type(op)](), *node.ops[at + 1 :]]
            yield "comparison", ast.Compare(node.left, ops, node.comparators)  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        yield "boolean", ast.BoolOp(SWAPPED[type(node.op)](), node.values)  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield "sign", node.operand
    elif isinstance(node, ast.Constant):
        yield from (("constant", ast.Constant(value)) for value in _other_constants(node.value))
    elif isinstance(node, ast.IfExp):
        yield "condition", ast.IfExp(_negated(node.test), node.body, node.orelse)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from _calls(node, node.func.id)
    elif isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            if (end := getattr(node, name)) is not None:
                ends = {"lower": node.lower, "upper": node.upper, "step": node.step}
                yield "slice", ast.Slice(**(ends | {name: _one_more(end)}))
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
        for made in node.generators:
            for test in made.ifs:
                yield "condition", _with_test(node, test)


def _other_constants(value: object) -> list[bool | int | float]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * 1.5 if value else 1.0]
    return []


def _calls(node: ast.Call, name: str) -> Iterator[tuple[str, ast.expr]]:
    if name in CALLS:
        yield "call", ast.Call(ast.Name(CALLS[name], ast.Load()), node.args, node.keywords)
    if name == "range":
        for at, end in enumerate(node.args[:2]):
            args = [*node.args[:at], _one_more(end), *node.args[at + 1 :]]
            yield "range", ast.Call(node.func, args, node.keywords)


def _one_more(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _with_test(node: ast.expr, test: ast.expr) -> ast.expr:
    """The comprehension with this one of its conditions negated."""
    copied = ast.parse(ast.unparse(node), mode="eval").body
    for made in getattr(copied, "generators", []):
        made.ifs = [_negated(t) if ast.dump(t) == ast.dump(test) else t for t in made.ifs]
    return copied


def _statements(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, (ast.If, ast.While)):
        yield node.test, "condition", f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield node.value, "returned", "None"
    elif isinstance(node, ast.AugAssign):
        if type(node.op) in SWAPPED:
            swapped = ast.AugAssign(node.target, SWAPPED[type(node.op)](), node.value)  # type: ignore[arg-type]
            yield node, "arithmetic", ast.unparse(swapped)
        yield node, "removed", "pass"
    elif _is_call(node) or isinstance(
        node, (ast.Raise, ast.Continue, ast.Break, ast.Delete, ast.Assert)
    ):
        yield node, "removed", "pass"


def _is_call(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
