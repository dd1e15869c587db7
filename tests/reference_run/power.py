"""python -m reference_run.power: whether drawn programs find faults that are put into optfn.

Each mutation of `mutations.json`, and each known fault of an unmended tree, is looked for in a
process of its own, for so many programs. The table says after how many the first is found.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTATIONS = Path(__file__).with_name("mutations.json")


def draw(tree, options, *more):
    """Draw programs in a process against a tree; return what it writes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        arguments = ["--programs", options.programs, "--seconds", options.seconds, "--shrink", 0]
        arguments += ["--seed", options.seed, "--tree", tree, "--json", file.name, *more]
        command = [sys.executable, "-m", "reference_run", *map(str, arguments)]
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
        run = subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        text = Path(file.name).read_text()
        return (
            json.loads(text) if text else {"count": 0, "failures": [], "error": run.stderr[-500:]}
        )


def try_mutation(options, name, file, old, new):
    """Return a row of the table: after how many programs a mutation is found."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(Path(options.base) / "optfn", tree / "optfn")
        text = (tree / file).read_text()
        if old and text.count(old) != 1:
            return [name, f"{old!r} stands {text.count(old)} times in {file}", 0, ""]
        (tree / file).write_text(text.replace(old, new) if old else text)
        found = draw(tree, options, "--first", *(["--avoid"] if options.avoid else []))
    return [name, *outcome(found, found["failures"])]


def try_faults(options, tree):
    """Return rows for the known faults found in a tree, by programs that meet one alone."""
    found = draw(tree, options)
    names = sorted({name for _, _, met, _ in found["failures"] for name in met})
    alone = {n: [x for x in found["failures"] if x[2] == [n]] for n in names}
    some = {n: [x for x in found["failures"] if n in x[2]] for n in names}
    rows = [
        [n, *outcome(found, alone[n] or some[n], "" if alone[n] else ", with others")]
        for n in names
    ]
    return [*rows, ["no known fault", *outcome(found, [x for x in found["failures"] if not x[2]])]]


def outcome(found, failures, more=""):
    """Return whether something was found, after how many programs, and in what field."""
    if not failures:
        return ["not found" + found.get("error", ""), found["count"], ""]
    return ["found" + more, failures[0][0], failures[0][1]]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=300, help="for each mutation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--base", default=str(ROOT), help="the tree that is mutated")
    parser.add_argument("--unmended", help="a tree whose known faults are looked for, instead")
    parser.add_argument("--avoid", action="store_true", help="leave out what meets a known fault")
    parser.add_argument("--only", default="", help="mutations with these words in their names")
    options = parser.parse_args(arguments)
    print("| fault | outcome | programs | what differs |\n|---|---|---|---|", flush=True)
    if options.unmended:
        for row in try_faults(options, options.unmended):
            print("|", " | ".join(map(str, row)), "|", flush=True)
        return
    mutations = [["none", "optfn/__init__.py", "", ""]] if not options.only else []
    mutations += [m for m in json.loads(MUTATIONS.read_text()) if options.only in m[0]]
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        rows = [pool.submit(try_mutation, options, *m) for m in mutations]
        for row in rows:
            print("|", " | ".join(map(str, row.result())), "|", flush=True)
    found = sum(row.result()[1] == "found" for row in rows)
    print(f"\n{found} of {len(rows) - (not options.only)} mutations are found", flush=True)


if __name__ == "__main__":
    main()
