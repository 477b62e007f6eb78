"""A resumed run is the uninterrupted one, bit for bit: weights, optimizer, scales, counters."""

import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype("float32")
Y = RNG.normal(size=(40, 3)).astype("float32")
# What an optimizer's variables are, before those of the optimizer inside.
OWN_STATE = (
    "iteration learning_rate scales history passes chosen pending frozen peaks layout "
    "applied_steps skipped_steps skips_in_a_row"
).split()


@keras.saving.register_keras_serializable(package="resume")
class Own(keras.Model):
    """A model whose `call` is written by hand."""

    def __init__(self, width=8, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.first = layers.Dense(width, activation="tanh", name="first")
        self.second = layers.Dense(3, name="second")

    def call(self, x, training=None):
        x = self.first(x)
        return self.second(x + keras.ops.mean(x, axis=-1, keepdims=True))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


@keras.saving.register_keras_serializable(package="resume")
class OwnStep(keras.Model):
    """A Functional model with a `train_step` of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True), x=x)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def stack():
    inputs = x = keras.Input((6,))
    x = layers.Dense(8, name="first")(x)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Add(name="join")([x, layers.ReLU(name="relu")(x)])
    return inputs, layers.Dense(3, name="second")(x)


BUILD = {
    "functional": lambda: keras.Model(*stack()),
    "sequential": lambda: keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)]
    ),
    "own_call": Own,
    "own_step": lambda: OwnStep(*stack()),
}


def model_of(kind, update_every=100, seed=0, use_ema=True):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    with gs.policy_scope("mixed_float16", gs.GradScaleConfig(update_every=update_every)):
        model = gs.convert(BUILD[kind]())
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 50)
    model.compile(keras.optimizers.Adam(schedule, use_ema=use_ema), "mse")
    return model


def load(path):
    """The layers inside a class of one's own are made under the policy that is set."""
    with gs.policy_scope("mixed_float16"):
        return keras.saving.load_model(path)


def train(model, first, last, **kwargs):
    """One epoch is one batch of 4."""
    for step in range(first, last):
        batch = slice(4 * step, 4 * step + 4)
        model.fit(X[batch], Y[batch], batch_size=4, verbose=0, shuffle=False, **kwargs)


def state(model):
    variables = [*model.variables, *model.optimizer.variables]
    return {f"{i} {v.path}": v.numpy() for i, v in enumerate(variables)}


def assert_equal(found, wanted):
    assert [v.shape for v in found.values()] == [v.shape for v in wanted.values()]
    for (name, x), y in zip(found.items(), wanted.values(), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def uninterrupted(kind, update_every):
    model = model_of(kind, update_every)
    train(model, 0, 10)
    return state(model)


slow = pytest.mark.slow
# Each way to resume with each kind of model; a part of it is quick enough to run always.
KINDS = pytest.mark.parametrize(
    ("kind", "update_every"),
    [
        ("functional", 1),
        ("own_call", 100),
        *(
            pytest.param(kind, every, marks=slow)
            for kind in BUILD
            for every in (1, 100)
            if (kind, every) not in (("functional", 1), ("own_call", 100))
        ),
    ],
)


@KINDS
def test_the_whole_model_saved(kind, update_every, tmp_path):
    wanted = uninterrupted(kind, update_every)
    model = model_of(kind, update_every)
    train(model, 0, 5)
    model.save(tmp_path / "model.keras")
    loaded = load(tmp_path / "model.keras")
    assert type(loaded).__name__ == type(model).__name__
    assert loaded.config == model.config
    assert_equal(state(loaded), state(model))
    train(loaded, 5, 10)
    assert_equal(state(loaded), wanted)


@KINDS
def test_weights_with_the_optimizer(kind, update_every, tmp_path):
    wanted = uninterrupted(kind, update_every)
    model = model_of(kind, update_every)
    train(model, 0, 5)
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_of(kind, update_every, seed=1)
    if kind == "own_call":
        # Its scales are made when it is first called.
        other(X[:4])
    other.load_weights(tmp_path / "model.weights.h5")
    assert_equal(state(other), state(model))
    train(other, 5, 10)
    assert_equal(state(other), wanted)


@KINDS
def test_a_checkpoint_of_tensorflow(kind, update_every, tmp_path):
    wanted = uninterrupted(kind, update_every)
    model = model_of(kind, update_every)
    train(model, 0, 5)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "at")
    other = model_of(kind, update_every, seed=1)
    train(other, 0, 1)
    checkpoint = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    checkpoint.restore(path).assert_existing_objects_matched()
    assert_equal(state(other), state(model))
    train(other, 5, 10)
    assert_equal(state(other), wanted)


class Interrupted(Exception):
    pass


class Stop(keras.callbacks.Callback):
    """Interrupts the training in the middle of an epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 3 and batch == 1:
            raise Interrupted


@pytest.mark.parametrize(
    ("kind", "update_every"),
    [
        ("functional", 100),
        pytest.param("functional", 1, marks=slow),
        pytest.param("own_call", 1, marks=slow),
        pytest.param("own_call", 100, marks=slow),
    ],
)
def test_backup_and_restore(kind, update_every, tmp_path):
    def fit(model, *callbacks):
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        arguments = dict(batch_size=8, epochs=6, verbose=0, shuffle=False)
        model.fit(X, Y, callbacks=[backup, *callbacks], **arguments)

    wanted = model_of(kind, update_every)
    wanted.fit(X, Y, batch_size=8, epochs=6, verbose=0, shuffle=False)
    model = model_of(kind, update_every)
    if kind == "own_call":
        model(X[:8])
    with pytest.raises(Interrupted):
        fit(model, Stop())
    model = model_of(kind, update_every, seed=1)
    if kind == "own_call":
        # Keras asks for it.
        model(X[:8])
    fit(model)
    assert_equal(state(model), state(wanted))


@pytest.mark.parametrize("kind", [pytest.param("functional", marks=slow), "own_call"])
def test_model_checkpoint(kind, tmp_path):
    # At the end of each `fit` Keras puts averages in the place of weights.
    model = model_of(kind, use_ema=False)
    train(model, 0, 10)
    wanted = state(model)
    model = model_of(kind, use_ema=False)
    checkpoint = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    train(model, 0, 5, callbacks=[checkpoint])
    loaded = load(tmp_path / "model.keras")
    train(loaded, 5, 10)
    assert_equal(state(loaded), wanted)


def test_in_a_new_process(tmp_path):
    wanted = uninterrupted("functional", 100)
    model = model_of("functional")
    train(model, 0, 5)
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", X=X, Y=Y)
    program = f"""
        import keras, numpy as np, tf_gradscale
        data = np.load({str(tmp_path / "data.npz")!r})
        model = keras.saving.load_model({str(tmp_path / "model.keras")!r})
        for step in range(5, 10):
            batch = slice(4 * step, 4 * step + 4)
            model.fit(data["X"][batch], data["Y"][batch], shuffle=False, verbose=0)
        variables = [*model.variables, *model.optimizer.variables]
        np.savez({str(tmp_path / "end.npz")!r}, *[v.numpy() for v in variables])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
    with np.load(tmp_path / "end.npz") as found:
        assert_equal({name: found[name] for name in found.files}, wanted)


def test_what_the_state_is():
    """Field by field, as docs/resume.md lists it."""
    model = model_of("functional")
    train(model, 0, 1)
    variables = model.optimizer.variables
    own, inner = variables[: len(OWN_STATE)], variables[len(OWN_STATE) :]
    assert [v.name for v in own] == OWN_STATE
    assert [id(v) for v in inner] == [id(v) for v in model.optimizer.inner_optimizer.variables]


# --- Mismatches -----------------------------------------------------------------------------------


def test_the_state_of_another_model_is_refused(tmp_path):
    model = model_of("functional")
    train(model, 0, 1)
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_of("functional")
    other.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(ValueError, match="(?s)saved with another optimizer.*Received: "):
        other.load_weights(tmp_path / "model.weights.h5")


def test_the_state_of_a_plain_optimizer_is_refused(tmp_path):
    """Its weights can be had without it."""
    with gs.policy_scope("mixed_float16"):
        plain = BUILD["functional"]()
    plain.compile("adam", "mse")
    plain.fit(X[:4], Y[:4], verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = model_of("functional", seed=1)
    with pytest.raises(ValueError, match="(?s)before `compile`.*Received: "):
        model.load_weights(tmp_path / "plain.weights.h5")
    with gs.policy_scope("mixed_float16"):
        model = gs.convert(BUILD["functional"]())
    model.load_weights(tmp_path / "plain.weights.h5")
    for found, wanted in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_scales_of_other_sites_are_refused(tmp_path):
    """Made under another policy, a model has other sites, though they may be as many."""
    model = model_of("own_call")
    train(model, 0, 1)
    model.save(tmp_path / "model.keras")
    message = "(?s)must be those of the same layers in the same dtypes.*checksum"
    with pytest.raises(ValueError, match=message):
        keras.saving.load_model(tmp_path / "model.keras")


def test_a_model_of_ones_own_must_be_called_before_it_is_loaded(tmp_path):
    model = model_of("own_call")
    train(model, 0, 1)
    model.save_weights(tmp_path / "model.weights.h5")
    other = model_of("own_call")
    other(keras.Input((6,)))
    with pytest.raises(ValueError, match="must be called on a batch before.*Received: "):
        other.load_weights(tmp_path / "model.weights.h5")
