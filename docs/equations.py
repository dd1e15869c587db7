"""Equations as docstrings have them, in Unicode, become MathML, which browsers draw by themselves.

A parser of the notation: `a·b/c` is a times the fraction b/c, √ takes what follows it, scripts are
Unicode's own, `x_i` or `x^(…)`. Words are text. What does not parse is left as it stands.
"""

import html
import re
import unicodedata
from collections.abc import Callable

TOKEN = re.compile(
    r"(?P<gap>  +)|(?P<space> )|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<code>`[^`]+`)"
    r"|(?P<name>(?:[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z]\w+)*|[Α-ω∑∏∞])[̂̄]?)"
    r"|(?P<script>[ⁿᵗᵀⁱᵏ²³₁₂ᵢ]|_\w|\^\()"
    r"|(?P<relation>−=|\+=|\*=|[=<>≤≥])|(?P<operator>[−+±·…,;:])|(?P<other>[()|‖√/'])"
)
TEXT = {
    "accumulator", "after", "and", "as", "at", "both", "else", "five", "for", "from", "if", "in",
    "infinite", "is", "mean", "mod", "near", "of", "on", "or", "otherwise", "over", "steps", "that",
    "the", "then", "times", "until", "where", "with", "workers",
}  # fmt: skip
FUNCTIONS = {"max", "min", "sign", "decode", "encode", "orthogonalized", "scale"}
SPACES = {"space": "0.25em", "gap": "1em", ";": "2em", "·": "0.2em"}
CLOSING = {"(": ")", "|": "|", "‖": "‖"}


def row(*parts: str) -> str:
    """Return parts side by side."""
    return f"<mrow>{''.join(parts)}</mrow>"


def tag(kind: str, text: str) -> str:
    """Return one symbol."""
    return f"<{kind}>{html.escape(text).replace('|', '&#124;')}</{kind}>"


class Parser:
    """The tokens of a line, and where we are in them."""

    def __init__(self, line: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(line):
            match = TOKEN.match(line, position)
            if match is None:
                raise ValueError(f"no notation of an equation: {line[position:]!r}")
            self.tokens.append((str(match.lastgroup), match.group()))
            position = match.end()
        self.at = 0

    def next(self) -> tuple[str, str]:
        """Return the token that comes, without taking it."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "")

    def take(self) -> str:
        """Return a token and go past it."""
        self.at += 1
        return self.tokens[self.at - 1][1]

    def sequence(self, closing: str = "") -> str:
        """Return all up to a closing sign, or to the end."""
        parts = []
        while self.next()[0] != "end" and self.next()[1] != closing:
            kind, text = self.next()
            if wide := SPACES.get(kind) or SPACES.get(text):
                self.take()
                parts.append(f'<mspace width="{wide}"/>')
            elif kind in ("relation", "operator"):
                parts.append(tag("mo", self.take()))
            elif kind == "code" or text in TEXT:
                parts.append(tag("mtext", self.take().strip("`")))
            else:
                parts.append(self.fraction())
        if closing and self.next()[1] != closing:
            raise ValueError(f"no {closing!r}")
        return row(*parts)

    def fraction(self) -> str:
        """Return a factor, over another where a slash follows."""
        found, bare = self.factor()
        while self.next()[1] == "/":
            self.take()
            _, below = self.factor()
            found = bare = f"<mfrac>{bare}{below}</mfrac>"
        return found

    def factor(self) -> tuple[str, str]:
        """Return an atom with its scripts, and the same without parentheses around it."""
        found, bare = self.atom()
        while self.next()[0] == "script" or self.next()[1] == "'":
            found = bare = self.scripted(found)
        return found, bare

    def scripted(self, base: str) -> str:
        """Return a base with the script that comes."""
        script = self.take()
        if script == "'":
            return f"<msup>{base}<mo>′</mo></msup>"
        if script == "^(":
            inside = self.sequence(")")
            self.take()
            return f"<msup>{base}{inside}</msup>"
        plain = unicodedata.normalize("NFKC", script).lstrip("_")
        kind = "mn" if plain.isdigit() else "mi"
        if script.startswith("_") or script in "₁₂ᵢ":
            return f"<msub>{base}{tag(kind, plain)}</msub>"
        if base.startswith("<msub>"):
            both = base.removeprefix("<msub>").removesuffix("</msub>")
            return f"<msubsup>{both}{tag(kind, plain)}</msubsup>"
        return f"<msup>{base}{tag(kind, plain)}</msup>"

    def atom(self) -> tuple[str, str]:
        """Return a name, a number, a root, or what stands in parentheses."""
        kind, text = self.next()
        self.take()
        if text == "√":
            inside = f"<msqrt>{self.factor()[1]}</msqrt>"
            return inside, inside
        if text in CLOSING:
            inside = self.sequence(CLOSING[text])
            self.take()
            found = row(tag("mo", text), inside, tag("mo", CLOSING[text]))
            return found, inside if text == "(" else found
        if kind == "number":
            return (tag("mn", text),) * 2
        if kind != "name":
            raise ValueError(f"{text!r} where a factor should be")
        return (self.name(text),) * 2

    def name(self, text: str) -> str:
        """Return a variable, a sum, or a function with its arguments."""
        if text in "∑∏∞":
            return tag("mo", text)
        accent = text[-1] if unicodedata.combining(text[-1]) else ""
        found = tag("mi", text.rstrip(accent) if accent else text)
        if accent:
            found = f'<mover accent="true">{found}<mo>{"^" if accent == "̂" else "¯"}</mo></mover>'
        if text in FUNCTIONS and self.next()[1] == "(":
            arguments, _ = self.atom()
            return row(found, arguments)
        return found


def _or_text(f: Callable[[str], str], text: str) -> str | None:
    try:
        return f(text)
    except ValueError:
        return None


def inline(text: str) -> str | None:
    """Return equations that `;` separates, one below the other; None where one is none."""
    lines = [_or_text(lambda line: Parser(line).sequence(), x.strip()) for x in text.split(";")]
    if None in lines:
        return None
    source = html.escape(text).replace("|", "&#124;")
    return "<br>".join(
        f'<math displaystyle="true" title="{source}">{line}</math>' for line in lines
    )


def block(text: str) -> str | None:
    """Return the lines of an indented block as equations; None where they are something else."""
    lines = text.strip("\n").splitlines()
    rows = [_or_text(lambda line: Parser(line).sequence(), x.strip()) for x in lines]
    if None in rows:
        return None
    cells = "".join(f"<mtr><mtd>{x}</mtd></mtr>" for x in rows)
    source = html.escape("\n".join(x.strip() for x in lines))
    return (
        f'<div class="equations"><math display="block"><semantics>'
        f'<mtable columnalign="left" displaystyle="true">{cells}</mtable>'
        f'<annotation encoding="text/plain">{source}</annotation></semantics></math></div>'
    )
