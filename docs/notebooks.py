"""Pages as Jupyter notebooks: prose and programs become cells, with the output below them."""

import json
import re
from collections.abc import Iterator
from typing import Any

from docs.programs import PROGRAM


def notebook(markdown: str) -> str:
    """Return a page as the text of a notebook."""
    return json.dumps(
        {
            "cells": list(_cells(markdown)),
            "metadata": {
                "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
    )


def _cells(markdown: str) -> Iterator[dict[str, Any]]:
    position = 0
    for number, match in enumerate(PROGRAM.finditer(markdown)):
        yield from _prose(markdown[position : match.start()], 2 * number)
        outputs = []
        if match["output"]:
            outputs = [{"output_type": "stream", "name": "stdout", "text": match["output"]}]
        yield {
            "cell_type": "code",
            "id": f"cell-{2 * number + 1}",
            "execution_count": number + 1,
            "metadata": {},
            "outputs": outputs,
            "source": match["code"].rstrip(),
        }
        position = match.end()
    yield from _prose(markdown[position:], 2 * number + 2)


def _prose(text: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield a cell of prose, without links to pages that a notebook does not have beside it."""
    text = re.sub(r"!?\[([^\]]*)\]\([\w./#-]+\)", r"\1", text).strip()
    if text:
        yield {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": text}
