"""Every architecture converts without a warning, and its gradients stay at the rounding floor."""

import functools
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))
import architectures  # noqa: E402
import zoo  # noqa: E402

SMALL = architectures.ARCHITECTURES
# Seeds differ by some percent: one is compared by the larger bound, a median by the smaller.
ONE_SEED, BOUND = 1.3, 1.1
SEEDS = range(8)
MULTIPLIERS = (1e-9, 1e-4, 1.0, 1e4)
slow = pytest.mark.slow

bench = functools.cache(zoo.Bench)


def ratios(subject, seed):
    """Errors over the floor, for each multiplier; and the floor.

    The gradients of the smallest loss are lost without a scale, so that there is something to mend.
    """
    ours, plain, _ = subject.errors(seed, MULTIPLIERS, (*zoo.SWEEP, min(MULTIPLIERS)))
    floor = zoo.floor_of(plain[:-1])
    assert zoo.middle(plain[-1]) > 0.9
    return np.array([zoo.middle(row) for row in ours]) / floor, floor


def parameters(fast):
    """All small architectures in each mode that plain Keras runs them in: the others are slow."""
    return [
        pytest.param(name, mode, marks=() if (name, mode) in fast else slow)
        for name, architecture in SMALL.items()
        for mode in ("eager", "graph", "xla")[: 3 if architecture.jit_compile else 2]
    ]


FAST = [
    ("encoder", "graph"),
    ("encoder", "xla"),
    ("lstm", "eager"),
    ("lstm", "graph"),
    ("two_tower", "eager"),
    ("two_tower", "graph"),
    ("two_tower", "xla"),
    ("u_net", "graph"),
    ("gan", "xla"),
]


@pytest.mark.parametrize(("name", "mode"), parameters(FAST))
def test_the_very_first_pass(name, mode):
    found, floor = ratios(bench(SMALL[name], mode), 0)
    assert floor < 0.05
    assert np.all(found <= ONE_SEED), np.round(found, 3)


@slow
@pytest.mark.parametrize("name", SMALL)
def test_the_very_first_pass_over_seeds(name):
    subject = bench(SMALL[name], "xla" if SMALL[name].convolves else "graph")
    found = np.median([ratios(subject, seed)[0] for seed in SEEDS], axis=0)
    assert np.all(found <= BOUND), np.round(found, 3)


# --- keras.applications --------------------------------------------------------------------------

APPLICATIONS = [
    "VGG16",
    "ResNet50",
    "ResNet50V2",
    "InceptionV3",
    "InceptionResNetV2",
    "Xception",
    "MobileNet",
    "MobileNetV2",
    "MobileNetV3Small",
    "EfficientNetB0",
]
# Untrained, they make any rounding of float16 larger than the gradient itself.
NO_FLOOR = {"EfficientNetB0"}


@pytest.mark.parametrize(
    "name", [x if x == "MobileNetV3Small" else pytest.param(x, marks=slow) for x in APPLICATIONS]
)
def test_applications_are_scaled_throughout(name):
    """All products have scales of their own, and no layer is one operation with layers inside."""
    with gs.policy_scope("mixed_float16"):
        (model,) = architectures.application(name).build()
    products = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, (keras.layers.Dense, keras.layers.DepthwiseConv2D))
        or type(layer) in (keras.layers.Conv2D, keras.layers.SeparableConv2D)
    ]
    scaled = gs.convert(model)
    sites = {site.name for site in scaled.scales if site.kind == "gemm"}
    assert len(products) > 10
    assert {f"{layer.name}/input" for layer in products} <= sites


@slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications(name):
    """With frozen batch normalisations: those of a few images make any rounding grow."""
    subject = zoo.Bench(architectures.application(name, frozen=True), "xla", size=4)
    found, floor = ratios(subject, 0)
    # Elsewhere both are noise, and of one size.
    assert (floor < zoo.NOISE) == (name not in NO_FLOOR), floor
    assert np.all(found <= ONE_SEED), np.round(found, 3)


OTHERS = [name for name in architectures.applications() if name not in APPLICATIONS]


@slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_applications_are_converted_and_traced(name):
    """As those above, all layers opened; a gradient for every variable is traced."""
    with gs.policy_scope("mixed_float16"):
        architecture = architectures.application(name)
        models = tuple(gs.convert(model) for model in architecture.build())
    (model,) = models
    assert sum(site.kind == "gemm" for site in model.scales) > 10
    batch = [tf.constant(x) for x in architecture.batch(np.random.default_rng(0), 2)]

    @tf.function(autograph=False)
    def gradients(*batch):
        return architecture.gradients(models, batch, 1.0)[1]

    found = gradients.get_concrete_function(*batch).structured_outputs
    assert [g.shape for g in found] == [v.shape for v in model.trainable_variables]
    assert all(g.dtype == tf.float32 for g in found)
