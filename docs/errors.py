"""The messages of the library's warnings and errors, as its code has them: docs/reference/errors.md
lists them, and tests/product/test_docs.py compares."""

import ast
import builtins
import re

from docs.programs import ROOT

# The code of steps, loops and checkpoints, whose errors are listed; warnings are those of all code.
LISTED = ("checkpoint", "loss", "mesh/layout", "run", "train")
# An error that says what an argument must be, or what it needs, explains itself.
PLAIN = re.compile(r"\b(must|needs?)\b")
FIELD = re.compile(r"\{\w*\}")  # of a text that `format` fills in


def messages() -> set[str]:
    """Return the first sentence of each warning, and of each error that is listed."""
    found = set()
    for path in sorted((ROOT / "optfn").rglob("*.py")):
        is_listed = str(path.relative_to(ROOT / "optfn")).startswith(LISTED)
        warnings, errors = said(ast.parse(path.read_text()))
        found |= {first_sentence(text) for text in warnings}
        if is_listed:
            found |= {first_sentence(text) for text in errors if not PLAIN.search(text)}
    return {text for text in found if order(text)}


def said(tree: ast.Module) -> tuple[list[str], list[str]]:
    """Return the texts of the warnings of a module, and those of its errors.

    Those that train/order.py gives are in train/forms.py, with {link} for the link."""
    named = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    warnings, errors = [], []
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name(name) | ast.Attribute(_, name), [text, *_]):
                text = named.get(text.id, text) if isinstance(text, ast.Name) else text
                if name == "warn":
                    warnings.append(template(text))
                elif name == "OtherRun" or (name.endswith("Error") and hasattr(builtins, name)):
                    errors.append(template(text))
            case ast.Constant(str(text)) if "{link}" in text and "\n" not in text:
                warnings.append(template(node))
    return warnings, errors


def template(node: ast.AST) -> str:
    """Return the text of an expression, with … for what a program inserts."""
    match node:
        case ast.Constant(str(text)):
            return FIELD.sub("…", text) if "{link}" in text else text
        case ast.JoinedStr(values):
            return "".join(map(template, values))
        case ast.BinOp(left, ast.Add(), right):
            return template(left) + template(right)
    return "…"


def first_sentence(text: str) -> str:
    """Return a message up to its first full stop: what follows is advice."""
    return re.sub(r"…+", "…", re.split(r"\. |\.?$", text)[0]).strip()


def first_words(sentence: str) -> str:
    """Return a sentence up to the first mark after six words that begins another clause."""
    ends = (sentence[: mark.start()] for mark in re.finditer(r", (?!and |or )|[;:] | \(", sentence))
    return next((words for words in ends if len(order(words).split()) >= 6), sentence)


def order(text: str) -> str:
    """Return the words of a message by which it is put in order, "" if it has none of its own."""
    return " ".join(re.findall(r"\w+", text.lower()))
