"""What is exported is the plain forward graph, float32 in and out, and needs nothing of ours."""

import collections
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend import AutocastScope
from tensorflow.core.protobuf import saved_model_pb2

import tf_gradscale as gs
from tf_gradscale.export import is_exported

layers = keras.layers
ROOT = Path(__file__).parents[1]
IDS = 3000  # float16 holds the integers up to 2048 only.


def as_it_is(model):
    return model


def dense(convert):
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", name="hidden"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="drop"),
            layers.Dense(3, activation="softmax", name="top"),
        ],
        name="dense",
    )


def several(convert):
    inputs = {name: keras.Input((6,), name=name) for name in ("left", "right")}
    x = layers.Concatenate(name="both")([inputs["left"], inputs["right"]])
    outputs = {"a": layers.Dense(2, name="a")(x), "b": layers.Dense(3, name="b")(x)}
    return keras.Model(inputs, outputs, name="several")


def nested(convert):
    deep = keras.Sequential([keras.Input((6,)), layers.Dense(6, name="deepest")], name="deep")
    inputs = keras.Input((6,))
    x = layers.LayerNormalization(name="norm")(convert(deep)(inputs))
    inner = keras.Model(inputs, layers.Dense(6, activation="tanh", name="first")(x), name="inner")
    inputs = keras.Input((6,), name="features")
    return keras.Model(inputs, layers.Dense(3, name="top")(convert(inner)(inputs)), name="nested")


def attention(convert):
    ids = keras.Input((5,), dtype="int32", name="ids")
    x = layers.Embedding(IDS, 8, mask_zero=True, name="embedding")(ids)
    x = layers.Add(name="residual")([x, layers.MultiHeadAttention(2, 4, name="attention")(x, x)])
    x = layers.GlobalAveragePooling1D(name="mean")(layers.LayerNormalization(name="norm")(x))
    return keras.Model(ids, layers.Dense(3, name="top")(x), name="attentive")


def recurrent(convert):
    ids = keras.Input((5,), dtype="int32", name="ids")
    x = layers.Embedding(IDS, 8, mask_zero=True, name="embedding")(ids)
    x = layers.LSTM(4, name="lstm")(x)
    return keras.Model(ids, layers.Dense(3, name="top")(x), name="recurrent")


@keras.saving.register_keras_serializable(package="tests")
class Written(keras.Model):
    """A model whose `call` is written by hand."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = layers.Embedding(IDS, 8, mask_zero=True, name="embedding")
        self.mean = layers.GlobalAveragePooling1D(name="mean")
        self.drop = layers.Dropout(0.5, name="drop")
        self.top = layers.Dense(3, name="top")

    def call(self, ids, training=None):
        return self.top(self.drop(self.mean(self.embedding(ids)), training=training))


def written(convert):
    return Written(name="written")


BUILDERS = [dense, several, nested, attention, recurrent, written]


def batch(build, size=4):
    """Inputs for a model."""
    rng = np.random.default_rng(1)
    if build in (attention, recurrent, written):
        ids = rng.integers(2049, IDS, (size, 5)).astype("int32")
        ids[:, 3:] = 0
        return ids
    x = {name: rng.standard_normal((size, 6)).astype("float32") for name in ("left", "right")}
    return x if build is several else x["left"]


def converted(build):
    """A compiled float16 model with scales, random weights and an optimizer that is in use."""
    gs.set_global_policy("mixed_float16")
    model = gs.convert(build(gs.convert))
    model(batch(build))
    rng = np.random.default_rng(2)
    model.set_weights([rng.uniform(0.1, 0.6, w.shape) for w in model.weights])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def trained(build):
    """The same, trained for two steps."""
    model, x = converted(build), batch(build)
    y = keras.tree.map_structure(np.ones_like, model.predict(x, verbose=0))
    for _ in range(2):
        model.train_on_batch(x, y)
    return model


def plain_twin(build, model):
    """The same in plain Keras under the global policy, never converted; same weights."""
    twin = build(as_it_is)
    twin(batch(build))
    twin.set_weights(model.get_weights())
    return twin


# --- Ways to export ------------------------------------------------------------------------------


def signature_of(x):
    return [keras.tree.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), a.dtype), x)]


def by_export(model, path, x):
    model.export(path, verbose=False)


def by_saved_model(model, path, x):
    tf.saved_model.save(model, path)


def by_archive(function_of):
    def write(model, path, x):
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serve", function_of(model), signature_of(x))
        archive.write_out(path, verbose=False)

    return write


def by_tracking(model, path, x):
    archive = keras.export.ExportArchive()
    archive.track_and_add_endpoint("serve", model, signature_of(x))
    archive.write_out(path, verbose=False)


def by_module(model, path, x):
    """A function of one's own, which was called before."""
    module = tf.Module()
    module.model = model
    module.serve = tf.function(lambda inputs: model(inputs), input_signature=signature_of(x))
    module.serve(x)
    tf.saved_model.save(module, path, signatures=module.serve)


WAYS = {
    "export": by_export,
    "saved_model": by_saved_model,
    "call": by_archive(lambda model: model.call),
    "lambda": by_archive(lambda model: lambda x: model(x, training=False)),
    "training": by_archive(lambda model: lambda x: model(x, training=True)),
    "track": by_tracking,
    "module": by_module,
}


def meta_graph_of(path):
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((Path(path) / "saved_model.pb").read_bytes())
    return saved.meta_graphs[0]


def names_of(path):
    """What clients call inputs and outputs."""
    signature = meta_graph_of(path).signature_def["serving_default"]
    return sorted(signature.inputs), sorted(signature.outputs)


def nodes_of(path):
    """All operations of a SavedModel, in its graph and its functions."""
    graph = meta_graph_of(path).graph_def
    assert not graph.library.registered_gradients
    return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]


def gradients_of(nodes):
    """The gradients that operations have in place of their own."""
    named = [node.attr["_gradient_op_type"].s.decode() for node in nodes]
    return [name for name in named if name and not name.startswith("PartitionedCall")]


def variables_of(nodes):
    names = {node.attr["shared_name"].s.decode() for node in nodes if node.op == "VarHandleOp"}
    assert names
    return names


def kinds_of(nodes):
    return collections.Counter(node.op for node in nodes)


def served(path, x):
    """What a SavedModel's default signature makes of inputs: flat, by the names of outputs."""
    loaded = tf.saved_model.load(path)
    serve = loaded.signatures["serving_default"]
    names = sorted(serve.structured_input_signature[1])
    made = serve(**dict(zip(names, map(tf.constant, keras.tree.flatten(x)), strict=True)))
    return [made[name] for name in sorted(made)]


QUICK = [
    (dense, "saved_model"),
    (dense, "call"),
    (several, "export"),
    (nested, "export"),
    (written, "export"),
]


@pytest.mark.parametrize(
    ("build", "way"),
    [
        pytest.param(
            build,
            way,
            id=f"{build.__name__}-{way}",
            marks=[] if (build, way) in QUICK else pytest.mark.slow,
        )
        for build in BUILDERS
        for way in WAYS
        if way in ("export", "saved_model", "call")
        or (way != "training" and build in (dense, nested, written))
    ],
)
def test_what_is_exported_is_the_plain_forward_graph(build, way, tmp_path):
    """The operations of plain Keras' model, and a cast for each output: nothing else."""
    model, x = converted(build), batch(build)
    wanted = keras.tree.flatten(model.predict(x, verbose=0))
    assert all(y.dtype == np.float16 for y in wanted)
    WAYS[way](model, tmp_path / "ours", x)
    # Bit for bit: every float16 is a float32 as well.
    found = served(tmp_path / "ours", x)
    assert [y.dtype for y in found] == [tf.float32] * len(wanted)
    for y, known in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(y, known.astype("float32"))

    ours = nodes_of(tmp_path / "ours")
    assert gradients_of(ours) == []
    assert not [name for name in variables_of(ours) if "scales" in name or "adam" in name]

    plain_way = "track" if (build, way) == (written, "export") else way
    WAYS[plain_way](plain_twin(build, model), tmp_path / "plain", x)
    plain = nodes_of(tmp_path / "plain")
    if build is not several and way != "export":  # Keras counts on in its names of inputs.
        assert names_of(tmp_path / "ours") == names_of(tmp_path / "plain")
    if build is written and way in ("saved_model", "module"):
        return  # Keras' own function for it is another one, on float16 numbers.
    # tf.saved_model.save writes a function for each model inside, with an output of its own.
    functions = {"saved_model": 1, "module": 2}.get(way, 1)
    if build is nested and way in ("saved_model", "module"):
        functions += 2
    assert kinds_of(ours) - kinds_of(plain) == {"Cast": functions * len(wanted)}
    assert not kinds_of(plain) - kinds_of(ours)


def test_tf_saved_model_save_serves_a_model_with_a_call_of_its_own(tmp_path):
    """Any size of batch, integers as integers; Keras saves one size, and float16 for all."""
    model = converted(written)
    tf.saved_model.save(model, tmp_path / "ours")
    serve = tf.saved_model.load(tmp_path / "ours").signatures["serving_default"]
    ((_, spec),) = serve.structured_input_signature[1].items()
    assert (spec.dtype, spec.shape.as_list()) == (tf.int32, [None, 5])
    (found,) = served(tmp_path / "ours", batch(written, 7))
    np.testing.assert_array_equal(found, model.predict(batch(written, 7), verbose=0))


@pytest.mark.slow
def test_an_endpoint_may_run_the_model_as_in_training(tmp_path):
    model, x = converted(dense), batch(dense, 100)
    model.get_layer("norm").trainable = False
    WAYS["training"](model, tmp_path / "model", x)
    nodes = nodes_of(tmp_path / "model")
    assert gradients_of(nodes) == []
    (found,) = served(tmp_path / "model", x)
    assert found.dtype == tf.float32
    # Dropout is on, and it alone.
    assert np.any(found != model.predict(x, verbose=0))
    model.get_layer("drop").rate = 0.0
    WAYS["training"](model, tmp_path / "model", x)
    (found,) = served(tmp_path / "model", x)
    np.testing.assert_array_equal(found, model.predict(x, verbose=0))


def test_a_float32_model_is_exported_without_a_cast(tmp_path):
    gs.set_global_policy("float32")
    model = gs.convert(dense(as_it_is))
    model.export(tmp_path / "ours", verbose=False)
    plain_twin(dense, model).export(tmp_path / "plain", verbose=False)
    ours, plain = (kinds_of(nodes_of(tmp_path / name)) for name in ("ours", "plain"))
    assert ours == plain


# --- What is exported stays as it was ------------------------------------------------------------

TINY = 2.0**-30  # So small that all of a float16 model's gradients become zero.


def small():
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, activation="tanh"), layers.Dense(3)], name="small"
    )


def true_gradients(model, x):
    """Those of a plain float32 model with the same weights, without the factor."""
    gs.set_global_policy("float32")
    twin = small()
    twin.set_weights(model.get_weights())
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(twin(x) ** 2)
    return tape.gradient(value, [v.value for v in twin.trainable_variables])


def check_gradients(found, wanted):
    for g, true in zip(found, wanted, strict=True):
        np.testing.assert_allclose(g / TINY, true, rtol=0.02, atol=0.01 * np.abs(true).max())


def test_a_function_that_was_exported_is_still_scaled(tmp_path):
    """Its trace for the SavedModel is another one than that which is differentiated."""
    gs.set_global_policy("mixed_float16")
    plain = small()
    module = tf.Module()
    module.model = model = gs.convert(plain)
    x = batch(dense)
    module.forward = tf.function(lambda x: model(x), input_signature=signature_of(x))
    tf.saved_model.save(module, tmp_path / "model")
    assert gradients_of(nodes_of(tmp_path / "model")) == []

    def gradients(forward):
        with tf.GradientTape() as tape:
            value = TINY * tf.reduce_sum(tf.cast(forward(x), tf.float32) ** 2)
        return tape.gradient(value, [v.value for v in model.trainable_variables])

    assert not any(np.any(g) for g in gradients(plain))
    check_gradients(gradients(module.forward), true_gradients(model, x))


@pytest.mark.slow
def test_a_function_that_takes_gradients_is_saved_with_them(tmp_path):
    """For training where the SavedModel is: the module then holds the scales as well."""
    gs.set_global_policy("mixed_float16")
    x = batch(dense)

    class Trainer(tf.Module):
        def __init__(self, model):
            self.model = model
            self.scales = [variable.value for variable in model.scales.variables]

        @tf.function(input_signature=signature_of(x))
        def gradients(self, x):
            with tf.GradientTape() as tape:
                value = TINY * tf.reduce_sum(self.model(x) ** 2)
            return tape.gradient(value, [v.value for v in self.model.trainable_variables])

        @tf.function(input_signature=signature_of(x))
        def serve(self, x):
            return self.model(x)

    model = gs.convert(small())
    trainer = Trainer(model)
    signatures = {"serving_default": trainer.serve, "gradients": trainer.gradients}
    tf.saved_model.save(trainer, tmp_path / "model", signatures=signatures)
    wanted = model.predict(x, verbose=0).astype("float32")
    loaded = tf.saved_model.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.serve(x), wanted)
    check_gradients(loaded.gradients(x), true_gradients(model, x))


def test_a_trace_that_was_made_before_cannot_be_made_plain(tmp_path):
    """`SaveOptions` saves it without its gradient."""
    gs.set_global_policy("mixed_float16")
    model, x = gs.convert(small()), batch(dense)
    serve = tf.function(lambda x: model(x)).get_concrete_function(*signature_of(x))
    with pytest.raises(ValueError, match="tracing gradients for SavedModel") as raised:
        tf.saved_model.save(model, tmp_path / "model", signatures=serve)
    error = str(raised.value.__cause__ or raised.value.__context__)
    assert re.search("not traced anew for a SavedModel.*Received: a function", error)
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(model, tmp_path / "model", signatures=serve, options=options)
    (found,) = served(tmp_path / "model", x)
    np.testing.assert_array_equal(found, model.predict(x, verbose=0).astype("float32"))


def test_exporting_leaves_no_trace(tmp_path):
    model = converted(dense)
    before = [w.copy() for w in model.get_weights()], str(model.scales)
    by_export(model, tmp_path / "one", None)
    by_saved_model(model, tmp_path / "two", None)
    assert model.optimizer is not None and model.compiled
    assert str(model.scales) == before[1]
    for now, then in zip(model.get_weights(), before[0], strict=True):
        np.testing.assert_array_equal(now, then)
    assert not is_exported()
    with pytest.raises(ValueError, match="format"):
        model.export(tmp_path / "three", format="none")
    assert not is_exported()


# --- Models with a call of their own -------------------------------------------------------------


def test_a_model_that_was_never_called_says_so(tmp_path):
    model = Written()
    model(batch(written))
    model = gs.convert(model)
    for way in (by_export, by_saved_model):
        with pytest.raises(ValueError) as error:
            way(model, tmp_path / "model", None)
        assert (
            f"Model '{model.name}' has a `call` of its own, and must be called on a batch before "
            "it is exported, or be given an `input_signature`. "
            "Received: a model that was never called" in str(error.value)
        )
    model.export(tmp_path / "given", verbose=False, input_signature=signature_of(batch(written)))
    (found,) = served(tmp_path / "given", batch(written))
    np.testing.assert_array_equal(found, model.predict(batch(written), verbose=0))


def test_several_arguments_are_exported_in_their_order(tmp_path):
    class Difference(keras.Model):
        def __init__(self):
            super().__init__()
            self.top = layers.Dense(2, use_bias=False)

        def call(self, inputs, context, training=None):
            return {"y": self.top(inputs["one"] + inputs["two"] - context)}

    gs.set_global_policy("mixed_float16")
    model = gs.convert(Difference())
    one, two, context = np.ones((2, 3)), np.full((2, 3), 2.0), np.full((2, 3), 5.0)
    y = model({"one": one, "two": two}, context=context)["y"]
    np.testing.assert_allclose(y, -2.0 * np.sum(model.weights[0], 0)[None].repeat(2, 0), rtol=0.01)
    model.export(tmp_path / "model", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "model")
    specs = keras.tree.flatten(loaded.serve.concrete_functions[0].structured_input_signature[0])
    assert [spec.dtype for spec in specs] == [tf.float32] * 3
    single = [tf.constant(x, tf.float32) for x in (one, two, context)]
    found = loaded.serve({"one": single[0], "two": single[1]}, single[2])["y"]
    np.testing.assert_array_equal(found, y)


@pytest.mark.parametrize("call", ["model", "method"])
def test_training_may_be_given_by_position(call):
    """As Keras itself does where the method `call` is an endpoint."""
    gs.set_global_policy("mixed_float16")
    model, ids = gs.convert(Written()), batch(written, 200)
    run = model if call == "model" else model.call
    on, off = run(ids, True), run(ids, False)
    assert np.any(on != off)
    np.testing.assert_array_equal(off, model(ids, training=False))
    np.testing.assert_array_equal(run(ids, None), off)


# --- strip ---------------------------------------------------------------------------------------


def layers_inside(model):
    return list(model._flatten_layers())


def scaled_inside(convert):
    """Converted models and scaled layers, one of them shared, in a plain model in a plain model."""
    scaled = (lambda layer: layer) if convert is as_it_is else gs.layers.GradientScaled
    deep = convert(keras.Sequential([keras.Input((6,)), layers.Dense(6, name="d")], name="deep"))
    inputs = keras.Input((6,))
    middle = keras.Model(inputs, layers.Add(name="sum")([deep(inputs), inputs]), name="middle")
    inputs = {name: keras.Input((6,), name=name) for name in ("left", "right")}
    x = [middle(x) for x in inputs.values()]
    y = scaled(layers.Dense(5, name="wrapped"))(keras.ops.concatenate(x, axis=-1))
    return keras.Model(inputs, {"y": layers.Dense(2, name="top")(y)}, name="outer")


@pytest.mark.parametrize("outside", [gs.convert, as_it_is])
@pytest.mark.parametrize("build", [nested, scaled_inside])
def test_strip_makes_what_is_inside_plain_too(build, outside):
    gs.set_global_policy("mixed_float16")
    model = outside(build(gs.convert))
    # In a graph TensorFlow may fuse what is plain, and round once less.
    model.compile("sgd", "mse", run_eagerly=True)
    x = batch(several if build is scaled_inside else build)
    plain = gs.strip(model)
    assert not any(
        type(layer).__module__.startswith("tf_gradscale") for layer in layers_inside(plain)
    )
    assert plain.dtype_policy.name == "mixed_float16"
    assert not plain.compiled
    # The same variables, not copies.
    assert [id(w) for w in plain.weights] == [id(w) for w in model.weights]
    plain.compile(run_eagerly=True)
    wanted = keras.tree.flatten(model.predict(x, verbose=0))
    found = keras.tree.flatten(plain.predict(x, verbose=0))
    assert [y.dtype for y in found] == [y.dtype for y in wanted] == [np.float16] * len(wanted)
    for y, known in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(y, known)
    # And the model is still scaled, inside as well.
    assert isinstance(model, gs.Model) == (outside is gs.convert)
    assert any(isinstance(layer, gs.Sequential) for layer in layers_inside(model))


@pytest.mark.parametrize("outside", [gs.convert, as_it_is])
def test_strip_says_what_it_cannot_take_out(outside):
    inner = gs.convert(keras.Sequential([keras.Input((3,)), layers.Dense(2)], name="inner"))
    inputs = keras.Input((4, 3))
    model = outside(keras.Model(inputs, layers.TimeDistributed(inner)(inputs), name="outer"))
    with pytest.raises(ValueError, match="Received: 'inner' within another layer of 'outer'"):
        gs.strip(model)
    # As the message says.
    model = keras.Model(inputs, layers.TimeDistributed(gs.strip(inner))(inputs))
    plain = gs.strip(gs.convert(model))
    assert not any(isinstance(layer, gs.Sequential) for layer in layers_inside(plain))


def test_strip_takes_the_optimizer_from_a_model_converted_in_place():
    model = converted(written)
    plain = gs.strip(model)
    assert type(plain) is Written
    assert plain.optimizer is None and not plain.compiled
    assert not plain.get_compile_config()


# --- In a process of its own ---------------------------------------------------------------------

ELSEWHERE = """
import json, sys
sys.modules["tf_gradscale"] = None  # Importing it is an error.
import keras, numpy as np, tensorflow as tf

layers, IDS = keras.layers, {ids}
keras.config.set_dtype_policy("mixed_float16")  # For the layers that a class of one's own makes.

{written}

found = {{}}
for name, path, x in json.loads(sys.stdin.read()):
    x = np.load(x)
    try:
        if path.endswith(".keras"):
            model = keras.models.load_model(path)
            y = model.predict(x, verbose=0).astype("float32")
            made = {{"y": y, "kind": type(model).__name__}}
        else:
            model = tf.saved_model.load(path)
            made = {{"y": model.serve(x).numpy(), "weights": [w.numpy() for w in model.variables]}}
        found[name] = made
    except Exception as error:
        found[name] = {{"error": f"{{type(error).__name__}}: {{error}}"}}
json.dump(found, sys.stdout, default=lambda array: array.tolist())
"""


def make_module():
    """The script that made the model in saved_models/."""
    spec = importlib.util.spec_from_file_location("make", ROOT / "saved_models" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_elsewhere(folder, builders):
    """Outputs of files that a process without tf_gradscale opens, and those that are wanted."""
    wanted, jobs = {}, []

    def add(name, path, x, y):
        np.save(folder / f"{name}.npy", x)
        jobs.append((name, str(path), str(folder / f"{name}.npy")))
        wanted[name] = y

    with gs.policy_scope("mixed_float16"):
        for build in builders:
            name, x = build.__name__, batch(build)
            model = gs.convert(build(gs.convert))
            model.compile("adam", "mse", jit_compile=False)
            checkpoint = keras.callbacks.ModelCheckpoint(str(folder / f"{name}.keras"))
            model.fit(x, np.ones((len(x), 3)), verbose=0, callbacks=[checkpoint])
            y = model.predict(x, verbose=0)
            add(f"{name} checkpoint", folder / f"{name}.keras", x, y)
            model.export(folder / name, verbose=False)
            add(f"{name} exported", folder / name, x, y)
            gs.strip(model).save(folder / f"{name} stripped.keras")
            add(f"{name} stripped", folder / f"{name} stripped.keras", x, y)
    add("digits", ROOT / "saved_models" / "digits", make_module().digits(), None)
    script = ELSEWHERE.format(ids=IDS, written=class_of_written())
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), wanted


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    return open_elsewhere(tmp_path_factory.mktemp("elsewhere"), [dense, written])


def class_of_written():
    source = Path(__file__).read_text("utf-8")
    (found,) = re.findall(r"^(@keras\.saving[^\n]*\nclass Written.*?)\n\n\n", source, re.M | re.S)
    return found


def check_opened(build, found, wanted):
    """What was exported or stripped opens; the checkpoint says what to import."""
    for kind in ("exported", "stripped"):
        result = found[f"{build.__name__} {kind}"]
        assert "error" not in result
        y = np.array(result["y"], "float32")
        np.testing.assert_array_equal(y, wanted[f"{build.__name__} {kind}"])
    # Keras' own message. With the import it works: tests/test_resume.py.
    error = found[f"{build.__name__} checkpoint"]["error"]
    assert re.match(r"TypeError: Could not (locate|deserialize) class", error)
    assert re.search("tf_gradscale.(model|handwritten)", error)


@pytest.mark.parametrize("build", [dense, written])
def test_other_processes_need_no_tf_gradscale(build, elsewhere):
    check_opened(build, *elsewhere)


@pytest.mark.slow
def test_other_processes_need_no_tf_gradscale_for_what_is_inside(tmp_path):
    found, wanted = open_elsewhere(tmp_path, [nested, attention, recurrent])
    for build in (nested, attention, recurrent):
        check_opened(build, found, wanted)


def test_the_model_in_saved_models(elsewhere):
    """It tells the ten digits apart, and computes what NumPy does with its weights."""
    found = elsewhere[0]["digits"]
    logits = np.array(found["y"])
    assert logits.argmax(1).tolist() == list(range(10))
    filters, bias, kernel, offset = (np.array(w) for w in found["weights"])
    images = make_module().digits()
    windows = np.lib.stride_tricks.sliding_window_view(images[..., 0], (3, 3), axis=(1, 2))
    hidden = np.maximum(np.einsum("nhwij,ijf->nhwf", windows, filters[:, :, 0]) + bias, 0)
    wanted = hidden.reshape(10, -1) @ kernel + offset
    # Sums of up to 280 float16 products, each to within 2^-11.
    np.testing.assert_allclose(logits, wanted, atol=2.0**-8 * np.abs(wanted).max())


def test_the_model_in_saved_models_is_small_and_plain():
    files = [path for path in (ROOT / "saved_models").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files if "__pycache__" not in path.parts) < 300_000
    assert gradients_of(nodes_of(ROOT / "saved_models" / "digits")) == []


@pytest.mark.slow
def test_the_script_makes_the_model_in_saved_models(tmp_path):
    script = ROOT / "saved_models" / "make.py"
    done = subprocess.run(
        [sys.executable, script, "--out", tmp_path / "digits"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split(":")[1]) > 0.9
    assert gradients_of(nodes_of(tmp_path / "digits")) == []
    images = make_module().digits()
    (found,) = served(tmp_path / "digits", images)
    assert found.numpy().argmax(1).tolist() == list(range(10))


# --- Float32 and LiteRT --------------------------------------------------------------------------


@contextlib.contextmanager
def deprecated():
    """TensorFlow's LiteRT interpreter says that it will move to a package of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def convert_to_litert(path, size, x, float16_weights=False):
    """The converted SavedModel: the outputs' values, flat, and its bytes."""
    with deprecated():
        converter = tf.lite.TFLiteConverter.from_saved_model(str(path))
        if float16_weights:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
            converter.target_spec.supported_types = [tf.float16]
        content = converter.convert()
        interpreter = tf.lite.Interpreter(model_content=content)
        run = interpreter.get_signature_runner("serving_default")
        flat = keras.tree.flatten(x)
        made = run(**dict(zip(sorted(run.get_input_details()), flat, strict=True)))
    return [made[name] for name in sorted(made)], content


def rebuilt_in_float32(build, model, path):
    """The same model under the policy "float32", in plain Keras, with weights from a file."""
    # Keras names what is inside by its class, so by that of a plain model.
    (gs.strip(model) if build is nested else model).save_weights(path)
    gs.set_global_policy("float32")
    twin = build(as_it_is)
    twin(batch(build))
    twin.load_weights(path)
    return twin


def close(found, wanted, within):
    """Whether errors are within a share of the largest value."""
    pairs = zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True)
    return all(np.abs(np.float32(f) - w).max() <= within * np.abs(w).max() for f, w in pairs)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, id=build.__name__, marks=[] if build is dense else pytest.mark.slow)
        for build in BUILDERS
    ],
)
def test_a_trained_model_runs_in_float32_and_in_litert(build, tmp_path):
    model, x = trained(build), batch(build)
    in_float16 = model.predict(x, verbose=0)
    twin = rebuilt_in_float32(build, model, tmp_path / "model.weights.h5")
    assert [(w.path, w.shape) for w in twin.weights] == [(w.path, w.shape) for w in model.weights]
    wanted = twin.predict(x, verbose=0)
    assert all(y.dtype == np.float32 for y in keras.tree.flatten(wanted))
    # A few roundings to within 2^-11.
    assert close(in_float16, wanted, 2.0**-7)
    # LiteRT has loops for batches of a known size only.
    fixed = keras.tree.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), x)
    twin.export(tmp_path / "model", verbose=False, input_signature=[fixed])
    found, _ = convert_to_litert(tmp_path / "model", len(x), x)
    assert close(found, wanted, 1e-5)


@pytest.mark.slow
def test_a_float32_model_is_converted_to_litert_from_keras(tmp_path):
    """The converter exports by itself; a converted model gives what a plain one does."""
    gs.set_global_policy("float32")
    x = batch(dense)
    plain = dense(as_it_is)
    wanted = plain.predict(x, verbose=0)
    with deprecated():
        contents = [
            tf.lite.TFLiteConverter.from_keras_model(model).convert()
            for model in (plain, gs.convert(plain))
        ]
        interpreters = [tf.lite.Interpreter(model_content=content) for content in contents]
        operations = [
            [op["op_name"] for op in interpreter._get_ops_details()] for interpreter in interpreters
        ]
        run = interpreters[1].get_signature_runner()
        (name,) = run.get_input_details()
        (found,) = run(**{name: x}).values()
    assert operations[0] == operations[1]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_litert_keeps_weights_in_float16(tmp_path):
    """Half the size; the weights are rounded once."""
    model, x = trained(attention), batch(attention)
    twin = rebuilt_in_float32(attention, model, tmp_path / "model.weights.h5")
    wanted = twin.predict(x, verbose=0)
    twin.export(tmp_path / "model", verbose=False)
    _, large = convert_to_litert(tmp_path / "model", len(x), x)
    found, content = convert_to_litert(tmp_path / "model", len(x), x, float16_weights=True)
    assert close(found, wanted, 2.0**-7)
    assert len(content) < 0.6 * len(large)


# --- What the page says --------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "export.md").read_text("utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_code_of_the_page_on_export_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    with deprecated():
        for block in CODE:
            exec(textwrap.dedent(block), names)
    assert (tmp_path / "classifier" / "saved_model.pb").exists()
    assert (tmp_path / "plain.keras").exists()
    assert close(names["predictions"], names["model"].predict(names["x"], verbose=0), 0)
    assert close(names["in_float32"](names["x"]), names["predictions"], 2.0**-7)
    assert close(names["on_device"], names["in_float32"](names["x"]), 2.0**-7)


# --- The platform --------------------------------------------------------------------------------


def test_tensorflow_traces_anew_for_a_saved_model(tmp_path):
    """in_save_context: on while a SavedModel is traced, for which nothing traced before is used."""
    from tensorflow.python.eager import record
    from tensorflow.python.saved_model.save_context import in_save_context

    seen = []

    @tf.function(input_signature=[tf.TensorSpec(())])
    def function(x):
        seen.append((in_save_context(), record.could_possibly_record()))
        return x

    function(1.0)
    module = tf.Module()
    module.function = function
    tf.saved_model.save(module, tmp_path / "module")
    with tf.GradientTape():
        function(2.0)
    assert seen == [(False, False), (True, False)]
    with tf.GradientTape():
        assert record.could_possibly_record()
    assert not in_save_context()


def test_keras_models_have_children_and_a_signature_for_saved_models():
    """_trackable_children, _default_save_signature: what tf.saved_model.save asks for."""
    model = dense(as_it_is)
    model.compile("adam", "mse")
    assert model._trackable_children("savedmodel")["optimizer"] is model.optimizer
    (spec,) = model._default_save_signature.input_signature
    assert spec.shape.as_list() == [None, 6]


def test_autocast_leaves_float32_outputs_alone():
    """The cast of an exported output is outside every layer's scope."""
    with AutocastScope("float16"):
        assert tf.cast(tf.ones(1, tf.float16), tf.float32).dtype == tf.float32
