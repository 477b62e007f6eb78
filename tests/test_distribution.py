"""Training over several devices and several worker processes, under tf.distribute.

What replicas must give is worked out by plain Keras in float32: on one device, on the part of a
batch that a replica gets; or under the same strategy, where that is what Keras makes of it.
"""

import functools
import pathlib
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import workers
from workers import BATCH, GOOD, STEPS, Loop, batch, network, run_workers

import tf_gradscale as gs

layers = keras.layers
INF, NAN = float("inf"), float("nan")
# float16's rounding, as in the tests of single gradients.
ROUNDING = 5e-3
GUIDE = pathlib.Path(__file__).parents[1] / "docs" / "distribution.md"


@pytest.fixture
def two(mirrored):
    """Two replicas: runs `function` on both, each with its own of the `values`."""

    def run(function, *values):
        distributed = mirrored.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )
        return mirrored.run(function, args=(distributed,))

    return run


def copies(variable):
    """What each replica of this process holds of a variable; all must hold the same."""
    value = variable.value
    held = [copy.numpy() for copy in getattr(value, "values", (value,))]
    for copy in held:
        np.testing.assert_array_equal(copy, held[0])
    return held[0]


def counts(optimizer):
    return int(copies(optimizer.applied_steps)), int(copies(optimizer.skipped_steps))


def error(found, wanted):
    """The largest relative L2 error; a gradient that is zero but for rounding must be so."""
    largest = max(np.linalg.norm(w) for w in wanted)
    errors = []
    for f, w in zip(found, wanted, strict=True):
        if np.linalg.norm(w) > 1e-6 * largest:
            errors.append(np.linalg.norm(f - w) / np.linalg.norm(w))
        else:
            assert np.linalg.norm(f) < 1e-2 * largest
    return max(errors)


def halves(arrays):
    """The parts of a batch that two replicas get."""
    return zip(*(np.split(array, 2) for array in arrays), strict=True)


def plain_gradients(arrays, middle=layers.LayerNormalization):
    """Those of plain Keras in float32 on one device."""
    loop = Loop(tf.distribute.get_strategy(), network("float32", middle))
    return loop(arrays)[1]


@functools.cache
def plain_weights(steps, make=network):
    """What training by plain Keras in float32 on one device comes to, after each of some steps."""
    model = make("float32")
    loop = Loop(tf.distribute.get_strategy(), model, keras.optimizers.SGD(0.1, momentum=0.5))
    history = [model.get_weights()]
    for step in steps:
        loop(batch(step))
        history.append(model.get_weights())
    return history


def check_moves(weights, steps, make=network):
    """How far weights have moved from the start is how far they move in float32."""
    first, *_, last = plain_weights(tuple(steps), make)
    moves = [[b - a for a, b in zip(first, end, strict=True)] for end in (weights, last)]
    assert error(*moves) < ROUNDING


# --- Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "middle",
    [
        layers.LayerNormalization,
        pytest.param(layers.BatchNormalization, marks=pytest.mark.slow),
    ],
)
def test_each_replica_has_scales_of_its_own_and_the_sum_is_float32s(mirrored, middle):
    """Batch normalisation sees the examples of its replica only, as under plain Keras."""
    with mirrored.scope():
        model = gs.convert(network("mixed_float16", middle))
    loop = Loop(mirrored, model)
    for step in range(3):
        own, reduced = loop(batch(step))
        wanted = [plain_gradients(half, middle) for half in halves(batch(step))]
        # One by one: next to the first half's gradients the other's are lost in the sum.
        assert [error(f, w) < ROUNDING for f, w in zip(own, wanted, strict=True)] == [True, True]
        for total, *parts in zip(reduced, *own, strict=True):
            np.testing.assert_array_equal(total, sum(parts))
        assert error(reduced, [sum(parts) for parts in zip(*wanted, strict=True)]) < ROUNDING
    first, second = mirrored.experimental_local_results(model.scales.variables[0].value)
    # log2 of the first scale that backpropagation meets.
    place = model.scales.positions("local")[0]
    assert second[place] - first[place] > 8


def test_each_replica_keeps_moving_statistics_of_its_own(mirrored, two):
    """As under plain Keras, whose moving statistics are not aggregated."""
    with mirrored.scope(), gs.policy_scope("mixed_float16"):
        norm = layers.BatchNormalization(momentum=0.75)
        model = gs.convert(keras.Sequential([keras.Input((1,)), norm]))
    # Means 2 and -1, variances 4 and 1.
    two(
        lambda x: model(x, training=True), tf.constant([[0.0], [4.0]]), tf.constant([[-2.0], [0.0]])
    )
    local = mirrored.experimental_local_results
    assert [float(v[0]) for v in local(norm.moving_mean.value)] == [0.25 * 2, 0.25 * -1]
    variances = [float(v[0]) for v in local(norm.moving_variance.value)]
    assert variances == [0.75 + 0.25 * 4, 0.75 + 0.25 * 1]


class Centred(layers.Layer):
    """Takes off the mean over the examples of all replicas, in TensorFlow's own operations."""

    def call(self, x):
        replica = tf.distribute.get_replica_context()
        mean = tf.reduce_mean(x, 0)
        return x - (mean if replica is None else replica.all_reduce("mean", mean))


@pytest.mark.parametrize(
    "middle",
    [functools.partial(layers.BatchNormalization, synchronized=True), Centred],
    ids=["synchronized", "own"],
)
@pytest.mark.parametrize(
    "placement", ["balanced", pytest.param("threshold", marks=pytest.mark.slow)]
)
def test_layers_that_add_up_over_replicas(mirrored, middle, placement):
    """In their gradients those of all replicas meet, which come with different scales."""
    with mirrored.scope():
        config = gs.GradScaleConfig(placement=placement, smallest="normal")
        model = gs.convert(network("mixed_float16", middle), config)
    loop = Loop(mirrored, model)
    # Their statistics are those of the whole batch, as on one device.
    wanted = plain_gradients(batch(0), middle)
    for _ in range(2):
        _, reduced = loop(batch(0))
        assert error(reduced, wanted) < ROUNDING


# --- Overflow on some replicas -------------------------------------------------------------------


class Written(keras.Model):
    """A model of a class of one's own."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, activation="tanh")
        self.norm = layers.LayerNormalization()
        self.last = layers.Dense(workers.CLASSES)
        self.softmax = layers.Activation("softmax", dtype="float32")

    def call(self, x):
        x = self.first(x)
        return self.softmax(self.last(keras.ops.concatenate([x, self.norm(x)], -1)))


def written(policy):
    with gs.policy_scope(policy):
        model = Written()
        if policy != "float32":
            workers.convert(model)
        # Called in the scope of the strategy: here its variables and scales are made.
        model(batch(0)[0])
    workers.set_weights(model)
    return model


def converted(policy):
    return workers.convert(network(policy))


@pytest.mark.parametrize(
    ("make", "plain"),
    [(converted, network), pytest.param(written, written, marks=pytest.mark.slow)],
)
def test_a_loop_in_which_gradients_overflow_on_some_replicas(mirrored, make, plain):
    with mirrored.scope():
        model = make("mixed_float16")
        inner = keras.optimizers.SGD(0.1, momentum=0.5)
        optimizer = gs.GradScaleOptimizer(inner, scales=model.scales)
    loop = Loop(mirrored, model, optimizer)
    for step, huge in enumerate(STEPS):
        state = [*model.weights, *(inner.variables if step else [])]
        before = [copies(variable) for variable in state]
        own, _ = loop(batch(step))
        finite = [all(np.all(np.isfinite(g)) for g in gradients) for gradients in own]
        assert finite == [huge not in ("first", "both"), huge not in ("second", "both")]
        if huge:
            # Momentum and the number of iterations as well.
            for variable, value in zip(state, before, strict=True):
                np.testing.assert_array_equal(copies(variable), value)
        good = sum(not other for other in STEPS[: step + 1])
        assert counts(optimizer) == (good, step + 1 - good)
    check_moves(list(map(copies, model.weights)), GOOD, plain)
    weights = list(map(copies, model.weights))
    assert re.match(STOPPED, workers.until_it_stops(loop))
    for variable, value in zip(model.weights, weights, strict=True):
        np.testing.assert_array_equal(copies(variable), value)


STOPPED = f"(?s){workers.MAX_SKIPS}: .*apply one step in {workers.MAX_SKIPS}"


def test_fit_in_which_gradients_overflow_on_the_second_replica(mirrored):
    with mirrored.scope():
        model = written("mixed_float16")
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "sparse_categorical_crossentropy")
    steps = range(5)
    assert [STEPS[step] for step in steps] == ["", "", "", "second", ""]
    x, y, weights = (np.concatenate(a) for a in zip(*map(batch, steps), strict=True))
    model.fit(x, y, sample_weight=weights, batch_size=BATCH, shuffle=False, verbose=0)
    assert counts(model.optimizer) == (4, 1)
    assert int(copies(model.optimizer.iterations)) == 4
    check_moves(list(map(copies, model.weights)), [0, 1, 2, 4], written)


@pytest.mark.slow
def test_fit_stops_and_names_what_is_wrong_on_the_second_replica(mirrored):
    with mirrored.scope():
        model = converted("mixed_float16")
        model.compile("sgd", "sparse_categorical_crossentropy")
    x, y, _ = (np.concatenate(a) for a in zip(*map(batch, range(8)), strict=True))
    # The last example of each batch is the second replica's.
    x[BATCH - 1 :: BATCH] = NAN
    with pytest.raises(FloatingPointError, match="first that is not finite is the inputs"):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert counts(model.optimizer) == (0, workers.MAX_SKIPS)


def test_a_sum_that_only_all_replicas_together_make_too_large(mirrored, two):
    with mirrored.scope():
        weight = keras.Variable([0.0, 2.0])
        optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(2.0**-100))
        optimizer.build([weight])

    def apply(*gradients):
        two(lambda g: optimizer.apply([g], [weight]), *map(tf.constant, gradients))
        return copies(weight).tolist(), counts(optimizer)

    large = 1.5 * 2.0**127
    assert apply([large, 0.0], [large, 0.0]) == ([0.0, 2.0], (0, 1))
    assert apply([-large, 0.0], [-large, 0.0]) == ([0.0, 2.0], (0, 2))
    assert apply([2.0**126, 0.0], [2.0**126, 0.0]) == ([-(2.0**27), 2.0], (1, 2))


def test_sparse_gradients_and_variables_without_one(mirrored, two):
    with mirrored.scope():
        table, frozen = keras.Variable(np.zeros((4, 2))), keras.Variable(3.0)
        optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([table, frozen])

    def apply(values):
        rows = tf.stack([values, values + 1])
        sparse = tf.IndexedSlices(rows, tf.constant([2, 0]), tf.constant([4, 2]))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist")
            optimizer.apply([sparse, None], [table, frozen])

    wanted = [[-5.0, -7.0], [0, 0], [-3.0, -5.0], [0, 0]]
    two(apply, tf.constant([1.0, 2.0]), tf.constant([2.0, 3.0]))
    np.testing.assert_array_equal(copies(table), wanted)
    two(apply, tf.constant([1.0, 2.0]), tf.constant([2.0, NAN]))
    np.testing.assert_array_equal(copies(table), wanted)
    assert copies(frozen) == 3.0
    assert counts(optimizer) == (1, 1)


def test_of_two_optimizers_in_a_step_one_alone_skips(mirrored, two):
    """A discriminator's gradient overflows on the second replica; the generator trains on."""
    with mirrored.scope():
        weights = [keras.Variable(0.0), keras.Variable(0.0)]
        optimizers = [gs.GradScaleOptimizer(keras.optimizers.SGD(1.0)) for _ in weights]
        for optimizer, weight in zip(optimizers, weights, strict=True):
            optimizer.build([weight])

    @tf.function
    def step(generator, discriminator):
        def apply(gradients):
            for optimizer, weight, g in zip(
                optimizers, weights, tf.unstack(gradients), strict=True
            ):
                optimizer.apply([g], [weight])

        two(apply, generator, discriminator)

    step(tf.constant([1.0, 1.0]), tf.constant([2.0, INF]))
    step(tf.constant([1.0, 1.0]), tf.constant([2.0, 4.0]))
    assert [float(copies(w)) for w in weights] == [-6.0, -5.0]
    assert [counts(optimizer) for optimizer in optimizers] == [(2, 0), (1, 1)]


# --- What optimizers do --------------------------------------------------------------------------

SGD = functools.partial(keras.optimizers.SGD, 0.5)
OPTIONS = {
    "clipnorm": functools.partial(SGD, clipnorm=1.0),
    "global_clipnorm": functools.partial(SGD, global_clipnorm=1.0),
    "clipvalue": functools.partial(SGD, clipvalue=1.0),
    "average": functools.partial(SGD, use_ema=True, ema_momentum=0.5),
    "overwritten": functools.partial(
        SGD, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": functools.partial(SGD, gradient_accumulation_steps=2),
    "decay": functools.partial(keras.optimizers.AdamW, 0.5, weight_decay=0.1),
    "schedule": functools.partial(
        keras.optimizers.Adam,
        keras.optimizers.schedules.PiecewiseConstantDecay([0, 2], [4.0, 2.0, 1.0]),
    ),
}


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS)
def test_options_of_optimizers_are_those_of_plain_keras(mirrored, two, make):
    """To the last bit, and in all of its state, with the skipped steps taken out."""
    script = [
        ([3.0, 4.0], [0.5, 0.0]),
        ([3.0, INF], [1.0, 1.0]),
        ([1.0, 0.0], [0.0, -7.0]),
        ([1.0, 0.0], [NAN, 0.0]),
        ([2.0, 2.0], [2.0, 5.0]),
        ([0.0, 9.0], [0.0, 1.0]),
    ]
    states = []
    for wrap in (lambda inner: inner, gs.GradScaleOptimizer):
        with mirrored.scope():
            weights = [keras.Variable([1.0, 2.0]), keras.Variable(3.0)]
            inner = make()
            optimizer = wrap(inner)
            optimizer.build(weights)

        def apply(gradient, optimizer=optimizer, weights=weights):
            optimizer.apply([gradient, gradient[0]], weights)

        for gradients in script:
            if optimizer is not inner or np.all(np.isfinite(gradients)):
                two(apply, *map(tf.constant, gradients))
        with mirrored.scope():
            optimizer.finalize_variable_values(weights)
        states.append([copies(variable) for variable in [*weights, *inner.variables]])
    for ours, plain in zip(states[1], states[0], strict=True):
        np.testing.assert_array_equal(ours, plain)
    assert counts(optimizer) == (4, 2)


def test_clipping_is_done_on_each_replica_before_the_sum(mirrored, two):
    """As plain Keras does, of whose optimizers the sum is a part."""
    with mirrored.scope():
        weight = keras.Variable([0.0, 0.0])
        optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1.0, clipnorm=1.0))
        optimizer.build([weight])
    two(lambda g: optimizer.apply([g], [weight]), tf.constant([3.0, 4.0]), tf.constant([0.0, 0.25]))
    # (3, 4) has norm 5, and (0, 1/4) is short enough.
    np.testing.assert_allclose(copies(weight), [-0.6, -0.8 - 0.25], rtol=1e-6)


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_an_optimizer_may_be_built_in_the_first_step(mirrored, two, run):
    with mirrored.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = gs.GradScaleOptimizer(keras.optimizers.Adam(0.5))
    step = run(lambda a, b: two(lambda g: optimizer.apply([g], [weight]), a, b))
    for bad in (0.0, INF, 0.0):
        step(tf.constant([1.0, 2.0]), tf.constant([3.0, bad]))
    # Adam's steps have the length of its learning rate, for gradients that do not change.
    np.testing.assert_allclose(copies(weight), [0.0, 1.0], atol=1e-5)
    assert counts(optimizer) == (2, 1)


def test_models_are_converted_for_the_strategy_they_were_made_under(mirrored):
    with mirrored.scope(), gs.policy_scope("mixed_float16"):
        models = [
            network("mixed_float16"),
            keras.Sequential([keras.Input((2,)), layers.Dense(1)]),
        ]
    for model in map(gs.convert, models):
        assert model.distribute_strategy is mirrored
        for variable in model.scales.variables:
            assert len(mirrored.experimental_local_results(variable.value)) == 2


@pytest.mark.parametrize("outside", ["made", "built", "converted"])
def test_what_is_made_outside_of_the_scope_is_refused(mirrored, two, outside):
    """Each replica would count its steps and update its moments once more, without a word."""
    with mirrored.scope(), gs.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model = model if outside == "converted" else gs.convert(model)
    scales = gs.layers.GradientScaled(layers.Dense(1))
    if outside == "converted":
        scales(tf.ones((1, 2)))
        model.scales = scales.scales
    made, built = (
        mirrored if outside not in names else tf.distribute.get_strategy()
        for names in (["made"], ["made", "built"])
    )
    with made.scope():
        optimizer = gs.GradScaleOptimizer(keras.optimizers.SGD(1.0), scales=model.scales)
    with built.scope():
        optimizer.build(model.trainable_variables)
    gradients = [tf.ones((2, 1)), tf.ones(1)]
    with pytest.raises(
        ValueError, match=r"within `strategy.scope\(\)`.*variable '.*', made outside"
    ):
        mirrored.run(lambda: optimizer.apply(gradients, model.trainable_variables))


# --- State ---------------------------------------------------------------------------------------


def made(mirrored):
    with mirrored.scope():
        model = gs.convert(network("mixed_float16"))
        inner = keras.optimizers.SGD(0.1, momentum=0.5)
        optimizer = gs.GradScaleOptimizer(inner, scales=model.scales)
        optimizer.build(model.trainable_variables)
    return model, optimizer, tf.train.Checkpoint(model=model, optimizer=optimizer)


def test_a_checkpoint_holds_the_first_replicas_scales_for_all(mirrored, tmp_path):
    model, optimizer, checkpoint = made(mirrored)
    loop = Loop(mirrored, model, optimizer)
    for step in range(4):
        loop(batch(step))
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    saved = model.scales.variables[0]
    first, second = mirrored.experimental_local_results(saved.value)
    assert np.any(first != second)

    model, optimizer, checkpoint = made(mirrored)
    checkpoint.read(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(copies(model.scales.variables[0]), first)
    assert counts(optimizer) == (3, 1)
    loop = Loop(mirrored, model, optimizer)
    for step in range(4, len(STEPS)):
        loop(batch(step))
    check_moves(list(map(copies, model.weights)), GOOD)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["two", "one"])
def test_training_goes_on_from_a_keras_file(mirrored, tmp_path, to):
    """With as many replicas, or on one device. Both replicas of a run see the same data."""
    x, y, _ = (np.concatenate(a) for a in zip(*map(batch, range(4)), strict=True))
    halves = np.arange(len(x)).reshape(-1, BATCH)[:, : BATCH // 2]
    order = np.concatenate([halves, halves], 1).ravel()
    x, y = x[order], y[order]
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    with mirrored.scope():
        model = gs.convert(network("mixed_float16"))
        model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    model.fit(x[: 2 * BATCH], y[: 2 * BATCH], **options)
    model.save(tmp_path / "model.keras")
    model.fit(x[2 * BATCH :], y[2 * BATCH :], **options)

    strategy = {"two": mirrored, "one": tf.distribute.get_strategy()}[to]
    with strategy.scope():
        again = keras.models.load_model(tmp_path / "model.keras")
    assert counts(again.optimizer) == (2, 0)
    again.fit(x[2 * BATCH :], y[2 * BATCH :], **options)
    assert counts(again.optimizer) == (4, 0)
    moved = 0.0
    for variable, wanted in zip(again.weights, map(copies, model.weights), strict=True):
        if to == "two":
            np.testing.assert_array_equal(copies(variable), wanted)
        np.testing.assert_allclose(copies(variable), wanted, atol=1e-3)
        moved = max(moved, np.abs(wanted).max())
    assert moved > 0.1


# --- Batches that do not reach all replicas; what plain Keras cannot do --------------------------


def trained(policy, strategy, optimizer, middle=layers.LayerNormalization, size=9, **options):
    """A model after an epoch of `fit` whose last batch is one example, and how far it has moved."""
    x, y, _ = (np.concatenate(a) for a in zip(*map(batch, range(2)), strict=True))
    with strategy.scope():
        model = network(policy, middle)
        model = model if policy == "float32" else gs.convert(model)
        model.compile(optimizer(), "sparse_categorical_crossentropy", **options)
    before = list(map(copies, model.trainable_variables))
    model.fit(x[:size], y[:size], batch_size=BATCH // 2, shuffle=False, verbose=0)
    after = map(copies, model.trainable_variables)
    return model, [b - a for a, b in zip(before, after, strict=True)]


def test_a_last_batch_without_examples_for_the_second_replica(mirrored):
    """What plain Keras makes of it: the first replica's one, at the weight of half a batch."""
    sgd = functools.partial(keras.optimizers.SGD, 0.5)
    _, wanted = trained("float32", mirrored, sgd)
    model, found = trained("mixed_float16", mirrored, sgd)
    assert error(found, wanted) < ROUNDING
    assert counts(model.optimizer) == (3, 0)


@pytest.mark.slow
def test_batch_normalization_of_no_examples_is_skipped(mirrored):
    """Its gradient is 0/0, which plain Keras adds to the weights of all replicas."""
    sgd = functools.partial(keras.optimizers.SGD, 0.5)
    plain, _ = trained("float32", mirrored, sgd, layers.BatchNormalization)
    assert not all(np.all(np.isfinite(w)) for w in plain.get_weights())
    model, found = trained("mixed_float16", mirrored, sgd, layers.BatchNormalization)
    assert counts(model.optimizer) == (2, 1)
    _, wanted = trained("float32", mirrored, sgd, layers.BatchNormalization, size=8)
    assert error(found, wanted) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ({"gradient_accumulation_steps": 2}, {}),
        ({"use_ema": True, "ema_overwrite_frequency": 2}, {}),
        ({}, {"steps_per_execution": 3}),
        ({}, {"jit_compile": True}),
    ],
    ids=["accumulation", "overwritten", "steps_per_execution", "jit_compile"],
)
def test_what_plain_keras_cannot_do_over_cpus(mirrored, optimizer, options):
    """Where it can, ours can."""
    make = functools.partial(keras.optimizers.SGD, 0.5, **optimizer)
    try:
        _, wanted = trained("float32", mirrored, make, **options)
    except Exception as failure:
        with pytest.raises(type(failure)):
            trained("mixed_float16", mirrored, make, **options)
    else:
        assert error(trained("mixed_float16", mirrored, make, **options)[1], wanted) < ROUNDING


# --- Several worker processes --------------------------------------------------------------------

PROGRAM = pathlib.Path(workers.__file__)


def seen_by(folder, mode):
    """What each of two workers wrote."""
    return [dict(np.load(folder / f"{mode}-{index}.npz")) for index in range(2)]


def arrays(seen, name, step):
    """The arrays of one name that a worker wrote after a step."""
    return [seen[key] for key in seen if key.startswith(f"{name}/{step}/")]


def check_alike(both, steps):
    """Workers have the same weights and counts after each step, and finite ones."""
    applied = sum(not huge for huge in STEPS[: steps[0]])
    skipped = steps[0] - applied
    for step in steps:
        applied, skipped = (applied, skipped + 1) if STEPS[step] else (applied + 1, skipped)
        for seen in both:
            assert seen[f"counts/{step}"].tolist() == [applied, skipped]
            for found, wanted in zip(
                arrays(seen, "weights", step), arrays(both[0], "weights", step), strict=True
            ):
                np.testing.assert_array_equal(found, wanted)
                assert np.all(np.isfinite(found))
                if STEPS[step] and step > steps[0]:
                    before = arrays(seen, "weights", step - 1)
                    assert any(np.array_equal(found, array) for array in before)


def test_two_workers(tmp_path):
    """Each with scales of its own; a step whose gradient overflows on one is skipped by both."""
    run_workers(PROGRAM, "train", tmp_path, folder=tmp_path)
    both = seen_by(tmp_path, "train")
    check_alike(both, range(len(STEPS)))
    # The first scale that backpropagation meets.
    assert both[1]["scales/0"][0] > 2**8 * both[0]["scales/0"][0]
    wanted = [plain_gradients(half) for half in halves(batch(0))]
    own = [arrays(seen, "own", 0) for seen in both]
    assert [error(f, w) < ROUNDING for f, w in zip(own, wanted, strict=True)] == [True, True]
    for seen in both:
        for total, *parts in zip(arrays(seen, "reduced", 0), *own, strict=True):
            np.testing.assert_array_equal(total, sum(parts))
    for seen, names in zip(both, (("first", "both"), ("second", "both")), strict=True):
        finite = [all(np.all(np.isfinite(g)) for g in arrays(seen, "own", s)) for s in range(10)]
        assert finite == [huge not in names for huge in STEPS]
    check_moves(arrays(both[0], "weights", len(STEPS) - 1), GOOD)
    # Neither waits for the other when all is lost.
    assert [bool(re.match(STOPPED, str(seen["stopped"]))) for seen in both] == [True, True]


@pytest.mark.slow
def test_workers_that_are_started_again(tmp_path):
    """From the first one's checkpoint: as if nothing had stopped them."""
    for mode in ("first", "last"):
        run_workers(PROGRAM, mode, tmp_path, folder=tmp_path)
    check_alike(seen_by(tmp_path, "first"), range(5))
    last = seen_by(tmp_path, "last")
    check_alike(last, range(5, len(STEPS)))
    check_moves(arrays(last[0], "weights", len(STEPS) - 1), GOOD)


@pytest.mark.slow
def test_fit_on_two_workers(tmp_path):
    run_workers(PROGRAM, "fit", tmp_path, folder=tmp_path)
    both = seen_by(tmp_path, "fit")
    if "error" in both[0]:
        pytest.skip(f"`fit` of plain Keras fails there: {str(both[0]['error']).splitlines()[0]}")
    model = network("float32")
    start = [weight.numpy() for weight in model.weights]
    for seen in both:
        moves = [
            [seen[f"{name}/{i}"] - weight for i, weight in enumerate(start)]
            for name in ("ours", "plain")
        ]
        assert error(*moves) < ROUNDING
        assert seen["counts"].tolist() == [3, 0]


WAITING = """
import json, os, threading
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == {broken}:
    raise SystemExit("out of order")
threading.Event().wait()
"""


def test_workers_do_not_wait_for_one_that_failed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WAITING.format(broken=1))
    with pytest.raises(
        AssertionError, match=r"(?s)worker 0, exit.*worker 1, exit status 1\nout of"
    ):
        run_workers(program, folder=tmp_path)


def test_workers_that_hang_are_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WAITING.format(broken=None))
    with pytest.raises(AssertionError, match="(?s)killed after 1 s.*worker 1"):
        run_workers(program, folder=tmp_path, timeout=1)


# --- The guide -----------------------------------------------------------------------------------

*BLOCKS, TRAIN = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
EPOCH = r"epoch (\d): loss (\d\.\d+), (\d+) steps skipped"


def test_the_guide_to_several_devices(mirrored, monkeypatch, capsys):
    """Its blocks, in order, as they are written."""
    # Of CPU devices it would take the first only.
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: mirrored)
    names = {"__name__": "guide"}
    for block in BLOCKS:
        exec(block, names)
    # The loop, on which all before it bears.
    printed = capsys.readouterr().out
    assert "\n0 steps skipped" in printed
    found = re.findall(EPOCH, printed)
    assert [(epoch, skipped) for epoch, _, skipped in found] == [("0", "0"), ("1", "0")]
    # That of guessing among three.
    assert float(found[1][1]) < np.log(3)
    assert counts(names["optimizer"]) == (2 * 1024 // names["BATCH"], 0)


@pytest.mark.slow
def test_the_guides_program_for_several_machines(tmp_path):
    """Two workers print the same; started once more, they go on where they stopped."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN.replace("EPOCHS = 3", "EPOCHS = 2"), "utf-8")
    first = [re.findall(EPOCH, out) for out in run_workers(program, folder=tmp_path)]
    program.write_text(TRAIN, "utf-8")
    last = [re.findall(EPOCH, out) for out in run_workers(program, folder=tmp_path)]
    assert first[0] == first[1] and last[0] == last[1]
    epochs = [*first[0], *last[0]]
    assert [(epoch, skipped) for epoch, _, skipped in epochs] == [
        ("1", "0"),
        ("2", "0"),
        ("3", "0"),
    ]
    losses = [float(loss) for _, loss, _ in epochs]
    assert losses[2] < losses[1] < losses[0] < 1.5 * np.log(3)
