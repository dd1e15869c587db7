"""recompute: the same gradients from fewer residuals, by names, segments and a budget."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import nightly, suite
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optfn
from optfn.loss.recomputation.budget import is_recomputation_kept
from optfn.loss.recomputation.costs import estimate_costs
from optfn.loss.recomputation.rotor import FunctionCosts, Rotor

WIDTH, BATCH, LAYERS = 16, 64, 8


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def layer(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def mean_square(p, x):
    return jnp.mean(x**2)


@functools.cache
def layers(hidden=(64,) * LAYERS):
    scale = WIDTH**-0.5
    return [
        {"up": scale * random([i, 0], WIDTH, h), "down": h**-0.5 * random([i, 1], h, WIDTH)}
        for i, h in enumerate(hidden)
    ]


X = random(7, BATCH, WIDTH)
HETEROGENEOUS = tuple(16 * (1 + (7 * i * i + 3 * i) % 11) for i in range(9))


def named(params, x):
    for i, p in enumerate(params):
        x = checkpoint_name(layer(p, x), f"layer_{i}")
    return mean_square(None, x)


def chain(n=LAYERS):
    return [layer] * n + [mean_square]


def plain(params, x):
    for p in params:
        x = layer(p, x)
    return mean_square(None, x)


def residual_bytes(f, *args):
    """Bytes of the residuals other than the arguments, at the level of the jaxpr."""
    closed = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(f, *a)[1]))(*args)
    kept = {a for a in closed.jaxpr.outvars if not hasattr(a, "val")} - {*closed.jaxpr.invars}
    return sum(a.aval.size * a.aval.dtype.itemsize for a in kept)


def compiled(f, *args):
    return jax.jit(jax.value_and_grad(f)).lower(*args).compile()


def temporaries(f, *args):
    return compiled(f, *args).memory_analysis().temp_size_in_bytes


def flops(f, *args):
    return compiled(f, *args).cost_analysis()["flops"]


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * abs(b).max())


ALL_NAMES = [f"layer_{i}" for i in range(LAYERS)]
FORMS = {
    "a name": lambda: optfn.recompute(named, checkpoints=("layer_5",)),
    "all names": lambda: optfn.recompute(named, checkpoints=ALL_NAMES),
    "sqrt": lambda: optfn.recompute(chain(), segments="sqrt"),
    "each": lambda: optfn.recompute(chain(), segments="each"),
    "three": lambda: optfn.recompute(chain(), segments=3),
    "budget": lambda: optfn.recompute(chain(), memory_budget=160_000),
}


@functools.cache
def of_plain():
    return jax.jit(jax.value_and_grad(plain))(layers(), X)


def params_of(form):
    return layers() if "name" in form else [*layers(), {}]


@pytest.mark.optimized
@pytest.mark.parametrize("form", suite(FORMS, "a name", "three"))
def test_gradients_are_bitwise_the_same(form):
    value, gradient = jax.jit(jax.value_and_grad(FORMS[form]()))(params_of(form), X)
    assert_same((value, gradient[:LAYERS]), of_plain())


@pytest.mark.optimized
@pytest.mark.parametrize("form", ["all names", "each"])
def test_a_cut_after_each_layer_saves_a_quarter(form):
    """In the jaxpr with every JAX; in memory where the compiler keeps recomputation."""
    f, params = FORMS[form](), params_of(form)
    assert residual_bytes(f, params, X) <= 0.25 * residual_bytes(plain, layers(), X)
    if is_recomputation_kept():
        assert temporaries(f, params, X) <= 0.25 * temporaries(plain, layers(), X)


@pytest.mark.optimized
def test_only_named_values_are_saved():
    """Three values: inputs of segments, the last one also a residual of the square in the loss."""
    f = optfn.recompute(named, checkpoints=("layer_1", "layer_3", "layer_7"))
    assert residual_bytes(f, layers(), X) == 3 * X.nbytes


@pytest.mark.optimized
def test_is_effective_agrees_with_the_compiler():
    fns, params = [layer] * 8, layers()[:8]
    kept = temporaries(plain, params, X)
    again = temporaries(
        lambda p, x: mean_square(None, optfn.recompute(fns, segments="each")(p, x)), params, X
    )
    assert is_recomputation_kept() == (again < 0.9 * kept)


@pytest.mark.optimized
def test_a_value_that_later_segments_read_is_saved():
    """A skip over the cut, an array that is an output, a constant, a jitted function inside."""
    table = np.arange(4.0, dtype=np.float32)

    @jax.jit
    def inner(x):
        return checkpoint_name(jnp.sin(x) * table, "inner")

    def f(x, scale, *, power, tag):
        assert tag == "static" and isinstance(power, int)
        skip = jnp.tanh(x["a"])
        y = inner(skip * scale)
        y = checkpoint_name({"u": y**power, "v": y + 1}, "pair")
        return {
            "y": y["u"] * skip + y["v"],
            "x": x["a"],
            "none": None,
            "number": jnp.asarray(x["n"]),
        }

    g = optfn.recompute(f, checkpoints=("inner", "pair"))
    x = {"a": random(0, 4), "n": 3}
    options = {"power": 2, "tag": "static"}
    assert_same(g(x, 2.0, **options), f(x, 2.0, **options))

    def loss(f, a, scale):
        out = f({"a": a, "n": 3}, scale, **options)
        return jnp.sum(out["y"]) + jnp.sum(out["x"])

    want = jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(x["a"], 2.0)
    assert_same(jax.jit(jax.grad(functools.partial(loss, g), (0, 1)))(x["a"], 2.0), want)


def test_closed_over_values_have_gradients():
    def loss(cut, w):
        def model(x):
            return jnp.sum(checkpoint_name(jnp.sin(x * w), "s") ** 2)

        return (optfn.recompute(model, checkpoints=("s",)) if cut else model)(X)

    assert_same(*(jax.jit(jax.grad(functools.partial(loss, c)))(2.0) for c in (True, False)))


@pytest.mark.parametrize("form", suite(FORMS, "all names"))
def test_under_vmap(form):
    params, xs = params_of(form), jnp.stack([X, 2 * X])
    got = jax.jit(jax.vmap(jax.grad(FORMS[form]()), (None, 0)))(params, xs)[:LAYERS]
    want = jax.jit(jax.vmap(jax.grad(plain), (None, 0)))(layers(), xs)
    assert_close(got, want)


@pytest.mark.parametrize("form, check", [("all names", True), nightly("budget", False)])
def test_inside_shard_map(form, check):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def sharded(f):
        def loss(params, x):
            return jax.lax.pmean(f(params, x), "data")

        return jax.shard_map(
            loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check
        )

    got = jax.jit(jax.grad(sharded(FORMS[form]())))(params_of(form), X)[:LAYERS]
    want = jax.jit(jax.grad(sharded(plain)))(layers(), X)
    assert_close(got, want)


def test_an_axis_inside_the_functions_of_a_budget():
    """A segmentation is found though the functions cannot be compiled where they stand."""

    def f(p, x):
        return jnp.sum(jax.lax.psum(x * p, "workers") ** 2)

    g = optfn.recompute([lambda p, x: jnp.sin(p * x), f], memory_budget=100_000)
    grads = [
        jax.jit(jax.vmap(jax.grad(h), (None, 0), axis_name="workers"))([2.0, 3.0], X)
        for h in (g, lambda p, x: f(p[1], jnp.sin(p[0] * x)))
    ]
    np.testing.assert_allclose(*grads, rtol=1e-5)


def every_segmentation(s, t):
    """All segmentations of the functions s to t that end with one whose residuals are saved."""
    if s > t:
        yield []
        return
    for rest in every_segmentation(s + 1, t):
        yield [s, *rest]
    for c in range(s + 1, t + 1):
        heads, tails = every_segmentation(s, c - 1), every_segmentation(c, t)
        for segment, rest in itertools.product(heads, tails):
            yield [segment, *rest]


def functions_in(segmentation):
    return [i for x in segmentation for i in (functions_in(x) if isinstance(x, list) else [x])]


def simulate(costs, segmentation, last, occupied):
    """Return (extra FLOPs, peak), step by step: forward, then backward in reverse."""
    flops, peak, now, undo = 0, 0, occupied, []
    cotangent = costs[last].output_bytes  # arrives from outside, or counts for the result
    for n, entry in enumerate(segmentation):
        if isinstance(entry, int):
            own = costs[entry]
            peak = max(peak, now + cotangent + own.forward_peak_with_residuals)
            undo.append((entry, now))
            now += own.residual_bytes + own.output_bytes
            continue
        arriving = 0
        for i in functions_in(entry):
            peak = max(peak, now + cotangent + arriving + costs[i].forward_peak)
            arriving = costs[i].output_bytes
        undo.append((entry, now))
        now += arriving
        assert n < len(segmentation) - 1
    for entry, before in reversed(undo):
        if isinstance(entry, int):
            own = costs[entry]
            residuals = own.residual_bytes + own.output_is_residual * own.output_bytes
            peak = max(peak, before + residuals + own.backward_peak)
        else:
            *first, final = functions_in(entry)
            flops += sum(costs[i].forward_flops for i in first) + costs[final].recompute_flops
            more, high = simulate(costs, entry, final, before)
            flops, peak = flops + more, max(peak, high)
    return flops, peak


def test_the_table_finds_the_best_of_all_segmentations():
    rng = np.random.default_rng(0)
    costs = []
    for _ in range(6):
        forward, output, residuals = (int(k) for k in rng.integers(1, 30, 3))
        peaks = [output + int(k) for k in rng.integers(0, 10, 2)]
        again = int(rng.integers(0, forward + 1))
        is_residual = bool(rng.integers(2))
        with_residuals = max(peaks[0], output + residuals)
        costs.append(
            FunctionCosts(
                forward, again, output, residuals, is_residual, peaks[0], with_residuals, peaks[1]
            )
        )
    found = [simulate(costs, segmentation, 5, 0) for segmentation in every_segmentation(0, 5)]
    rotor = Rotor(costs)
    slack = 8 * rotor.unit + 1  # sizes are rounded up
    least = min(peak for _, peak in found)
    assert least <= rotor.min_bytes <= least + slack
    curve = set()
    for budget in range(rotor.min_bytes, max(peak for _, peak in found) + 20, 7):
        flops, peak = simulate(costs, rotor.find_segmentation(budget), 5, 0)
        assert peak <= budget
        assert flops == rotor.extra_flops(rotor.find_segmentation(budget))
        assert min(f for f, p in found if p <= budget) <= flops
        assert flops <= min((f for f, p in found if p <= budget - slack), default=np.inf)
        curve.add(flops)
    assert len(curve) > 2 and 0 in curve


def heterogeneous_chain():
    return [layer] * len(HETEROGENEOUS) + [mean_square], [*layers(HETEROGENEOUS), {}]


@pytest.mark.optimized
def test_predicted_flops_are_those_of_the_program():
    """2·m·n·k for a product of matrices, over forward and what is run again."""
    costs, y = estimate_costs(layer, layers()[0], X)
    products = 2 * 2 * BATCH * WIDTH * 64
    assert products <= costs.forward_flops <= 1.2 * products
    assert products / 2 <= costs.recompute_flops <= 0.5 * products + 0.25 * products
    assert (y.shape, y.dtype, costs.output_bytes) == (X.shape, X.dtype, X.nbytes)
    # The product, its tanh, and the second product's operand.
    assert costs.residual_bytes == 3 * BATCH * 64 * 4


@pytest.mark.optimized
def test_flops_of_loops_and_convolutions():
    def f(w, x):
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")
        return jax.lax.scan(lambda c, _: (c @ jnp.ones((8, 8)), None), y, length=5)[0]

    costs, _ = estimate_costs(f, random(0, 3, 2, 3, 3), random(1, 1, 2, 8, 8))
    pairs = 3 * 8 - 2  # of a place of the kernel and an entry, along each of two dimensions
    assert costs.forward_flops == 2 * 3 * 2 * pairs**2 + 5 * 2 * (3 * 64) * 8


@pytest.mark.optimized
@pytest.mark.parametrize("share", [0.3, nightly(0.6)])
def test_a_budget_is_met(share):
    fns, params = heterogeneous_chain()
    if not is_recomputation_kept():
        # The compiler undoes recomputation: only the residuals can be counted.
        budget = int(share * residual_bytes(plain, params[:-1], X))
        f = optfn.recompute(fns, memory_budget=budget)
        assert residual_bytes(f, params, X) <= budget
        return
    none = temporaries(plain, params[:-1], X)
    f = optfn.recompute(fns, memory_budget=int(share * none))
    assert temporaries(f, params, X) <= share * none


@pytest.mark.optimized
@pytest.mark.parametrize("segments", ["sqrt", nightly("each")])
def test_a_budget_costs_no_more_than_segments_of_its_memory(segments):
    fns, params = heterogeneous_chain()
    cut = optfn.recompute(fns, segments=segments)
    if not is_recomputation_kept():
        budget = residual_bytes(plain, params[:-1], X)
        f = optfn.recompute(fns, memory_budget=budget)
        assert residual_bytes(cut, params, X) < residual_bytes(f, params, X) <= budget
        return
    f = optfn.recompute(fns, memory_budget=temporaries(cut, params, X))
    assert temporaries(f, params, X) <= temporaries(cut, params, X)
    assert flops(f, params, X) <= flops(cut, params, X)


@pytest.mark.optimized
def test_a_large_budget_changes_nothing():
    fns, params = heterogeneous_chain()
    f = optfn.recompute(fns, memory_budget=1 << 30)
    assert residual_bytes(f, params, X) == residual_bytes(plain, params[:-1], X)


def test_the_error_of_a_budget_below_the_minimum_says_the_minimum():
    fns, params = [layer] * 3 + [mean_square], [*layers(HETEROGENEOUS[:3]), {}]
    with pytest.raises(ValueError, match=r"memory_budget must be at least \d+ bytes") as error:
        jax.eval_shape(optfn.recompute(fns, memory_budget=1000), params, X)
    least = int(str(error.value).split("at least ")[1].split()[0])
    f = optfn.recompute(fns, memory_budget=least)
    if is_recomputation_kept():
        assert temporaries(f, params, X) <= least
    else:
        assert residual_bytes(f, params, X) <= least


def test_a_train_step_with_names():
    for names, remats in ((None, 0), (ALL_NAMES, LAYERS)):
        step = optfn.make_train_step(named, optfn.adam(1e-2), recompute=names)
        program = str(jax.make_jaxpr(step.compiled)(step.init(layers()), X))
        assert program.count("differentiated=True") == remats


@pytest.mark.parametrize(
    ("fn", "options", "error", "words"),
    [
        (3, {}, TypeError, r"fn must be a function .* or a list of functions.*; got 3"),
        (named, {}, ValueError, "one of checkpoints, segments and memory_budget; got none"),
        (named, {"checkpoints": ("a",), "segments": 2}, ValueError, "checkpoints and segments"),
        (named, {"checkpoints": "layer_0"}, TypeError, "sequence of names; got 'layer_0'"),
        (named, {"checkpoints": ()}, TypeError, "sequence of names"),
        ([layer], {"checkpoints": ("a",)}, TypeError, "fn must be a function"),
        (layer, {"segments": 2}, TypeError, "fn must be a list of functions"),
        ([], {"segments": 1}, TypeError, "fn must be a list of functions"),
        ([layer] * 3, {"segments": 4}, ValueError, "at most 3, the number of functions; got 4"),
        ([layer] * 3, {"segments": 0}, ValueError, "segments must be >= 1"),
        ([layer] * 3, {"segments": 1.5}, TypeError, "segments must be a Python integer"),
        ([layer] * 3, {"segments": "all"}, ValueError, "'sqrt', 'each' or a number; got 'all'"),
        ([layer] * 3, {"memory_budget": 0}, ValueError, "memory_budget must be >= 1"),
    ],
)
def test_wrong_arguments(fn, options, error, words):
    with pytest.raises(error, match=words):
        optfn.recompute(fn, **options)


def test_an_unknown_name_lists_those_that_there_are():
    def two(x):
        return checkpoint_name(checkpoint_name(x, "first") + 1, "second")

    with pytest.raises(ValueError, match=r"'third'.*names in it are 'first', 'second'"):
        optfn.recompute(two, checkpoints=("first", "third"))(X)
    with pytest.raises(ValueError, match="names in it are none"):
        optfn.recompute(lambda x: x, checkpoints=("first",))(X)


def test_params_must_be_one_per_function():
    with pytest.raises(ValueError, match="list of length 2, one per function; got 3"):
        optfn.recompute([layer] * 2, segments=1)(layers()[:3], X)
