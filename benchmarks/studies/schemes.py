"""The ways of exchanging updates that `exchange` and `exchange_link` compare, by name.

A row is an optimizer and a scheme. All rows of an optimizer have the rates that were chosen for the
dense one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import optfn
from optfn.compression.compressors import check_choice, choose_compressors
from optfn.distributed import exchange, power_sgd, quantize, top_k

WORKERS, MIN_SIZE = 4, 1000
NESTEROV = {"nesterov": True}
INNER: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda rate: optfn.adamw(rate, weight_decay=0.01),
    "momentum": lambda rate: optfn.momentum(rate, 0.9, nesterov=True),
    "lamb": lambda rate: optfn.lamb(rate),
}


class Row(NamedTuple):
    """A scheme and an optimizer.

    inner: the optimizer of the workers.
    compressor: of `exchange`, one or a mapping; None for float32 in an all-reduce.
    error_feedback: of `exchange`.
    local_steps: H; 1 exchanges each gradient.
    outer: what follows the exchange of drifts, by name and rate.
    dgc: options of `dgc_momentum`, in the place of `exchange`.
    """

    inner: str
    compressor: Any = None
    error_feedback: float = 1.0
    local_steps: int = 1
    outer: tuple[str, float] = ("sgd", 1.0)
    dgc: dict[str, Any] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the row is what others are compared with."""
        return self == Row(self.inner)

    def optimizers(self, rate: Any) -> dict[str, Any]:
        """Return the arguments tx, local_steps and outer of the training step."""
        inner = INNER[self.inner](rate)
        send = exchange(self.compressor, error_feedback=self.error_feedback, min_size=MIN_SIZE)
        if self.dgc is not None:
            return {
                "tx": optfn.dgc_momentum(
                    rate, 0.9, rampup_begin_step=0, min_size=MIN_SIZE, **NESTEROV, **self.dgc
                )
            }
        if self.local_steps == 1:
            return {"tx": inner if self.compressor is None else optfn.chain(send, inner)}
        name, outer_rate = self.outer
        step = (
            optfn.sgd(outer_rate) if name == "sgd" else optfn.momentum(outer_rate, 0.9, **NESTEROV)
        )
        outer = step if self.compressor is None else optfn.chain(send, step)
        return {"tx": inner, "local_steps": self.local_steps, "outer": outer}

    def packets(self, params: Any) -> tuple[float, float]:
        """Return the bytes of a worker's packets of an exchange: gathered, and all-reduced."""
        gathered = reduced = 0.0
        choice = {} if self.compressor is None else check_choice(self.compressor)
        for p, compressor in zip(
            jax.tree.leaves(params), choose_compressors(choice, params), strict=True
        ):
            if p.size < MIN_SIZE or (compressor is None and self.dgc is None):
                reduced += 4 * p.size
            elif self.dgc is not None:
                gathered += 8 * max(1, round(p.size * (1 - self.dgc["sparsity"][-1])))
            elif compressor.is_reduced:
                reduced += compressor.num_bytes(p.shape)
            else:
                gathered += compressor.num_bytes(p.shape)
        return gathered, reduced

    def packet(self, params: Any) -> float:
        """Return the bytes of a packet for each parameter and local step."""
        return sum(self.packets(params)) / _size(params) / self.local_steps

    def sent(self, params: Any) -> float:
        """Return the bytes that a worker sends in an exchange."""
        gathered, reduced = self.packets(params)
        return (WORKERS - 1) * gathered + 2 * (WORKERS - 1) / WORKERS * reduced

    def bytes_sent(self, params: Any) -> float:
        """Return the bytes that a worker sends for each parameter and local step."""
        return self.sent(params) / _size(params) / self.local_steps


def _size(params: Any) -> int:
    return sum(p.size for p in jax.tree.leaves(params))


EMBEDDING = "embed/.*"
# Of each matrix by itself; the embedding has three axes, and few of its rows are touched in a step.
MIXED = {
    "quantize(1), embedding dense": {EMBEDDING: None, ".*": quantize(1)},
    "quantize(1), embedding top_k": {EMBEDDING: top_k(0.05, values="int8"), ".*": quantize(1)},
    "quantize(4), embedding top_k": {EMBEDDING: top_k(0.05, values="int8"), ".*": quantize(4)},
    "power_sgd(1), embedding top_k": {EMBEDDING: top_k(0.05, values="int8"), ".*": power_sgd(1)},
    "power_sgd(4), embedding top_k": {EMBEDDING: top_k(0.05, values="int8"), ".*": power_sgd(4)},
}
GRADIENTS = (
    *(top_k(0.05), top_k(0.05, values="bfloat16"), top_k(0.05, values="int8")),
    *(top_k(0.05, values="int8", chunk=256), top_k(0.01, values="bfloat16")),
    *(top_k(0.02, values="int8"), top_k(0.1, values="int8"), top_k(0.2, values="int8")),
    *(quantize(8), quantize(4), quantize(2), quantize(2, chunk=32), quantize(1)),
    *(quantize(1, chunk=64), power_sgd(4)),
)


def _rows_of(inner: str) -> dict[str, Row]:
    rows = {"dense": Row(inner)}
    for compressor in GRADIENTS:
        rows[repr(compressor)] = Row(inner, compressor)
    for name, mapping in MIXED.items():
        rows[name] = Row(inner, mapping)
    for feedback in (0.95, 0.0):
        for compressor in (top_k(0.05, values="int8"), quantize(1), quantize(4)):
            rows[f"{compressor!r}, feedback {feedback:g}"] = Row(inner, compressor, feedback)
    for bits in (8, 4, 2):
        at_random = quantize(bits, stochastic=True)
        rows[f"{at_random!r}, feedback 0"] = Row(inner, at_random, 0.0)
    for count in (2, 5, 20):
        local = Row(inner, local_steps=count)
        rows[f"H={count}"] = local
        rows[f"H={count}, quantize(8)"] = local._replace(compressor=quantize(8))
        rows[f"H={count}, quantize(4)"] = local._replace(compressor=quantize(4))
        signs = local._replace(compressor=quantize(1))
        rows[f"H={count}, quantize(1)"] = signs
        rows[f"H={count}, quantize(1), outer 1.7"] = signs._replace(outer=("sgd", 1.7))
        rows[f"H={count}, quantize(1), embedding top_k, outer 1.7"] = local._replace(
            compressor=MIXED["quantize(1), embedding top_k"], outer=("sgd", 1.7)
        )
        rows[f"H={count}, top_k(0.05, values='int8')"] = local._replace(
            compressor=top_k(0.05, values="int8")
        )
        rows[f"H={count}, top_k(0.2, values='int8')"] = local._replace(
            compressor=top_k(0.2, values="int8")
        )
        rows[f"H={count}, DiLoCo"] = local._replace(outer=("momentum", 0.5))
        rows[f"H={count}, DiLoCo, quantize(1)"] = signs._replace(outer=("momentum", 0.5))
    rows["H=20, SparseLoCo"] = Row(
        inner, top_k(1 / 64, values="int2"), 0.95, local_steps=20, outer=("sgd", 0.4)
    )
    return {f"{inner}, {name}": row for name, row in rows.items()}


def _rows() -> dict[str, Row]:
    rows = {name: row for inner in INNER for name, row in _rows_of(inner).items()}
    for masking in (True, False):
        for sparsity in (0.99, 0.95):
            words = "masked" if masking else "unmasked"
            rows[f"DGC {words}, {1 - sparsity:.0%}"] = Row(
                "momentum", dgc={"sparsity": (sparsity,), "momentum_masking": masking}
            )
    return rows


ROWS = _rows()
