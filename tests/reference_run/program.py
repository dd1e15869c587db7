"""A program: what a user asks for, as plain data that a JSON file can hold."""

import dataclasses
from typing import Any

import numpy as np

FEATURES, WIDTH = 4, 4
SHAPES = {"w": (FEATURES, WIDTH), "b": (WIDTH,), "s": (), "empty": (0, 3), "count": ()}
TABLES = {"t": (8, FEATURES), "u": (12, FEATURES)}  # each example looks up two rows of each
SHAPES |= TABLES | {"large": (FEATURES, 512)}  # of which packets have few entries
SHAPES |= {"z": (WIDTH,)}  # of one shape with "b", which is no neighbour
DAY = 10**6  # steps between checkpoints, if the time between them is a day
STACKED = ("w", "b")  # the leaves of a stage of a pipeline


@dataclasses.dataclass(frozen=True)
class Program:
    """A training run, from its params to how it goes on after an end.

    way: how it is divided, a name in `source.WAYS`.
    dtype: of params and batches; wide: the leaves that are float32 all the same.
    leaves: names in `SHAPES`; "count" is an integer, and those in `TABLES` are looked up.
    loss: "plain", or "mean" for an `optfn.Mean` over the weights of the examples.
    aux, model_state, key, pass_step: whether the loss gives or takes these; model_state may be
      "key" for one with a key that each call splits, or "weights" for means by weight.
    rule: the name of an optimizer, and its arguments.
    rate: the learning rate; schedule: what becomes of it, a name in `links.SCHEDULES`.
    stages: how many stages of a pipeline the model has, or stacked layers, each with "w" and "b"; 0
      for a single layer.
    stacked: the leaves of layers whose attributes say that they are stacked, of which the params
      say nothing.
    local_steps: how many steps each worker takes alone in a call, a round.
    outer: the links around the outer optimizer of rounds, momentum; None for the mean of params.
    compressor: of an exchange of gradients before the rule, or of pseudo-gradients before the
      outer optimizer, a name in `links.COMPRESSORS`, and perhaps further arguments of the exchange,
      as `links.BY_PARTS`.
    clip, regularization: a kind and its numbers.
    attrs: by leaf, what a ParamAttr says.
    partition: leaves with a rule of their own, the links around that, and perhaps "frozen", for a
      rule that sets their updates to 0.
    links: the wrappers, and the members of the chain, from the inside outwards: each a name in
      `links.LINKS`, its arguments, and perhaps a dict of further ones.
    rows: how many rows of x an example has; the model sees their mean.
    batches: for each its seed, the weights of its examples, and what is "bad" in it.
    loader: "list", "generator", "reader" (an iterator that saves its position), or ["shuffled",
      size, seed, drop_last].
    epochs: passes over the batches, or None.
    evaluate: every, patience, keep_best, mode, average, the values that it gives, if not those of
      the params, or "held", if it is the loss of batches that are held back, and perhaps "named":
      whether it gives a dict, of which the run watches "score".
    parts: the calls of the loop. Each has `steps`, `kill` (the call before which it dies),
      `callback` or `signal` (the call after which it ends), and perhaps another `way`, `rate`,
      `drop_last`, `accumulate` (the calls of each accumulation) or `every` (of its evaluations), or
      `carry`: how the state of the call before
      reaches it, if not by checkpoints of the run, a name in `source.CARRIES`; `set_rate`: the rate
      that is then set in it; `attrs`: the attributes of the last call, in which other leaves are
      trained.
    loop: "fit"; "own" for a loop that the user writes around the step; "scan" for one that is a
      program; "vmap" for a program of two runs, of which this is the second.
    spelling: other ways to write the same, or what is asked of the state at the end, names in
      `source.SPELLINGS`, and "reversed" for layers of which the last one comes first.
    saves: whether the run has checkpoints; save_every, keep, prefetch: of the loop.
    save_frozen: whether checkpoints have the frozen leaves.
    stops: whether the first loss that is not finite ends the run.
    reports: whether the run writes a page, and counts tokens for its log, which changes no number.
    log: whether the run writes a file of JSON lines.
    """

    way: str = "one"
    dtype: str = "float64"
    wide: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ("w", "b", "s")
    loss: str = "plain"
    aux: bool = False
    model_state: bool | str = False
    key: bool = False
    pass_step: bool = False
    rule: Any = ("sgd", {})
    rate: float = 0.05
    schedule: str | None = None
    stages: int = 0
    stacked: tuple[str, ...] = ()
    local_steps: int = 1
    outer: Any = None
    compressor: str | None = None
    clip: Any = None
    regularization: Any = None
    attrs: Any = dataclasses.field(default_factory=dict)
    partition: Any = None
    links: Any = ()
    rows: int = 1
    batches: Any = ()
    loader: Any = "list"
    epochs: int | None = None
    evaluate: Any = None
    parts: Any = ({},)
    loop: str = "fit"
    spelling: Any = ()
    saves: bool = True
    save_every: int = 100
    keep: int = 2
    prefetch: int = 1
    save_frozen: bool = True
    stops: bool = False
    reports: bool = False
    log: bool = False

    def names(self, *links: str) -> list[Any]:
        """Return the links of these names, those of a part of the params among them."""
        inner = self.partition["links"] if self.partition else []
        return [link for link in (*inner, *self.links, *(self.outer or ())) if link[0] in links]

    @property
    def average_name(self) -> str | None:
        """The name by which `averaged_params` knows the outermost of several averages."""
        names = {"ema": "exponential_moving_average", "model_average": "model_average"}
        found = [names[x[0]] for x in self.names(*names)]
        return found[-1] if len(found) > 1 else None

    @property
    def watches_evaluations(self) -> bool:
        """Whether a plateau watches evaluations."""
        return any("evaluation" in link for link in self.names("plateau"))

    def path_of(self, leaf: str) -> str:
        """Return the path of a leaf."""
        if self.stages and leaf in STACKED:
            return f"stages/{leaf}"
        return f"shared/{leaf}" if self.is_pipeline else leaf

    @property
    def is_pipeline(self) -> bool:
        """Whether the stages are those of a pipeline."""
        return "pipeline" in self.way

    @property
    def is_record(self) -> bool:
        """Whether params are a NamedTuple."""
        return "record" in self.spelling and not self.is_pipeline

    @property
    def fields(self) -> list[str]:
        """The names of the entries of params, in the order of the leaves."""
        rest = [k for k in self.leaves if not (self.stages and k in STACKED)]
        return ["stages", *rest] if self.stages else rest

    @property
    def estimates_statistics(self) -> bool:
        """Whether the statistics of the model are estimated at the end."""
        is_known = self.model_state in (True, "key") and not self.pass_step and self.rows == 1
        return is_known and "statistics" in self.spelling

    @property
    def judged(self) -> str:
        """The name of the evaluation in history and log."""
        is_named = bool(self.evaluate and self.evaluate.get("named"))
        return "evaluation/score" if is_named else "evaluation"

    @property
    def exchanges(self) -> bool:
        """Whether the optimizer takes each worker's own gradients."""
        return (bool(self.compressor) and self.local_steps == 1) or self.rule[0] == "dgc_momentum"

    def dtype_of(self, leaf: str) -> str:
        """Return the dtype of a leaf."""
        return "int32" if leaf == "count" else "float32" if leaf in self.wide else self.dtype

    def of_part(self, part: dict[str, Any]) -> "Program":
        """Return the program with the rate, the attributes and the accumulations of a call of the
        loop."""
        changed = {k: part[k] for k in ("rate", "attrs") if k in part}
        if "accumulate" in part:
            every = {"accumulate": [part["accumulate"]]}
            changed["links"] = [[x[0], *every.get(x[0], x[1:])] for x in self.links]
        return dataclasses.replace(self, **changed)

    @property
    def is_rounded(self) -> bool:
        """Whether params or moments are in 8 or 16 bits."""
        return self.dtype == "bfloat16" or "moment_dtype" in self.rule[1]

    @property
    def batch_dtype(self) -> str:
        """The dtype of the batches, so that bfloat16 params meet float32 inputs."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def has_tables(self) -> bool:
        """Whether the model looks up rows of tables."""
        return bool({*TABLES} & {*self.leaves})

    @property
    def is_weighted(self) -> bool:
        """Whether the loss counts examples by their weights."""
        return self.loss == "mean"

    @property
    def num_steps(self) -> int:
        """How many steps a run makes that nothing ends: calls, or local steps."""
        return len(batches_of(self, 0)) * (self.epochs or 1) * self.local_steps


def to_json(p: Program) -> dict[str, Any]:
    """Return what of a program is not as usual, for a JSON file."""
    plain = dataclasses.asdict(Program())
    return {k: v for k, v in dataclasses.asdict(p).items() if v != plain[k]}


def first_params(p: Program) -> dict[str, np.ndarray]:
    """Return the params that a program begins with."""
    rng = np.random.default_rng(0)
    shapes = {k: (p.stages, *x) if p.stages and k in STACKED else x for k, x in SHAPES.items()}
    values = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    values |= {"s": np.array(0.8), "count": np.array(2, np.int32), "large": large_leaf()}
    return {k: x.astype(p.dtype_of(k)) for k, x in values.items() if k in p.leaves}


def large_leaf() -> np.ndarray:
    """Return the value that the large leaf begins with."""
    return np.sin(np.arange(FEATURES * 512.0)).reshape(FEATURES, 512) / 4


def make_batch(seed, weights, bad=None, dtype="float64", rows=1, ids=False):
    """A batch of examples with weights, and with ids of rows. The first that counts may be bad."""
    rng = np.random.default_rng(seed)
    w = np.array(weights)
    x, y = rng.normal(size=(rows * len(w), 4)), rng.normal(size=len(w))
    if bad == "nan":
        x[rows * np.argmax(w > 0)] = np.nan
    if bad == "huge":
        y[np.argmax(w > 0)] = 1e20
    batch = x.astype(dtype), y.astype(dtype), w.astype(dtype)
    return (*batch, rng.integers(0, 8, (len(w), 4)).astype(np.int32)) if ids else batch


def batches_of(p: Program, epoch: int) -> list[tuple[np.ndarray, ...]]:
    """Return the batches of an epoch, from 0, in their order."""
    more = p.batch_dtype, p.rows, p.has_tables
    made = [make_batch(b["seed"], b["weights"], b.get("bad"), *more) for b in p.batches]
    if not isinstance(p.loader, list | tuple):
        return made
    _, size, seed, drop_last = p.loader
    arrays = [np.concatenate(column) for column in zip(*made, strict=True)]
    count = len(arrays[0])
    order = np.random.default_rng([seed, epoch]).permutation(count)
    ends = range(0, count - size + 1 if drop_last else count, size)
    return [tuple(x[order[i : i + size]] for x in arrays) for i in ends]
