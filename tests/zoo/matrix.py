"""The outcomes of all models and abilities, in matrix.json.

make zoo        runs all pairs, and writes matrix.json; it fails if numbers are wrong
"""

import json
import re
import sys
from pathlib import Path

import pytest
from machine import DEVICES, add_flags

from zoo import MODELS, idiom_of, make
from zoo.abilities import ABILITIES, NotApplicable

FILE = Path(__file__).with_name("matrix.json")
PAIRS = [
    (f"{library} {idiom}", name)
    for library, idioms in MODELS.items()
    for idiom in idioms
    for name in ABILITIES
]
AGREES, NOT_APPLICABLE = "agrees", "–: "


def outcome(model: str, name: str) -> str:
    """Return "agrees", why the ability does not apply, or the error; wrong numbers raise."""
    made = make(model)
    try:
        ABILITIES[name](made)
    except NotApplicable as reason:
        return f"{NOT_APPLICABLE}{reason}"
    except AssertionError:
        raise
    except Exception as error:
        # Lines of code, shapes and what JAX adds may change.
        clause = re.split(r"; |[.:] |\n", str(error))[0]
        return f"{type(error).__name__}: {clause}"
    return AGREES


def read() -> dict:
    return json.loads(FILE.read_text())


def write() -> None:
    """Run all pairs; the outcomes of a library that is not installed stay as they are."""
    kept = read()["models"] if FILE.exists() else {}
    found, wrong = {}, []
    for model, name in PAIRS:
        try:
            idiom = " ".join(idiom_of(model).split())
            entry = found.setdefault(model, {"idiom": idiom, "outcomes": {}})
            entry["outcomes"][name] = outcome(model, name)
        except pytest.skip.Exception:
            found[model] = kept[model]
        except AssertionError as error:
            wrong.append(f"{model}, {name}: {error}")
    abilities = {name: fn.asked for name, fn in ABILITIES.items()}
    FILE.write_text(
        json.dumps({"abilities": abilities, "models": found}, indent=1, ensure_ascii=False) + "\n"
    )
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    add_flags(DEVICES)
    write()
