"""How much code a reader follows: `python -m benchmarks.code`.

Prints, for the package as it is installed or for another checkout (`--root`):

* the code that `adam(1e-3, grad_clip=clip_by_global_norm(1.0))` runs for its init and update, by
  `sys.setprofile`: lines without docstrings and comments, definitions, files;
* the code that can be reached from it by name (`--static`): what the functions mention, whether it
  runs or not, without the functions named by `--without`;
* lengths of function bodies, the share of parameters annotated `Any`, modules and folders.
"""

import argparse
import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Definition = ast.FunctionDef | ast.ClassDef


def code_lines(node: Definition, source: list[str]) -> set[int]:
    """Return the lines of a definition that are neither blank, comment nor docstring."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = {
        n
        for n in range(first, node.end_lineno + 1)
        if source[n - 1].strip() and not source[n - 1].strip().startswith("#")
    }
    for inner in ast.walk(node):
        if isinstance(inner, Definition) and ast.get_docstring(inner, clean=False) is not None:
            doc = inner.body[0]
            lines -= set(range(doc.lineno, doc.end_lineno + 1))
    return lines


def modules(package: Path) -> dict[str, tuple[ast.Module, list[str]]]:
    """Return the trees and the lines of the modules of a package by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        text = path.read_text()
        found[name.removesuffix(".__init__")] = ast.parse(text), text.splitlines()
    return found


def executed(package: Path) -> set[tuple[str, int, str]]:
    """Return (file, line, name) of the functions of optfn that the example runs."""
    import jax
    import jax.numpy as jnp

    import optfn

    seen = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(package):
            seen.add((code.co_filename, code.co_firstlineno, code.co_name))

    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(3)}
    sys.setprofile(note)
    tx = optfn.adam(1e-3, grad_clip=optfn.clip_by_global_norm(1.0))
    jax.jit(tx.update)(params, tx.init(params), params)
    sys.setprofile(None)
    return seen


def executed_closure(package: Path) -> tuple[int, int, int]:
    """Return lines, definitions and files of what the example runs."""
    calls = executed(package)
    lines: set[tuple[str, int]] = set()
    definitions = 0
    for path in {path for path, _, _ in calls}:
        text = Path(path).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if (path, first, node.name) in calls:
                    definitions += 1
                    lines |= {(path, n) for n in code_lines(node, text.splitlines())}
    return len(lines), definitions, len({path for path, _ in lines})


class Names:
    """The top-level definitions of a package, and what the names in its modules refer to."""

    def __init__(self, package: Path) -> None:
        self.modules = modules(package)
        self.definitions: dict[tuple[str, str], ast.stmt] = {}
        self.imports: dict[str, dict[str, tuple[str, str]]] = {name: {} for name in self.modules}
        for module, (tree, _) in self.modules.items():
            for node in tree.body:
                if isinstance(node, Definition):
                    self.definitions[module, node.name] = node
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            self.definitions[module, target.id] = node
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optfn"):
                    for alias in node.names:
                        name = alias.asname or alias.name
                        self.imports[module][name] = node.module, alias.name

    def resolve(self, module: str, node: ast.AST) -> tuple[str, str] | None:
        """Return the definition that a name, or an attribute of a module, refers to."""
        if isinstance(node, ast.Name):
            if (module, node.id) in self.definitions:
                return module, node.id
            target = self.imports[module].get(node.id)
            return target if target in self.definitions else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            parent, name = self.imports[module].get(node.value.id, ("", ""))
            target = f"{parent}.{name}", node.attr
            return target if target in self.definitions else None
        return None

    def mentioned(self, module: str, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Yield the definitions that a definition mentions outside of annotations."""
        for child in ast.iter_child_nodes(node):
            if child in (getattr(node, "returns", None), getattr(node, "annotation", None)):
                continue
            target = self.resolve(module, child)
            if target is not None:
                yield target
            yield from self.mentioned(module, child)


def static_closure(package: Path, roots: list[str], without: list[str]) -> tuple[int, int, int]:
    """Return lines, definitions (nested ones included) and files that `roots` can reach by name."""
    names = Names(package)
    skipped = {tuple(name.rsplit(".", 1)) for name in without}
    waiting, seen = [tuple(root.rsplit(".", 1)) for root in roots], set()
    while waiting:
        key = waiting.pop()
        if key in seen or key in skipped or key not in names.definitions:
            continue
        seen.add(key)
        waiting += names.mentioned(key[0], names.definitions[key])
    nodes = [(key[0], names.definitions[key]) for key in seen]
    nodes = [(module, node) for module, node in nodes if isinstance(node, Definition)]
    lines = sum(len(code_lines(node, names.modules[module][1])) for module, node in nodes)
    count = sum(isinstance(x, Definition) for _, node in nodes for x in ast.walk(node))
    return lines, count, len({module for module, _ in nodes})


def survey(package: Path) -> None:
    """Print lengths of bodies, the share of `Any`, modules and folders."""
    bodies, annotated, loose = [], 0, 0
    for tree, _ in modules(package).values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            doc = ast.get_docstring(node, clean=False)
            bodies.append(node.end_lineno - node.body[0].lineno + 1 - (doc or "").count("\n"))
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            kinds = [a.annotation for a in arguments if a.annotation is not None]
            annotated += len(kinds)
            loose += sum(isinstance(kind, ast.Name) and kind.id == "Any" for kind in kinds)
    bodies.sort()
    print(
        f"{len(bodies)} functions; bodies: median {statistics.median(bodies):g} lines, "
        f"p90 {bodies[int(0.9 * len(bodies))]}, longest {bodies[-1]}"
    )
    print(f"parameters annotated Any: {loose} of {annotated}, {loose / annotated:.1%}")
    alone = [p.name for p in package.glob("*.py") if p.name != "__init__.py"]
    folders = [p.name for p in package.iterdir() if (p / "__init__.py").exists()]
    print(f"{len(alone)} modules at the root beside __init__, {len(folders)} folders")


def main() -> None:
    """Print the figures of one checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--static", nargs="*", default=[], help="roots: optfn.module.function")
    parser.add_argument("--without", nargs="*", default=[], help="functions that are not followed")
    options = parser.parse_args()
    sys.path.insert(0, str(options.root))
    package = options.root / "optfn"
    survey(package)
    print("executed: {} lines, {} definitions, {} files".format(*executed_closure(package)))
    if options.static:
        found = static_closure(package, options.static, options.without)
        print("by name: {} lines, {} definitions, {} files".format(*found))


if __name__ == "__main__":
    main()
