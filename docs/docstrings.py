"""How docstrings become Markdown: doctests in fences, and `> 0` is no quotation."""

import re

import griffe

DOCTEST = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)
QUOTATION = re.compile(r"^( *\w+: )>", re.MULTILINE)


class Readable(griffe.Extension):
    """Rewrite each docstring before mkdocstrings parses it."""

    def on_object(self, *, obj, **kwargs):
        """Rewrite the docstring of one object."""
        if obj.docstring:
            text = DOCTEST.sub(
                lambda m: f"```pycon\n{m.group().rstrip()}\n```\n", obj.docstring.value
            )
            obj.docstring.value = QUOTATION.sub(r"\1\\>", text)
