"""What the text of a compiled program says."""

import re

import numpy as np


def collectives(text):
    """Return the bytes of the results of each kind of collective in a compiled program."""
    size = {"f32": 4, "u32": 4, "s32": 4, "bf16": 2, "u16": 2, "pred": 1}
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = {}
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
        total = sum(size[d] * int(np.prod([int(x) for x in s.split(",") if x])) for d, s in shapes)
        found.setdefault(kind, []).append(total)
    return found
