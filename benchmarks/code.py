"""How much code a reader follows: `python -m benchmarks.code`, in lines without prose.

* what `adam(1e-3, grad_clip=clip_by_global_norm(1.0))` runs: its call, `init` and one `update` of
  two dense leaves; functions count once, with the lines of their bodies;
* how often its update walks a tree: calls of `jax.tree` and of `jax.tree_util` that optfn makes;
* what it can reach by name, through the imports at the top of modules: an import inside a function
  is an import that only its users reach;
* what its module imports.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "optfn"
Definition = ast.FunctionDef | ast.ClassDef
DOCUMENTED = (ast.FunctionDef, ast.ClassDef, ast.Module)
# Functions of JAX that walk a whole tree.
WALKS = {"map", "flatten", "unflatten", "leaves", "structure", "transpose", "reduce", "all"}
WALKS |= {f"{name}_with_path" for name in ("map", "flatten", "leaves")}
WALKS |= {f"tree_{name}" for name in WALKS}


class Count(NamedTuple):
    """Lines of code, definitions and files."""

    lines: int
    definitions: int
    files: int


class Module:
    """The text of a module, its definitions, and what it imports when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(text)
        source = {n: line.strip() for n, line in enumerate(text.splitlines(), 1)}
        self.code = {n for n, line in source.items() if line and not line.startswith("#")}
        self.code -= {n for node in ast.walk(self.tree) for n in docstring(node)}
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in self.tree.body:
            if isinstance(node, Definition):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (x.id for x in targets if isinstance(x, ast.Name))
                self.definitions |= dict.fromkeys(names, node)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optfn"):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = node.module or "", alias.name

    def lines(self, node: ast.stmt) -> set[int]:
        """Return the lines of code of a statement, with its decorators."""
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        return self.code & set(range(first, (node.end_lineno or first) + 1))


def docstring(node: ast.AST) -> Iterable[int]:
    """Return the lines of the docstring of a node."""
    if not isinstance(node, DOCUMENTED) or ast.get_docstring(node, clean=False) is None:
        return ()
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def modules() -> dict[str, Module]:
    """Return the modules of the package by dotted name."""
    paths = {p: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): Module(path) for path, name in paths.items()}


def first_use() -> tuple[Count, int]:
    """Return the code that the example runs, and how often its update walks a tree."""
    import jax
    import jax.numpy as jnp

    import optfn

    seen, walks, updating = set(), 0, False

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal walks
        code = frame.f_code
        if event != "call":
            return
        if Path(code.co_filename).is_relative_to(PACKAGE):
            seen.add((code.co_filename, code.co_firstlineno))
        elif updating and code.co_name in WALKS and "jax/_src/tree" in code.co_filename:
            walks += Path(frame.f_back.f_code.co_filename).is_relative_to(PACKAGE)

    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(3)}
    sys.setprofile(note)
    try:
        tx = optfn.adam(1e-3, grad_clip=optfn.clip_by_global_norm(1.0))
        state = tx.init(params)
        updating = True
        jax.jit(tx.update).trace(params, state, params)
    finally:
        sys.setprofile(None)
    return counted(seen), walks


def counted(calls: set[tuple[str, int]]) -> Count:
    """Return the code of functions, given their files and first lines."""
    bodies, files = [], set()
    for path in {path for path, _ in calls}:
        module = Module(Path(path))
        functions = [n for n in ast.walk(module.tree) if isinstance(n, ast.FunctionDef)]
        for node in functions:
            lines = module.lines(node)
            if lines and (path, min(lines)) in calls:
                inner = [f for f in ast.walk(node) if f in functions and f is not node]
                bodies.append(lines.difference(*map(module.lines, inner)))
                files.add(path)
    return Count(sum(map(len, bodies)), len(bodies), len(files))


def reached() -> Count:
    """Return the code that the example can reach by name."""
    known = modules()
    waiting = [resolved(known, "optfn", "adam"), resolved(known, "optfn", "clip_by_global_norm")]
    seen: set[tuple[str, str]] = set()
    while waiting:
        place = waiting.pop()
        if place is None or place in seen:
            continue
        seen.add(place)
        waiting += mentioned(known, place[0], known[place[0]].definitions[place[1]])
    lines = [known[m].lines(known[m].definitions[name]) for m, name in seen]
    return Count(sum(map(len, lines)), len(seen), len({module for module, _ in seen}))


def resolved(known: dict[str, Module], module: str, name: str) -> tuple[str, str] | None:
    """Return the module that defines a name of a module, and the name there."""
    while module in known:
        if name in known[module].definitions:
            return module, name
        if name not in known[module].imports:
            return None
        module, name = known[module].imports[name]
    return None


def mentioned(
    known: dict[str, Module], module: str, node: ast.AST
) -> Iterator[tuple[str, str] | None]:
    """Yield the definitions that the names in a node refer to."""
    for x in ast.walk(node):
        if isinstance(x, ast.Name):
            yield resolved(known, module, x.id)
        elif isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name):
            parent = ".".join(known[module].imports.get(x.value.id, ()))
            yield resolved(known, parent, x.attr)


def imported(start: str) -> list[str]:
    """Return the modules that a module loads, itself included, `optfn/__init__.py` apart."""
    known, waiting, seen = modules(), [start], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in known or name == "optfn":
            continue
        seen.add(name)
        for base, found in known[name].imports.values():
            waiting += [base, f"{base}.{found}"]
    return sorted(seen)


def main() -> None:
    """Print the figures."""
    sys.path.insert(0, str(ROOT))
    runs, walks = first_use()
    loaded = imported("optfn.optimizers.adam")
    lines = sum(len(modules()[name].code) for name in loaded)
    print("runs: {} lines, {} definitions, {} files".format(*runs))
    print(f"walks of trees in an update: {walks}")
    print("reached by name: {} lines, {} definitions, {} files".format(*reached()))
    print(f"imported by the module of Adam: {len(loaded)} files, {lines} lines")


if __name__ == "__main__":
    main()
