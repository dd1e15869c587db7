"""The licences of the packages of this environment; the exit status is 1 if one is not allowed."""

import importlib.metadata
import re
import sys

ALLOWED = re.compile(
    r"apache|bsd|\bmit\b|psf|python software|\bisc\b|mpl|mozilla|zlib", re.IGNORECASE
)
TOOLS = {"pip", "setuptools"}


def licence(about: importlib.metadata.PackageMetadata) -> str:
    """Return the licence that a package names: an expression, a classifier or its own words."""
    classifiers = [x for x in about.get_all("Classifier") or [] if x.startswith("License ::")]
    named = [about.get("License-Expression"), *(x.split(" :: ")[-1] for x in classifiers)]
    named += [(about.get("License") or "").strip().split("\n")[0]]
    return next((x for x in named if x), "none")


def main() -> int:
    """Print a line for each package."""
    wrong = 0
    found = {d.metadata["Name"]: d for d in importlib.metadata.distributions()}
    for name in sorted(found, key=str.lower):
        if name in TOOLS:
            continue
        words = licence(found[name].metadata)
        is_allowed = ALLOWED.search(words) is not None
        wrong += not is_allowed
        print(f"{name} {found[name].version}: {words}{'' if is_allowed else '  <- not allowed'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
