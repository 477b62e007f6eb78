"""Where a training step's time goes: kernels under XLA, operations without.

    python benchmarks/kernel_times.py --model transformer --batch 128

A table of kinds of kernels, or of operations: how many there are in a step, and their milliseconds
in all, with Keras' LossScaleOptimizer and with gradient scaling between updates; those that differ
most come first. A kernel that runs on several threads is counted by the one that starts it, so that
the times do not add up to a step's. As TensorFlow's profiler has them.
"""

import argparse
import collections
import re
import tempfile
from pathlib import Path

import tensorflow as tf
from models import MODELS
from step_time import batch_for, compiled, settle, timed

# tensorflow.tsl: the profiler's files can be read with nothing else.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

# What contains others, or is not the step's own.
_AROUND = re.compile(
    r"Eager|TFE_|Executable|BlockUntilReady|one_step|ThunkExecutor|KernelAndDevice|Await|^end: "
    r"|convert_to_tensor|tf\.constant|ExecutorState|PartitionedCall|RunStep|FunctionRun"
)


def kinds(space, steps, jit):
    """By kind of kernel: how many in a step, and their milliseconds."""
    found = collections.defaultdict(lambda: [0.0, 0.0])
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if _AROUND.search(name) or (not jit and ":" not in name):
                    continue
                # Without the numbers that tell equal kernels apart; or the operation's own name.
                kind = re.sub(r"([_.]\d*)+$", "", name) if jit else name.split(":")[-1]
                found[kind][0] += 1 / steps
                found[kind][1] += event.duration_ps / 1e9 / steps
    return found


def profiled(model, method, jit, args):
    """The kinds of a model's step under one method."""
    network = compiled(model, method, jit, {"width": args.width, "size": args.size})
    x, y = batch_for(network, args.batch)
    timed(network, x, y)  # tracing and compiling
    settle(network, x, y)
    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
        with tf.profiler.experimental.Profile(folder, options=options):
            for _ in range(args.steps):
                network.train_on_batch(x, y)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return kinds(xplane_pb2.XSpace.FromString(file.read_bytes()), args.steps, jit)


def main():
    """Profiles both methods and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="residual", choices=MODELS)
    parser.add_argument("--jit", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--most", type=int, default=20, help="kinds to print")
    args = parser.parse_args()
    plain, ours = (profiled(args.model, m, bool(args.jit), args) for m in ("lso", "ours"))
    rows = sorted({*plain, *ours}, key=lambda kind: -abs(ours[kind][1] - plain[kind][1]))
    print(f"{'kind':<32} {'lso':>6} {'ms':>8} {'ours':>6} {'ms':>8} {'more ms':>8}")
    for kind in rows[: args.most]:
        (n, ms), (m, our_ms) = plain[kind], ours[kind]
        print(f"{kind[:32]:<32} {n:6.0f} {ms:8.2f} {m:6.0f} {our_ms:8.2f} {our_ms - ms:8.2f}")


if __name__ == "__main__":
    main()
