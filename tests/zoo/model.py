"""What a step is told of a model, and the batch of all models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import normal
from jax.ad_checkpoint import checkpoint_name

WIDTH, ROWS, LAYERS, LENGTH, EXAMPLES = 16, 32, 2, 4, 64
IDS = np.random.default_rng(0).integers(0, ROWS, (EXAMPLES, LENGTH))
# A model reads ids or x.
BATCH = {"ids": IDS, "x": normal(1, EXAMPLES, WIDTH), "y": normal(2, EXAMPLES, WIDTH)}


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model as a user hands it to `make_train_step`.

    loss: params, the model state if there is one, a batch, and a key if `rng` -> the loss, and the
      next model state if there is one.
    params: what is trained.
    model_state: what changes without being trained; None: nothing.
    rng: whether the loss takes a key.
    table: the path of the embedding, whose rows the model looks up.
    specs: the PartitionSpecs of params over the axes "data" and "model", as the library gives them.
    """

    loss: Callable[..., Any]
    params: Any
    model_state: Any = None
    rng: bool = False
    table: str | None = None
    specs: Any = None

    @property
    def differs_by_worker(self) -> bool:
        """Whether the mean over workers differs from the loss of the whole batch."""
        return self.rng or self.model_state is not None


def mean_square(y: jax.Array, batch: dict[str, Any]) -> jax.Array:
    """Return the loss of all models; of a sequence, the mean over positions counts."""
    y = checkpoint_name(y.mean(1) if y.ndim == 3 else y, "outputs")
    return jnp.mean((y - batch["y"]).astype(jnp.float32) ** 2)
