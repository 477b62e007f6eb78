"""Every architecture: what a conversion makes of it, how right its gradients are, what it costs.

    python benchmarks/zoo.py --models encoder lstm MobileNetV2
    python benchmarks/zoo.py --all --no-gradients

A line for each network: its parameters; the sites at which scales are chosen; its steps by the rule
that takes them, and how many of them are layers made of layers, left whole; the error of the
gradients in the very first pass, for the loss times each multiplier, over the floor that float16's
rounding sets; and seconds of the processor for converting it and tracing a training step, as a
ratio to tracing Keras' own.

An error is the relative L2 distance of a variable's gradient to float32's, with the same weights
and data, as a median over the variables. The floor is that of plain mixed_float16 under a fixed
loss scale, as a median over those loss scales of a sweep that do no harm. Where it is above 0.5,
gradients in float16 are noise whatever scales them, and there is no floor; both are printed then.
"""

import argparse
import collections
import functools
import gc
import json
import os
import platform
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import architectures
import keras
import numpy as np
import tensorflow as tf

import tf_gradscale as gs

# No powers of two, which round alike: each is a draw of its own, and the floor their median.
SWEEP = tuple(3.0**k for k in range(10))
# Loss scales whose error is within this factor of the least do no harm.
PLATEAU = 1.5
# Above this error there is no floor.
NOISE = 0.5
# A gradient whose norm is a smaller share of the largest one is zero to float32's rounding.
ZERO = 1e-6


def errors(gradients, truth, multiplier=1.0):
    """The relative L2 error of each variable's gradient; NaN where the true one is zero."""
    norms = [np.linalg.norm(t) for t in truth]
    found = np.full(len(truth), np.nan)
    for i, (g, t, norm) in enumerate(zip(gradients, truth, norms, strict=True)):
        if norm > ZERO * max(norms):
            error = np.linalg.norm(g.astype("float64") / multiplier - t) / norm
            found[i] = error if np.isfinite(error) else np.inf
    return found


def middle(found):
    """The median over the variables whose true gradient is not zero."""
    return float(np.median(found[~np.isnan(found)]))


class Network:
    """One architecture in one policy, with or without scales of gradients.

    Args:
        architecture: An `architectures.Architecture`.
        policy: The dtype policy.
        mode: How a step is run: `"eager"`, `"graph"` or `"xla"`.
        config: A `GradScaleConfig`, or `None` for plain Keras.
    """

    def __init__(self, architecture, policy, mode="graph", config=None):
        with gs.policy_scope(policy):
            self.models = architecture.build()
            if config is not None:
                self.models = tuple(gs.convert(model, config) for model in self.models)
        scaled = self.models if config is not None else ()
        self._state = [v for model in scaled for v in model.scales.variables]
        self._initial = [keras.ops.convert_to_numpy(v) for v in self._state]

        def step(multiplier, *batch):
            return architecture.gradients(self.models, batch, multiplier)[1]

        if mode != "eager":
            step = tf.function(step, jit_compile=mode == "xla", autograph=False)
        self._step = step

    def gradients(self, batch, multiplier=1.0):
        """Gradients of the loss times a multiplier, in NumPy; with scales, of the first pass."""
        for variable, value in zip(self._state, self._initial, strict=True):
            variable.assign(value)
        made = self._step(tf.constant(multiplier, tf.float32), *batch)
        return [g.numpy() for g in made]

    def take(self, models):
        """Takes over the weights of other models of the architecture."""
        for model, other in zip(self.models, models, strict=True):
            model.set_weights(other.get_weights())


class Bench:
    """One architecture three times over: in float32, in plain mixed_float16, and scaled by us.

    Args:
        architecture: An `architectures.Architecture`.
        mode: How the two mixed_float16 steps are run: `"eager"`, `"graph"` or `"xla"`.
        size: Number of examples in a batch.
    """

    def __init__(self, architecture, mode="graph", size=16):
        self.architecture, self.size = architecture, size
        self.true = Network(architecture, "float32")
        self.plain = Network(architecture, "mixed_float16", mode)
        self.ours = Network(architecture, "mixed_float16", mode, gs.GradScaleConfig())

    def reset(self, seed):
        """New weights. Returns new data."""
        keras.utils.set_random_seed(seed)
        with gs.policy_scope("float32"):
            fresh = self.architecture.build()
        rng = np.random.default_rng(seed)
        batch = [tf.constant(x) for x in self.architecture.batch(rng, self.size)]
        if self.architecture.frozen:
            _calibrate(fresh, batch[0])
        self._take(fresh)
        if self.architecture.frozen:
            outputs = [model(batch[0], training=False) for model in self.plain.models]
            if not all(np.all(np.isfinite(y)) for y in keras.tree.flatten(outputs)):
                _calibrate_in_turn(fresh, batch[0])
                self._take(fresh)
        return batch

    def _take(self, fresh):
        for network in (self.true, self.plain, self.ours):
            network.take(fresh)

    def errors(self, seed, multipliers=(1.0,), sweep=SWEEP):
        """Errors by variable: of ours for each multiplier, of plain for each loss scale."""
        batch = self.reset(seed)
        truth = self.true.gradients(batch)
        if not all(np.all(np.isfinite(t)) for t in truth):
            raise FloatingPointError("Expected finite gradients in float32. Received: others")
        with np.errstate(invalid="ignore", over="ignore"):
            ours = [errors(self.ours.gradients(batch, m), truth, m) for m in multipliers]
            plain = [errors(self.plain.gradients(batch, s), truth, s) for s in sweep]
        return np.array(ours), np.array(plain), truth


def _calibrate(models, x):
    """Has batch normalisations divide by the root mean square of a batch, once and for all.

    No mean is taken away: in a deep network that is untrained all images look much the same, and
    what is left of them without it is mostly rounding errors.
    """
    for model in models:
        found = _normalisations(model)
        for layer in found:
            layer.momentum = 0.0
        model(x, training=True)
        for layer in found:
            layer.moving_variance.assign(layer.moving_variance + layer.moving_mean**2)
            layer.moving_mean.assign(0.0 * layer.moving_mean)


def _calibrate_in_turn(models, x):
    """The same, each set when its turn comes, on what those before it make of the batch.

    For networks so deep that activations leave float16's range by what `_calibrate` leaves to
    deviate. Their images look all the more alike, and gradients in float16 are noise.
    """
    for model in models:
        found = _normalisations(model)
        for layer in found:
            # In the layer's own dictionary, where it comes before the class's.
            vars(layer)["call"] = functools.partial(_calibrating_call, layer)
        model(x, training=False)
        for layer in found:
            del vars(layer)["call"]


def _normalisations(model):
    return [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization)]


def _calibrating_call(layer, x, **kwargs):
    axes = [i for i in range(len(x.shape)) if i != layer.axis % len(x.shape)]
    layer.moving_mean.assign(keras.ops.zeros_like(layer.moving_mean))
    layer.moving_variance.assign(keras.ops.mean(keras.ops.square(x), axis=axes))
    return type(layer).call(layer, x, training=False)


def plateau(plain):
    """The loss scales that do no harm, as a mask over the errors' rows."""
    found = np.array([middle(row) for row in plain])
    return found <= PLATEAU * found.min()


def floor_of(plain):
    """The floor: the median error, as a median over the plateau."""
    return float(np.median([middle(row) for row in plain[plateau(plain)]]))


def accuracy(architecture, seeds, multipliers, mode, size):
    """Ratios to the floor, as a median over the seeds for each multiplier, and what they are of."""
    bench = Bench(architecture, mode, size)
    made, floors = [], []
    for seed in seeds:
        ours, plain, _ = bench.errors(seed, multipliers)
        floors.append(floor_of(plain))
        made.append([middle(row) for row in ours])
    ratios = np.median(np.array(made) / np.array(floors)[:, None], axis=0)
    return {
        "floor": float(np.median(floors)),
        "errors": np.median(made, axis=0).tolist(),
        "ratios": ratios.tolist(),
    }


def _optimizer():
    return keras.optimizers.SGD(1e-3, momentum=0.9)


def _traced(architecture, models, batch, scaled):
    """Seconds of the processor for tracing a training step."""
    optimizers = [
        gs.GradScaleOptimizer(_optimizer(), scales=model.scales)
        if scaled
        else keras.optimizers.LossScaleOptimizer(_optimizer())
        for model in models
    ]
    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(*batch):
        with tf.GradientTape(persistent=True) as tape:
            losses = architecture.losses(models, *batch)
            losses = [o.scale_loss(loss) for o, loss in zip(optimizers, losses, strict=True)]
        for optimizer, model, loss in zip(optimizers, models, losses, strict=True):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        return losses

    start = time.process_time()
    step.get_concrete_function(*[tf.constant(x) for x in batch])
    return time.process_time() - start


def cost(architecture, size):
    """What a conversion makes of a network, and seconds for tracing it, Keras' own and ours."""
    with gs.policy_scope("mixed_float16"):
        models = architecture.build()
    batch = architecture.batch(np.random.default_rng(0), size)
    plain = _traced(architecture, models, batch, scaled=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        start = time.process_time()
        models = tuple(gs.convert(model) for model in models)
        conversion = time.process_time() - start
        ours = _traced(architecture, models, batch, scaled=True)
    steps = [step for model in models for step in model._region().graph().steps]
    return {
        "parameters": sum(model.count_params() for model in models),
        "sites": sum(len(list(model.scales)) for model in models),
        "rules": dict(collections.Counter(type(step.rule).__name__ for step in steps)),
        "whole": sorted({type(s.operation).__name__ for s in steps if _has_layers(s.operation)}),
        "measured": dict(
            collections.Counter(
                type(step.operation).__name__
                for step in steps
                if isinstance(step.rule, gs.rules.Measured)
            )
        ),
        "warnings": [str(warning.message) for warning in warned],
        "conversion": conversion,
        "tracing": ours,
        "plain tracing": plain,
    }


def _has_layers(operation):
    return bool(getattr(operation, "_layers", None)) or hasattr(operation, "layer")


def architecture_of(name, frozen=False):
    """The network of a name: one of `architectures`, or of keras.applications."""
    known = architectures.ARCHITECTURES
    return known[name] if name in known else architectures.application(name, frozen)


def measure(name, seeds, multipliers, gradients, repeats, size, frozen):
    """All that is printed of one network, as a dictionary."""
    architecture = architecture_of(name, frozen)
    size = size or (16 if name in architectures.ARCHITECTURES else 4)
    found = []
    for _ in range(repeats):
        found.append(cost(architecture, size))
        keras.backend.clear_session()
        gc.collect()
    row = {"model": name, **found[-1]}
    for key in ("conversion", "tracing", "plain tracing"):
        # What else the machine does only adds to it.
        row[key] = min(one[key] for one in found)
    row["ratio"] = (row["conversion"] + row["tracing"]) / row["plain tracing"]
    if gradients:
        mode = "xla" if architecture.convolves else "graph"
        row.update(accuracy(architecture, seeds, multipliers, mode, size))
    keras.backend.clear_session()
    gc.collect()
    return row


def line(row):
    """A row of the table, as Markdown."""
    rules = ", ".join(f"{n} {rule}" for rule, n in sorted(row["rules"].items()))
    if row["whole"]:
        rules += f"; whole: {', '.join(row['whole'])}"
    if "floor" not in row:
        error = "–"
    elif row["floor"] > NOISE:
        error = f"no floor: {row['errors'][0]:.2g} against {row['floor']:.2g}"
    else:
        error = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
    seconds = row["conversion"] + row["tracing"]
    return (
        f"| {row['model']} | {row['parameters'] / 1e6:.2f} M | {row['sites']} | {rules} | {error} "
        f"| {seconds:.1f} / {row['plain tracing']:.1f} = {row['ratio']:.2f} |"
    )


def main():
    """Measures, prints the table, and writes all figures as JSON if asked to."""
    small, large = list(architectures.ARCHITECTURES), architectures.applications()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=small, choices=small + large)
    parser.add_argument("--all", action="store_true", help="all that there are")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--multipliers", nargs="+", type=float, default=[1.0, 1e-6])
    parser.add_argument("--batch", type=int, help="by default 16, and 4 for keras.applications")
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="of conversion and tracing, of which the fastest counts",
    )
    parser.add_argument("--no-gradients", action="store_true", help="conversion and tracing only")
    parser.add_argument(
        "--frozen",
        action="store_true",
        help="batch normalisations of keras.applications with moving statistics, as in fine-tuning",
    )
    parser.add_argument("--json", help="file to write all figures to")
    args = parser.parse_args()
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} CPU cores, {args.seeds} seeds\n"
    )
    of = ", ".join(f"× {multiplier:g}" for multiplier in args.multipliers)
    print(
        f"| model | parameters | sites | steps by rule | error over the floor, loss {of} ", end=""
    )
    print("| conversion and tracing, s |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    # What is made once in a process is not charged to the first network.
    cost(architectures.ARCHITECTURES["lstm"], 4)
    rows = []
    for name in small + large if args.all else args.models:
        try:
            rows.append(
                measure(
                    name,
                    range(args.seeds),
                    args.multipliers,
                    not args.no_gradients,
                    args.repeats,
                    args.batch,
                    args.frozen,
                )
            )
        except Exception as error:  # the table goes on
            rows.append({"model": name, "error": f"{type(error).__name__}: {error}"})
            print(f"| {name} | {str(rows[-1]['error']).splitlines()[0]} |", flush=True)
        else:
            print(line(rows[-1]), flush=True)
            for message in rows[-1]["warnings"]:
                print(f"  warning: {message}", flush=True)
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
