"""Thousands of steps with faults injected at random, killed and resumed: what is lost?

    python benchmarks/soak.py --steps 4000 --json docs/soak.json

A small network is trained in a process of its own, which is killed (SIGKILL) at random steps and
started again, and goes on from the last file that it saved. At random steps a batch is spoiled:
inputs or targets that are not finite; a loss 10^6 times as large, of all examples or of one; a loss
of zero. Then the same network is trained without interruption on the same batches, less those that
cannot be used (inputs and targets that are not finite). Printed are how many steps were skipped,
how many of them need not have been, and how far the weights of the two are apart: in float32 by no
bit, in float16 by what different scales round differently.
"""

import argparse
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import tf_gradscale as gs

BATCH, EPOCH = 16, 50
# What happens to a batch, and how often.
FAULTS = {"inputs": 0.01, "targets": 0.01, "spike": 0.01, "spike of one": 0.01, "zeros": 0.01}
UNUSABLE = ("inputs", "targets")


def faults(steps, seed):
    """What happens to each batch: a name out of `FAULTS`, or ``""``."""
    rng = np.random.default_rng(seed)
    names, rates = list(FAULTS), list(FAULTS.values())
    return rng.choice([*names, ""], steps, p=[*rates, 1 - sum(rates)])


def batches(steps, seed, clean):
    """All batches, spoiled; or those that can be used, if `clean`."""
    rng = np.random.default_rng(seed + 1)
    truth = rng.normal(size=(8, 4)).astype("float32")
    xs, ys, weights = [], [], []
    for fault in faults(steps, seed):
        x = rng.normal(size=(BATCH, 8)).astype("float32")
        y = np.tanh(x @ truth)
        weight = np.ones(BATCH, "float32")
        if fault == "inputs":
            x[rng.integers(BATCH), rng.integers(8)] = rng.choice([np.nan, np.inf])
        elif fault == "targets":
            y[rng.integers(BATCH)] = np.inf
        elif fault == "spike":
            weight[:] = 1e6
        elif fault == "spike of one":
            weight[rng.integers(BATCH)] = 1e6
        elif fault == "zeros":
            weight[:] = 0.0
        if not (clean and fault in UNUSABLE):
            xs.append(x)
            ys.append(y)
            weights.append(weight)
    return [np.concatenate(a) for a in (xs, ys, weights)]


def network(policy):
    """Two hidden layers. Steps are clipped: a loss 10^6 times as large is one step among others."""
    keras.utils.set_random_seed(0)
    with gs.policy_scope(policy):
        inputs = x = keras.Input((8,))
        for _ in range(2):
            x = keras.layers.Dense(32, activation="tanh")(x)
        model = gs.convert(keras.Model(inputs, keras.layers.Dense(4)(x)))
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 20000)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9, clipnorm=0.1), "mse")
    return model


class Killed(keras.callbacks.Callback):
    """Ends the process, as the system would, at steps that a file names.

    Args:
        path: The file, a JSON list.
        first: The number of the first step.
    """

    def __init__(self, path, first):
        super().__init__()
        self._path, self._first = path, first

    def on_train_batch_end(self, batch, logs=None):
        due = json.loads(self._path.read_text())
        if due and self._first + batch >= due[0]:
            self._path.write_text(json.dumps(due[1:]))
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, steps, seed, policy):
    """Trains with faults, from the last file on; leaves weights and counters in another."""
    saved, epoch = folder / "model.keras", 0
    if saved.exists():
        model = keras.saving.load_model(saved)
        epoch = json.loads((folder / "epoch.json").read_text())
    else:
        model = network(policy)
    data = batches(steps, seed, clean=False)
    size = EPOCH * BATCH
    while epoch * size < len(data[0]):
        x, y, weight = (a[epoch * size : (epoch + 1) * size] for a in data)
        killed = Killed(folder / "kills.json", epoch * EPOCH)
        fit(model, x, y, weight, callbacks=[killed])
        epoch += 1
        model.save(folder / "next.keras")
        os.replace(folder / "next.keras", saved)
        (folder / "epoch.json").write_text(json.dumps(epoch))
    optimizer = model.optimizer
    counts = [optimizer.applied_steps.numpy(), optimizer.skipped_steps.numpy()]
    np.savez(folder / "end.npz", *model.get_weights(), counts=counts)


def fit(model, x, y, weight, **kwargs):
    """One pass over the batches in their order."""
    model.fit(x, y, sample_weight=weight, batch_size=BATCH, shuffle=False, verbose=0, **kwargs)


def soak(policy, steps, seed, kills):
    """Runs both; returns what is printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rng = np.random.default_rng(seed + 2)
        (folder / "kills.json").write_text(
            json.dumps(sorted(rng.integers(steps, size=kills).tolist()))
        )
        command = [sys.executable, __file__, "--child", name, "--policy", policy]
        command += ["--steps", str(steps), "--seed", str(seed)]
        starts = 1
        while (code := subprocess.run(command, check=False).returncode) == -signal.SIGKILL:
            starts += 1
        if code:
            raise RuntimeError(f"Expected the training to end. Received: exit status {code}")
        with np.load(folder / "end.npz") as end:
            applied, skipped = end["counts"].tolist()
            found = [end[key] for key in end.files if key != "counts"]
    model = network(policy)
    fit(model, *batches(steps, seed, clean=True))
    wanted = model.get_weights()
    unusable = int(np.isin(faults(steps, seed), UNUSABLE).sum())
    apart = max(
        np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, wanted, strict=True)
    )
    return {
        "policy": policy,
        "steps": steps,
        "spoiled": int((faults(steps, seed) != "").sum()),
        "unusable": unusable,
        "starts": starts,
        "applied": applied,
        "skipped": skipped,
        "lost without need": skipped - unusable,
        "finite": bool(all(np.all(np.isfinite(w)) for w in found)),
        "equal bits": bool(all(map(np.array_equal, found, wanted))),
        "largest relative distance": float(apart),
        "loss": loss(found, steps, seed),
        "loss without faults": loss(wanted, steps, seed),
    }


def loss(weights, steps, seed):
    """The loss in float32 on the last batches that can be used."""
    model = network("float32")
    model.set_weights(weights)
    x, y, _ = (a[-200 * BATCH :] for a in batches(steps, seed, clean=True))
    return float(np.mean((model.predict(x, verbose=0) - y) ** 2))


def main():
    """Prints the table, and writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        train(pathlib.Path(args.child), args.steps, args.seed, args.policy)
        return
    print(
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} CPU cores\n"
    )
    rows = []
    for policy in ("float32", "mixed_float16"):
        start = time.perf_counter()
        rows.append(soak(policy, args.steps, args.seed, args.kills))
        rows[-1]["seconds"] = round(time.perf_counter() - start)
    print("| | " + " | ".join(row.pop("policy") for row in rows) + " |\n| --- |" + " --- |" * 2)
    for key in rows[0]:
        values = [row[key] for row in rows]
        shown = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in values]
        print(f"| {key} | " + " | ".join(shown) + " |")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
