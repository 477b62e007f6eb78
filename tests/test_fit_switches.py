"""Every switch of `compile`, `fit` and what goes with them: a converted model is trained alike."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
RNG = np.random.default_rng(0)
# The last batch of six is smaller.
X = RNG.standard_normal((22, 6)).astype("float32")
Y = np.arange(22) % 3
WEIGHTS = RNG.uniform(0.2, 2.0, 22).astype("float32")
CLASSES = {0: 1.0, 1: 2.0, 2: 0.5}
LOSS = "sparse_categorical_crossentropy"
# To float32's rounding, and to float16's.
ROUNDING = dict(rtol=2e-6, atol=2e-7)
CLOSE = dict(rtol=0.02, atol=3e-3)


class Handwritten(keras.Model):
    """A model whose `call` is written by hand."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(8, activation="tanh"), layers.Dense(3)

    def call(self, x):
        return keras.ops.softmax(self.last(self.first(x)))


def functional():
    inputs = keras.Input((6,))
    x = layers.Dense(8, use_bias=False, name="first")(inputs)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(3, activation="softmax", name="last")(x))


def three_models(build=functional):
    """Plain Keras in float32; converted, in float32 and in mixed_float16; with equal weights."""
    models = []
    for policy in ("float32", "float32", "mixed_float16"):
        with gs.policy_scope(policy):
            models.append(build())
    models[0](X[:2])
    for i in (1, 2):
        models[i](X[:2])
        models[i].set_weights(models[0].get_weights())
        models[i] = gs.convert(models[i])
    return models


def compiled(models, **options):
    for model in models:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        model.compile(optimizer, LOSS, metrics=["accuracy"], weighted_metrics=[], **options)
    return models


def weights(model):
    return model.get_weights()


def assert_equal(models, results=()):
    """Weights, state and what was reported are those of plain Keras."""
    plain, float32, float16 = models
    optimizer = float32.optimizer.inner_optimizer
    for a, b in zip(optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), **ROUNDING)
    for model, tolerance in ((float32, ROUNDING), (float16, CLOSE)):
        for a, b in zip(weights(model), weights(plain), strict=True):
            np.testing.assert_allclose(a, b, **tolerance)
    if results:
        wanted = keras.tree.flatten(results[0])
        for found, tolerance in ((results[1], ROUNDING), (results[2], CLOSE)):
            for a, b in zip(keras.tree.flatten(found), wanted, strict=True):
                np.testing.assert_allclose(a, b, **tolerance)
    assert any(site.scale != 1 for site in float16.scales)
    assert all(site.scale == 1 for site in float32.scales)


def fit(model, epochs=2, **options):
    given = {"x": X, "y": Y, "batch_size": 6, "shuffle": False, **options}
    return model.fit(epochs=epochs, verbose=0, **given).history


# --- compile -------------------------------------------------------------------------------------

OPTIONS = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "steps_per_execution": {"steps_per_execution": 3},
    "steps_per_execution, xla": {"steps_per_execution": 2, "jit_compile": True},
    "steps_per_execution, more than an epoch": {"steps_per_execution": 9},
    "not scaled by Keras": {"auto_scale_loss": False},
}
SLOW = {
    "xla",
    "steps_per_execution, xla",
    "steps_per_execution, more than an epoch",
    "not scaled by Keras",
    "validation_split",
    "steps_per_epoch",
}


def some_slow(names):
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


@pytest.mark.parametrize("name", some_slow(OPTIONS))
def test_ways_to_run(name):
    models = compiled(three_models(), **OPTIONS[name])
    results = [fit(model) for model in models]
    assert_equal(models, results)
    assert int(models[2].optimizer.applied_steps) == int(models[2].optimizer.iterations) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_ways_to_run_a_model_with_a_call_of_its_own(name):
    models = compiled(three_models(Handwritten), **OPTIONS[name])
    results = [fit(model) for model in models]
    assert_equal(models, results)


def test_jit_compile_is_resolved_as_keras_does():
    models = three_models()
    for choice in ("auto", True, False):
        assert len({m.jit_compile for m in compiled(models, jit_compile=choice)}) == 1
    with pytest.warns(UserWarning, match="`jit_compile` cannot also be True"):
        compiled(models[1:2], jit_compile=True, run_eagerly=True)


def test_switched_to_eager_after_compile():
    models = compiled(three_models())
    results = []
    for model in models:
        model.run_eagerly = True
        results.append(fit(model, 1))
    assert_equal(models, results)


# --- Data ----------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return X[6 * i : 6 * i + 6], Y[6 * i : 6 * i + 6], WEIGHTS[6 * i : 6 * i + 6]


def generated():
    while True:
        for i in range(4):
            yield Batches()[i]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y, WEIGHTS)).batch(6)


def fit_batches(x, **options):
    return lambda model: model.fit(x(), epochs=2, verbose=0, shuffle=False, **options).history


DATA = {
    "arrays": lambda model: fit(model, sample_weight=WEIGHTS),
    "class_weight": lambda model: fit(model, class_weight=CLASSES),
    "tf.data": fit_batches(dataset),
    "PyDataset": fit_batches(Batches),
    "generator": fit_batches(generated, steps_per_epoch=4),
    "validation_split": lambda model: fit(model, validation_split=0.25),
    "steps_per_epoch": fit_batches(lambda: dataset().repeat(), steps_per_epoch=3),
}


@pytest.mark.parametrize("name", some_slow(DATA))
def test_data(name):
    models = compiled(three_models(), run_eagerly=True)
    assert_equal(models, [DATA[name](model) for model in models])


# --- Methods -------------------------------------------------------------------------------------


def test_batch_by_batch():
    models = compiled(three_models(), run_eagerly=True)
    results = []
    for model in models:
        results.append(
            [
                model.train_on_batch(X[:6], Y[:6]),
                model.train_on_batch(X[6:10], Y[6:10], sample_weight=WEIGHTS[6:10]),
                model.train_on_batch(X[10:], Y[10:], class_weight=CLASSES, return_dict=True),
                model.test_on_batch(X, Y),
                model.test_on_batch(X, Y, sample_weight=WEIGHTS, return_dict=True),
                model.predict_on_batch(X),
            ]
        )
    assert_equal(models, results)
    assert int(models[2].optimizer.applied_steps) == 3


def test_evaluate_and_predict_between_epochs():
    """They take no step and choose no scales."""
    models = compiled(three_models(), run_eagerly=True)
    results = []
    for model in models:
        found = [fit(model, 1)]
        state = [w.numpy() for w in model.optimizer.variables + model.weights]
        found.append(model.evaluate(X, Y, batch_size=5, sample_weight=WEIGHTS, verbose=0))
        found.append(model.evaluate(dataset(), verbose=0, return_dict=True))
        found.append(model.predict(X, batch_size=5, verbose=0))
        after = [w.numpy() for w in model.optimizer.variables + model.weights]
        for a, b in zip(after, state, strict=True):
            np.testing.assert_array_equal(a, b)
        found.append(fit(model, 1))
        results.append(found)
    assert_equal(models, results)


def test_early_stopping_restores_the_best_weights():
    models = compiled(three_models(), run_eagerly=True)
    stopped, histories = [], []
    for model in models:
        # Targets that training cannot know: the loss on them rises at once.
        callback = keras.callbacks.EarlyStopping(
            "val_loss", patience=2, start_from_epoch=1, restore_best_weights=True
        )
        held_out = X[:7], (Y[:7] + 1) % 3
        histories.append(fit(model, 9, validation_data=held_out, callbacks=[callback]))
        stopped.append((callback.stopped_epoch, callback.best_epoch))
        found = model.evaluate(*held_out, verbose=0)[0]
        np.testing.assert_allclose(found, callback.best, rtol=1e-3)
    assert stopped[0][0] < 8
    assert stopped == [stopped[0]] * 3
    assert_equal(models, histories)


# --- compile once more ---------------------------------------------------------------------------


def test_compiled_again_with_the_same_optimizer():
    """Its momentum, its counters and the scales stay."""
    models = compiled(three_models())
    results = []
    for model in models:
        found = [fit(model, 1)]
        before = model.get_weights()
        scales = [] if model is models[0] else [site.scale for site in model.scales]
        for optimizer in (model.optimizer, getattr(model.optimizer, "inner_optimizer", None)):
            if optimizer is not None:
                model.compile(optimizer, LOSS, metrics=["accuracy"])
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
        if scales:
            assert [site.scale for site in model.scales] == scales
        found.append(fit(model, 1))
        results.append(found)
    assert_equal(models, results)
    # A new wrapper counts anew; the steps of the optimizer inside go on.
    assert int(models[2].optimizer.applied_steps) == 4
    assert int(models[2].optimizer.iterations) == 8


def test_compiled_again_with_another_optimizer():
    """The scales stay, and so does the number of passes, by which they are updated."""
    models = compiled(three_models())
    results = []
    for model in models:
        found = [fit(model, 1)]
        if model is not models[0]:
            registry, scales = model.scales, [site.scale for site in model.scales]
        model.compile(keras.optimizers.RMSprop(0.01), LOSS, loss_weights=0.5)
        if model is not models[0]:
            assert model.scales is registry is model.optimizer.scales
            assert [site.scale for site in model.scales] == scales
        found.append(fit(model, 1))
        results.append(found)
    assert_equal(models, results)
    for model in models[1:]:
        assert int(model.scales.variables[2].numpy()) == 8
        assert int(model.optimizer.applied_steps) == int(model.optimizer.iterations) == 4


def test_nothing_to_train():
    """A warning, as under Keras, and no pass."""
    models = three_models()
    for model in models:
        model.trainable = False
    compiled(models)
    before = models[0].get_weights()
    for model in models:
        with pytest.warns(UserWarning, match="does not have any trainable weights"):
            fit(model, 1)
        # Statistics of a frozen BatchNormalization stay, too.
        for a, b in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(a, b)
    assert int(models[2].scales.variables[2].numpy()) == 0


# --- Layers frozen during training ---------------------------------------------------------------


@pytest.mark.parametrize("unscale", ["layer", "optimizer"])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_layer_frozen_in_a_loop_of_ones_own(run, unscale):
    """One optimizer, made for all variables; each step those that are trained just then."""
    found = []
    config = gs.GradScaleConfig(unscale=unscale)
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(1)
        with gs.policy_scope(policy):
            model = functional()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        if policy != "float32":
            model = gs.convert(model, config)
            optimizer = gs.GradScaleOptimizer(optimizer, scales=model.scales)
        optimizer.build(model.trainable_variables)
        last = model.get_layer("last")

        def step(x, y, model=model, optimizer=optimizer):
            variables = model.trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
                )
            optimizer.apply(tape.gradient(loss, variables), variables)

        kernels = []
        for trainable in (True, False, True):
            last.trainable = trainable
            # Which variables are trained is a trace's own.
            traced = run(step)
            for _ in range(2):
                traced(tf.constant(X), tf.constant(Y))
            kernels.append(last.kernel.numpy())
        np.testing.assert_array_equal(kernels[0], kernels[1])
        assert not np.array_equal(kernels[1], kernels[2])
        found.append([kernels, model.get_weights()])
        assert int(optimizer.iterations) == 6
    for a, b in zip(*map(keras.tree.flatten, found), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("build", [functional, Handwritten])
def test_a_layer_frozen_between_calls_of_fit(build):
    """Compiled again each time, with an optimizer that knows all variables."""
    models = three_models(build)
    compiled(models)
    results = []
    for model in models:
        # Scales, which are made now, are part of the optimizer.
        model(X[:2])
        model.optimizer.build(model.trainable_variables)
        found = []
        layer = model.layers[-1]
        for trainable in (True, False, True):
            before = layer.kernel.numpy()
            layer.trainable = trainable
            model.compile(model.optimizer, LOSS)
            found.append(fit(model, 1))
            assert np.array_equal(layer.kernel.numpy(), before) != trainable
        results.append(found)
    assert_equal(models, results)
