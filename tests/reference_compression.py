"""Deep Gradient Compression in float64 NumPy, with a full sort for the selection."""

import numpy as np
from reference_exchange import rounded


def largest(v, k):
    """Return the mask of the k largest |v|, the first among equals."""
    mask = np.zeros(v.shape, bool)
    mask[np.argsort(-np.abs(v), kind="stable")[:k]] = True
    return mask


def clipped(g, c):
    """Return g·c/‖g‖ where ‖g‖ > c."""
    norm = np.sqrt(np.sum(g**2))
    return g * c / norm if c is not None and norm > c else g


def leaf(
    p,
    gradients,
    *,
    learning_rate,
    momentum,
    rampup_begin_step,
    rampup_step=1,
    sparsity=(0.999,),
    nesterov=False,
    local_grad_clip_norm=None,
    l2=0.0,
    compressed=True,
    momentum_masking=True,
    wire="float32",
):
    """Train one flat leaf on the gradients of N workers, (steps, N, n).

    Returns a dict with the series p, (steps, n); u, v and sent (mask) and accumulated (v before
    sending), (steps, N, n).
    """
    p = np.array(p, np.float64)
    workers, n = np.shape(gradients)[1:]
    u, v = np.zeros((workers, n)), np.zeros((workers, n))
    series = {name: [] for name in ("p", "u", "v", "sent", "accumulated")}
    for step, each in enumerate(np.asarray(gradients, np.float64)):
        sent, accumulated = np.zeros((workers, n), bool), v.copy()
        if step < rampup_begin_step or not compressed:
            mean = np.mean(each, axis=0) + l2 * p
            u = momentum * u + mean
            p = p - learning_rate * (mean + momentum * u[0] if nesterov else u[0])
        else:
            since = (step - rampup_begin_step) * len(sparsity) // rampup_step
            k = max(1, round(n * (1 - sparsity[min(since, len(sparsity) - 1)])))
            c = local_grad_clip_norm
            total = np.zeros(n)
            for w in range(workers):
                g = clipped(each[w], None if c is None else c / np.sqrt(workers)) + l2 * p
                if nesterov:
                    u[w] = momentum * (u[w] + g)
                    v[w] += u[w] + g
                else:
                    u[w] = momentum * u[w] + g
                    v[w] += u[w]
                accumulated[w] = v[w]
                sent[w] = largest(v[w], k)
                on_wire = rounded(v[w], wire)
                total += np.where(sent[w], on_wire, 0)
                v[w] -= np.where(sent[w], on_wire, 0)
                if momentum_masking:
                    u[w][sent[w]] = 0
            p = p - learning_rate * total / workers
        kept = (p, u, v, sent, accumulated)
        for name, value in zip(series, kept, strict=True):
            series[name].append(value.copy())
    return {name: np.array(values) for name, values in series.items()}
