"""How docstrings become Markdown: doctests in fences, lists as lists, `> 0` is no quotation."""

import importlib
import inspect
import re

import griffe

from docs import equations
from docs.crosslinks import linked

DOCTEST = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)
QUOTATION = re.compile(r"^( *\w+: )>", re.MULTILINE)
# A paragraph of "name: what it is", perhaps below a line such as "The arguments of f:".
FIELDS = re.compile(
    r"(?:(?<=\n\n)|\A)((?:[A-Z].*:\n)?)((?:( {0,2})[a-z]\w*: .+\n(?:\3 +.+\n)*){2,})(?=\n)"
)
SECTIONS = ("Args:\n", "Returns:\n", "Raises:\n")  # mkdocstrings makes tables of these
NUMBERS = re.compile(r"^(?! *\d\. )(.+\n)(?= *1\. )", re.MULTILINE)
# A paragraph that is indented by four spaces, of these modules: equations.
INDENTED = re.compile(r"(?:\A|(?<=\n\n))(?: {4}.+\n)+")
OF_EQUATIONS = ("optfn.optimizers.", "optfn.transforms.")


def typeset(paragraph: re.Match[str]) -> str:
    """Return equations as MathML, and other paragraphs as they are."""
    return f"{equations.block(paragraph.group()) or paragraph.group().rstrip()}\n"


def listed(fields: re.Match[str]) -> str:
    """Return a list in Markdown of lines "name: what it is"."""
    head, lines, indent = fields.groups()
    if head in SECTIONS:
        return fields.group()
    items = re.sub(rf"^{indent}([a-z]\w*): ", r"* `\1`: ", lines, flags=re.MULTILINE)
    return f"{head}\n{items}"


def take_arguments(obj):
    """Give a function of one record of arguments the signature and the docstring that it has."""
    function = getattr(importlib.import_module(obj.module.path), obj.name)
    obj.docstring.value = inspect.getdoc(function)
    obj.parameters = griffe.Parameters(
        *[
            griffe.Parameter(
                p.name,
                annotation=inspect.formatannotation(p.annotation),
                kind=griffe.ParameterKind(p.kind.description),
                default=None if p.default is p.empty else repr(p.default),
            )
            for p in inspect.signature(function).parameters.values()
        ]
    )


class Readable(griffe.Extension):
    """Rewrite each docstring before mkdocstrings parses it."""

    def on_object(self, *, obj, **kwargs):
        """Rewrite the docstring of one object."""
        if obj.is_function and any(
            str(d.value).startswith("accept_fields(") for d in obj.decorators
        ):
            take_arguments(obj)
        if obj.docstring:
            text = FIELDS.sub(listed, f"{obj.docstring.value}\n\n")
            text = DOCTEST.sub(lambda m: f"```pycon\n{m.group().rstrip()}\n```\n", text)
            text = NUMBERS.sub(r"\1\n", text)
            if obj.path.startswith(OF_EQUATIONS):
                text = INDENTED.sub(typeset, text)
            obj.docstring.value = linked(QUOTATION.sub(r"\1\\>", text).rstrip())
