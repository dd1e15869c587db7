"""The names that libraries of models give to kinds of leaves."""

_BIAS_OR_SCALE = r"(.*/)?(([^/]*_)?bias(_[^/]*)?|b|scale|beta|gamma|offset)"
# Its own leaves alone: an adaptive norm has a projection, "norm1/linear/weight".
_IN_A_NORM = (
    r"(.*/)?([^/]*[_\d])?((layer|batch|group|rms|instance|pre|post)?_?norm(s|alization)?|ln|bn)"
    r"([_\d][^/]*)?(/~)?(/\d+)?(/(weight|w))?"
)


class _Named(str):
    """A pattern that `repr` shows by its name."""

    def __repr__(self) -> str:
        return "NORMS_AND_BIASES"


NORMS_AND_BIASES = _Named(f"(?i:{_BIAS_OR_SCALE}|{_IN_A_NORM})")
"""A pattern of the biases, and of the scales of normalizations, for `exclude=` of weight decay.

It goes by their names in flax, equinox, haiku, keras and torch. Names hold for stacked layers too,
whose leaves have one axis more, so that a rule by the number of axes fails.
"""
