"""Optimizers with attributes of parameters, or with masters."""

from collections.abc import Sequence

import optax

from optfn import core
from optfn.wrappers.attributes import apply_attributes
from optfn.wrappers.master_weights import choose_masters


def apply_options(
    name: str,
    links: Sequence[core.Unchecked],
    clip: optax.GradientTransformationExtraArgs | None,
    penalty: optax.GradientTransformationExtraArgs | None,
    param_attrs: object,
    multi_precision: object,
) -> optax.GradientTransformation:
    """Return the optimizer of these links behind clip and penalty, with masters unless
    `multi_precision` is False, and with attributes if any are given.

    Masters are inside: attributes freeze a parameter together with its master.
    """
    masters = choose_masters(multi_precision)

    def build(
        before: Sequence[optax.GradientTransformation],
    ) -> optax.GradientTransformationExtraArgs:
        return masters(
            core.with_boundary(
                name, core.chain_unchecked([*map(core.strip_boundary, before), *links])
            )
        )

    if param_attrs is None:
        return build([tx for tx in (clip, penalty) if tx is not None])
    decays = any(link.decays for link in links)
    return apply_attributes(name, param_attrs, clip, penalty, build, decays)
