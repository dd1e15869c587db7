"""The search of the site: the pages that Material for MkDocs' script shows for a question."""

import re
from collections.abc import Mapping
from typing import Any

from lunr import get_default_builder
from lunr.index import Index
from lunr.stop_word_filter import stop_word_filter


class Search:
    """The index that a browser makes of search/search_index.json, and its order of pages.

    A word of a question stands for all words that begin with it. Sections with more of the words
    come first, and so do those with a word in their title.

    Args:
      content: what the file has.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.separator = re.compile(content["config"]["separator"])
        builder = get_default_builder()
        # Nothing is stemmed, and a long section is no worse than a short one.
        builder.pipeline.reset()
        builder.pipeline.add(stop_word_filter)
        builder.b(0)
        builder.ref("location")
        for name, options in content["config"]["fields"].items():
            builder.field(name, options["boost"], lambda entry, name=name: self.words(entry, name))
        for entry in content["docs"]:
            builder.add(entry, {"boost": entry.get("boost", 1)})
        self.index: Index = builder.build()

    def words(self, entry: Mapping[str, Any], field: str) -> list[str]:
        """Return the words of a field of a section, without its tags of HTML."""
        text = " ".join(entry[field]) if field == "tags" and field in entry else entry.get(field)
        return [x for x in self.separator.split(re.sub(r"<[^>]*>", " ", text or "")) if x]

    def pages(self, question: str) -> list[str]:
        """Return the pages that the site shows for a question, the first one first."""
        words = [x for x in self.separator.split(question.lower()) if x]
        query = self.index.create_query()
        for word in words:
            query.term(f"{word}*", use_pipeline=False)
        scores = {}
        for found in self.index.query(query):
            seen = found["match_data"].metadata
            hits = {word: any(x.startswith(word) for x in seen) for word in words}
            counted = [hit for word, hit in hits.items() if hit or stop_word_filter(word)]
            share = ("#" not in found["ref"]) + sum(counted) / max(len(counted), 1)
            scores[found["ref"]] = found["score"] * (1 + share**2)
        ordered = sorted(scores, key=scores.__getitem__, reverse=True)
        return list(dict.fromkeys(ref.partition("#")[0] for ref in ordered))
