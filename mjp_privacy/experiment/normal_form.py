"""A source as a text that is the same for sources that do the same.

It is the syntax tree, so comments, blank lines and the way lines are broken do not count. Left out
are statements that do nothing: docstrings, other texts that stand alone, `pass`.

The tree is written out here and not by `ast.dump`, so that Python 3.10 to 3.13 agree: empty fields
are left out, for later versions have more of them, the parts of text in an f-string are joined, and
texts are written in ASCII.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

NOT_CODE = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
"""Fields of a syntax tree that change nothing, or that follow from the rest."""


def normal_form(tree: ast.AST) -> str:
    """The text: normal_form(ast.parse("a = 1  # one")) == normal_form(ast.parse("a=1"))."""
    words: list[str] = []
    _write(tree, words)
    return "\n".join(words)


def _write(node: ast.AST, words: list[str]) -> None:
    """Add a node's class, then its fields by name. Values are quoted, so none looks like a name."""
    if isinstance(node, ast.Constant):
        words.append(ascii(node.value))
        return
    words.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if value is None or value == [] or name in NOT_CODE:
            continue
        words.append(name)
        if isinstance(value, ast.AST):
            _write(value, words)
        elif isinstance(value, list):
            texts_joined = isinstance(node, ast.JoinedStr)
            for item in _joined(value) if texts_joined else _that_act(value):
                if isinstance(item, ast.AST):
                    _write(item, words)
                else:
                    words.append(ascii(item))
            words.append("]")
        else:
            words.append(ascii(value))
    words.append(")")


def _that_act(items: Sequence[object]) -> Iterator[object]:
    """The items without statements that do nothing."""
    for item in items:
        stands_alone = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
        if not (stands_alone or isinstance(item, ast.Pass)):
            yield item


def _joined(parts: Sequence[object]) -> Iterator[object]:
    """The parts of an f-string, neighbouring texts as one."""
    text = ""
    for part in parts:
        if isinstance(part, ast.Constant):
            text += str(part.value)
            continue
        if text:
            yield text
            text = ""
        yield part
    if text:
        yield text
