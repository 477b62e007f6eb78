"""Training on several replicas, and on several worker processes of this machine.

As a program it is one worker of those that TF_CONFIG names. All of them train one small network
for a few steps, each on its share of every batch, and leave what they saw in files.
"""

import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_gradscale as gs

layers = keras.layers
BATCH, CLASSES = 8, 3
# Loss weights of the two halves of a batch: so far apart, each replica needs scales of its own.
WEIGHTS = (1.0, 2.0**-16)
# A weight that no scale chosen for the others can make up for, in a pass that chooses none.
HUGE = 2.0**100
# What is huge in each step: no half of the batch, its second, its first, or both.
STEPS = ("", "", "", "second", "", "first", "", "both", "", "")
GOOD = [step for step, huge in enumerate(STEPS) if not huge]
# After so many skipped steps in a row training stops.
MAX_SKIPS = 3


def network(policy, middle=layers.LayerNormalization):
    """A small classifier with the same weights under every policy."""
    with gs.policy_scope(policy):
        inputs = keras.Input((6,))
        x = layers.Dense(8, activation="tanh")(inputs)
        x = layers.Concatenate()([x, middle()(x)])
        x = layers.Dense(CLASSES)(x)
        model = keras.Model(inputs, layers.Activation("softmax", dtype="float32")(x))
    set_weights(model)
    return model


def set_weights(model):
    """Random values for the trainable variables, the same for all models."""
    rng = np.random.default_rng(2)
    for variable in model.trainable_variables:
        mean = variable if len(variable.shape) == 1 else 0.0
        variable.assign(mean + 0.4 * rng.standard_normal(variable.shape).astype("float32"))


def convert(model):
    """The model, gradient-scaled."""
    return gs.convert(model, gs.GradScaleConfig(max_skips=MAX_SKIPS))


def batch(step):
    """The batch of a step: inputs, classes and weights."""
    rng = np.random.default_rng(step)
    half = BATCH // 2
    weights = np.repeat(WEIGHTS, half).astype("float32")
    if STEPS[step] in ("first", "both"):
        weights[:half] = HUGE
    if STEPS[step] in ("second", "both"):
        weights[half:] = HUGE
    return rng.standard_normal((BATCH, 6)).astype("float32"), np.arange(BATCH) % CLASSES, weights


class Loop:
    """A training loop over the replicas of a strategy.

    Args:
        strategy: The `tf.distribute.Strategy`; each of its replicas gets a part of every batch.
        model: The model, made in its scope.
        optimizer: The optimizer, likewise; `None` for gradients only.
    """

    def __init__(self, strategy, model, optimizer=None):
        self.strategy, self.model, self.optimizer = strategy, model, optimizer
        self._run = tf.function(lambda *data: strategy.run(self._on_one_replica, args=data))

    def _on_one_replica(self, x, y, weights):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self.model(x, training=True))
            loss = tf.reduce_sum(weights * losses) / BATCH
        gradients = tape.gradient(loss, [v.value for v in variables])
        if self.optimizer is not None:
            self.optimizer.apply(gradients, variables)
        replica = tf.distribute.get_replica_context()
        several = replica.num_replicas_in_sync > 1
        return gradients, replica.all_reduce("sum", gradients) if several else gradients

    def __call__(self, arrays):
        """One step on a batch of all replicas.

        Returns:
            For each replica of this process, its own gradients; and the sum over all replicas.
        """
        strategy = self.strategy

        def distributed(array):
            parts = np.split(array, strategy.num_replicas_in_sync)
            return strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(parts[context.replica_id_in_sync_group])
            )

        own, reduced = self._run(*map(distributed, arrays))
        own = zip(*(strategy.experimental_local_results(g) for g in own), strict=True)
        reduced = [strategy.experimental_local_results(g)[0].numpy() for g in reduced]
        return [[g.numpy() for g in gradients] for gradients in own], reduced


def free_ports(count):
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("localhost", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_workers(program, *arguments, folder, count=2, timeout=180):
    """Runs a program in several processes, each of which is one worker of a cluster.

    Args:
        program: Path of the program.
        *arguments: Its arguments.
        folder: Where it runs.
        count: How many workers.
        timeout: After so many seconds all are killed.

    Returns:
        What each printed.

    Raises:
        AssertionError: If one failed or took too long; says what all of them printed.
    """
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(count)]}
    # The package that is tested, installed or not.
    paths = [str(pathlib.Path(gs.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    processes = []

    def start(index):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        return subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            cwd=folder,
            env={
                **os.environ,
                "TF_CONFIG": json.dumps(task),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "CUDA_VISIBLE_DEVICES": "",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill_all():
        for process in processes:
            process.kill()

    def output(process):
        try:
            return process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            kill_all()
            return f"{process.communicate()[0]}\nkilled after {timeout} s"
        finally:
            # The others would wait for one that failed.
            if process.returncode != 0:
                kill_all()

    try:
        processes += map(start, range(count))
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            outputs = list(threads.map(output, processes))
    finally:
        kill_all()
    if any(process.returncode for process in processes):
        raise AssertionError(
            "\n".join(
                f"--- worker {index}, exit status {process.returncode}\n{printed}"
                for index, (process, printed) in enumerate(zip(processes, outputs, strict=True))
            )
        )
    return outputs


# --- What a worker does --------------------------------------------------------------------------


def train(strategy, steps):
    """Trains from the start, by an optimizer that is built in the first step; returns arrays."""
    with strategy.scope():
        model = convert(network("mixed_float16"))
        optimizer = gs.GradScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.5), scales=model.scales
        )
    loop = Loop(strategy, model, optimizer)
    return {**record(loop, steps), "stopped": until_it_stops(loop)}


def until_it_stops(loop):
    """Runs a step with an input that is not finite, until there is an error.

    Returns how many steps that took, and what it says.
    """
    x, *rest = batch(0)
    x[-1] = np.nan
    for count in range(1, 2 * MAX_SKIPS):
        try:
            loop([x, *rest])
        except (FloatingPointError, tf.errors.InvalidArgumentError) as error:
            return f"{count}: {error}"
    return "never"


def resume(strategy, steps, path, index):
    """Trains from a checkpoint, if there is one, and writes the next; returns arrays."""
    with strategy.scope():
        model = convert(network("mixed_float16"))
        optimizer = gs.GradScaleOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.5), scales=model.scales
        )
        optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    if path.with_suffix(".index").exists():
        checkpoint.read(str(path)).assert_existing_objects_matched()
    seen = record(Loop(strategy, model, optimizer), steps)
    # All workers must take part; what the others write is of no use.
    checkpoint.write(str(path if index == 0 else path.with_name(f"unused-{index}")))
    return seen


def record(loop, steps):
    """Runs steps; by name and step, what a worker has after each."""
    model, optimizer = loop.model, loop.optimizer
    seen = {}
    for step in steps:
        (own,), reduced = loop(batch(step))
        lists = {"own": own, "reduced": reduced, "weights": model.get_weights()}
        for name, arrays in lists.items():
            seen |= {f"{name}/{step}/{i}": array for i, array in enumerate(arrays)}
        seen[f"counts/{step}"] = [optimizer.applied_steps.numpy(), optimizer.skipped_steps.numpy()]
        seen[f"scales/{step}"] = [site.scale for site in model.scales]
    return seen


def fit(strategy):
    """`fit` with plain Keras and with ours; returns the weights, or why it cannot be done."""
    arrays = [np.concatenate(arrays) for arrays in zip(*map(batch, range(3)), strict=True)]
    data = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(BATCH)
    seen = {}
    for name, policy in (("plain", "float32"), ("ours", "mixed_float16")):
        with strategy.scope():
            model = network(policy)
            model = gs.convert(model) if name == "ours" else model
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        try:
            model.fit(data, shuffle=False, verbose=0)
        except Exception as error:
            if name == "ours":
                raise
            return {"error": f"{type(error).__name__}: {error}"}
        seen |= {f"{name}/{i}": weight for i, weight in enumerate(model.get_weights())}
    counts = model.optimizer.applied_steps, model.optimizer.skipped_steps
    return {**seen, "counts": [count.numpy() for count in counts]}


def main(mode, folder):
    """One worker: does one of the above and writes what it returns."""
    # Before anything else: the workers wait for each other here.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index, folder = strategy.cluster_resolver.task_id, pathlib.Path(folder)
    if mode == "train":
        seen = train(strategy, range(len(STEPS)))
    elif mode == "fit":
        seen = fit(strategy)
    else:
        steps = {"first": range(5), "last": range(5, len(STEPS))}[mode]
        seen = resume(strategy, steps, folder / "checkpoint", index)
    np.savez(folder / f"{mode}-{index}.npz", **seen)


if __name__ == "__main__":
    main(*sys.argv[1:])
