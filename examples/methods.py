"""Ways to train: what the examples' --precision and --scaling mean, and what a run leaves behind.

--precision float32     all in float32; the reference
--precision bfloat16    mixed_bfloat16: float32's range, 8 bits of precision
--precision float16     mixed_float16, with
    --scaling none          gradients as they come
    --scaling fixed:2^K     the loss times 2^K, gradients divided by it
    --scaling dynamic[:N]   Keras' LossScaleOptimizer: halves its scale at an overflow, and
                            doubles it after N good steps (2000)
    --scaling paper[:S,C]   gradient scaling as published (S, C: the largest local and the
                            largest cumulative scale)
    --scaling balanced      gradient scaling by tf_gradscale's default
"""

import contextlib
import functools
import json
import platform
import re
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tf_gradscale as gs

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
VALIDATIONS = 4  # on the way, at equal distances; the last one is at the end
SCALINGS = "none, fixed:2^K, dynamic, dynamic:N, paper, paper:S,C, balanced"


class Method(NamedTuple):
    """A precision and a way to scale gradients, as on the command line."""

    precision: str
    scaling: str

    def __str__(self):
        return self.precision if self.scaling == "none" else f"{self.precision}, {self.scaling}"

    @property
    def loss_scale(self):
        """What the loss is multiplied by and gradients are divided by; 1 unless it is fixed."""
        kind, _, power = self.scaling.partition(":2^")
        return 2.0 ** int(power) if kind == "fixed" else 1.0

    def config(self):
        """The `gs.GradScaleConfig`, or `None` if gradients have no scales of their own."""
        kind, _, bounds = self.scaling.partition(":")
        if kind == "balanced":
            return gs.GradScaleConfig()
        if kind != "paper":
            return None
        names = ("scale_bound", "cumulative_bound")
        values = map(float, bounds.split(",")) if bounds else ()
        return gs.GradScaleConfig.paper(**dict(zip(names, values, strict=False)))


def parse(precision, scaling):
    """A `Method` from two command-line arguments.

    Raises:
        ValueError: If there is no such method.
    """
    number = r"[0-9]+(?:\.[0-9]+)?"
    forms = r"none|fixed:2\^-?[0-9]{1,2}|dynamic(:[1-9][0-9]*)?|balanced"
    forms += rf"|paper(:{number},{number})?"
    if not re.fullmatch(forms, scaling):
        raise ValueError(f"--scaling must be one of {SCALINGS}. Received: {scaling}")
    if precision != "float16" and scaling != "none":
        raise ValueError(
            f"--scaling is for float16; with --precision {precision} leave it at none. "
            f"Received: {scaling}"
        )
    return Method(precision, scaling)


def add_common_arguments(parser, data, learning_rate):
    """Adds the options that mean the same in all examples; `data` names the layouts it reads."""
    add = parser.add_argument
    add("--data", metavar="PATH", help=f"{data} (default: made by the program itself)")
    add("--scaling", metavar="HOW", help=f"{SCALINGS} (default: balanced; none if not float16)")
    add("--learning-rate", type=float, default=learning_rate, help="the highest (%(default)s)")
    add("--seed", type=int, default=0, help="of data, weights and batches")
    add("--json", metavar="PATH", help="write the metrics to a file")
    add("--verbose", type=int, default=1, help="of Keras' fit: 1 bars, 2 lines, 0 silent")


def add_arguments(parser, data, steps, learning_rate):
    """Adds the options of an example that trains once."""
    add_common_arguments(parser, data, learning_rate)
    add = parser.add_argument
    add("--precision", choices=POLICIES, default="float16", help="default: %(default)s")
    add("--steps", type=int, default=steps, help="default: %(default)s")
    add("--loss-multiplier", type=float, default=1.0, help="of the loss; undone by the optimizer")
    add("--validate", type=int, metavar="N", help="on N examples, evenly spread (default: on all)")
    add("--out", metavar="PNG", help="draw a picture")


def parsed(parser, argv=None):
    """Parses and checks a command line; `args.method` is the `Method`, or `None` for no choice."""
    args = parser.parse_args(argv)
    for name in ("steps", "learning_rate", "loss_multiplier", "batch", "epochs", "validate"):
        value = getattr(args, name, None)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive. Received: {value}")
    for name in ("json", "out"):
        folder = Path(getattr(args, name) or ".").parent
        if not folder.is_dir():
            parser.error(f"--{name} must name a file in a folder that exists. Received: {folder}")
    args.method = None
    if args.precision or args.scaling:
        precision = args.precision or "float16"
        scaling = args.scaling or ("balanced" if precision == "float16" else "none")
        try:
            args.method = parse(precision, scaling)
        except ValueError as error:
            parser.error(str(error))
    return args


def validated(args, count):
    """Which of `count` examples to validate on: as many as `--validate` says, evenly spread."""
    wanted = min(args.validate or count, count)
    return np.arange(wanted) * count // wanted


def epochs(args):
    """The number of epochs, each with a validation at its end; `args.steps` becomes a multiple."""
    count = min(VALIDATIONS, args.steps)
    args.steps = args.steps // count * count
    return count


def compiled(method, build, optimizer, loss, multiplier=1.0, seed=0, **kwargs):
    """A model to train by a method.

    Args:
        method: A `Method`.
        build: Function without arguments that makes the Keras model.
        optimizer: Function of keyword arguments that makes the optimizer, which gets a
            `loss_scale_factor` where the scale is fixed.
        loss: Function of (y_true, y_pred), or a dictionary of such by output.
        multiplier: What the loss is multiplied by.
        seed: Of the weights.
        **kwargs: Further arguments of `compile`.

    Returns:
        The compiled model.
    """
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(POLICIES[method.precision])
    model, config = build(), method.config()
    # Gradient scaling is this line; the rest of this function is for the other methods.
    if config is not None:
        model = gs.convert(model, config)
    options = {} if method.loss_scale == 1 else {"loss_scale_factor": method.loss_scale}
    optimizer = optimizer(**options)
    optimizer.apply = functools.partial(_apply_dense, optimizer.apply)
    if method.scaling.startswith("dynamic"):
        growth = int(method.scaling.partition(":")[2] or 2000)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=growth)
    model.compile(
        optimizer,
        _times(loss, multiplier),
        # Keras wraps the optimizer of a mixed_float16 model unless it is told not to.
        auto_scale_loss=False,
        jit_compile=True,  # float16 convolutions are several times faster with XLA on a processor
        **kwargs,
    )
    return model


def _apply_dense(apply, grads, trainable_variables=None):
    """`Optimizer.apply` of gradients none of which is sparse, as an embedding's is.

    Of a sparse one, Keras' Adam squares the parts before it adds them, and `loss_scale_factor`
    fails on it: methods could not be compared.
    """
    apply([tf.convert_to_tensor(g) for g in grads], trainable_variables)


def _times(loss, factor):
    """A loss, or each of a dictionary of losses, times a factor."""
    if isinstance(loss, dict):
        return {name: _times(one, factor) for name, one in loss.items()}

    def scaled(y_true, y_pred):
        return factor * loss(y_true, y_pred)

    return scaled


def lost_steps(model, steps):
    """How many of `steps` left the weights as they were, because a gradient was not finite."""
    if isinstance(model.optimizer, gs.GradScaleOptimizer):
        return int(model.optimizer.skipped_steps)
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        # It counts every step, the optimizer inside those that were applied.
        return steps - int(model.optimizer.iterations)
    return 0


def lost_entries(model, method, loss, multiplier, x, y):
    """The share of each gradient that is zero in float16 and not in float32.

    Args:
        model: The trained model.
        method: Its `Method`.
        loss: As for `compiled`.
        multiplier: Likewise; also that of a batch smaller than those that were trained on.
        x: Inputs of a batch.
        y: Its targets.

    Returns:
        Shares by the name of the tensor. For float16 without scales of gradients these are kept
        at 1, and the loss is multiplied by what the method multiplies it by. Empty for other
        precisions.
    """
    if method.precision != "float16":
        return {}
    optimizer = model.optimizer
    if method.config() is None:
        multiplier *= float(getattr(optimizer, "dynamic_scale", method.loss_scale))
        model, optimizer = gs.convert(model), "sgd"
        model.scales.freeze(lambda site: 1.0)
    model.compile(optimizer, _times(loss, multiplier), run_eagerly=True)
    # It prints a table, too.
    with contextlib.redirect_stdout(None):
        rows = gs.diagnose(model, x, y).tensors
    return {row.name: float(row.lost) for row in rows if not np.isnan(row.lost)}


class Costs(keras.callbacks.Callback):
    """What training takes, without validation; and what becomes of the scales.

    Attributes:
        first: Seconds of the first step, which compiles.
        seconds: Of all others.
        core_seconds: The processor's time for these, of all cores together. Other programs on the
            machine change it less.
        peak: The largest resident size of the process until training ended, in MiB.
        scales: At the end of each epoch, log2 of each site's scale.
    """

    def __init__(self):
        super().__init__()
        self.first, self.seconds, self.core_seconds, self.peak = None, 0.0, 0.0, None
        self.scales = []
        self._began = None

    def on_train_batch_begin(self, batch, logs=None):
        self._began = time.monotonic(), time.process_time()

    def on_train_batch_end(self, batch, logs=None):
        took = time.monotonic() - self._began[0]
        if self.first is None:
            self.first = took
        else:
            self.seconds += took
            self.core_seconds += time.process_time() - self._began[1]

    def on_epoch_end(self, epoch, logs=None):
        if isinstance(self.model.optimizer, gs.GradScaleOptimizer):
            self.scales.append([float(np.log2(site.scale)) for site in self.model.scales])

    def on_train_end(self, logs=None):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.peak = peak / (2**20 if sys.platform == "darwin" else 2**10)


def report(task, method, args, data, metric, history, model, costs, lost=None):
    """Prints what a run gave.

    Args:
        task: Name of the example.
        method: The `Method`.
        args: The program's arguments.
        data: Name of the data.
        metric: Name of the metric in `history` that decides.
        history: Of `fit`.
        model: The trained model.
        costs: The `Costs`, a callback of `fit`.
        lost: What `lost_entries` returned, if it was asked.

    Returns:
        All of it as a dictionary, for `write`.
    """
    hidden = ("method", "out", "json", "verbose")
    options = {name: value for name, value in vars(args).items() if name not in hidden}
    found = {
        "task": task,
        "method": list(method),
        "data": data,
        "options": options,
        "metric": metric,
        "final": history[metric][-1],
        "history": history,
        "steps_lost": lost_steps(model, args.steps),
        "lost_entries": lost or {},
        "seconds_first_step": costs.first,
        "seconds": costs.seconds,
        "core_seconds": costs.core_seconds,
        "peak_mib": costs.peak,
        "scales": [
            (site.name, site.kind, site.scale, site.cumulative_scale)
            for site in getattr(model, "scales", ())
        ],
        "log2_scales_by_epoch": costs.scales,
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
        },
    }
    said = f"at most {max(lost.values()):.2%} of a gradient's entries lost, " if lost else ""
    print(
        f"{method}: {metric} {found['final']:.4f}, {found['steps_lost']} of {args.steps} "
        f"steps lost, {said}{found['seconds']:.0f} s and {costs.first:.0f} s for the first step"
    )
    return found


def machine():
    """The processor by its name and, where the system tells, its widest vectors."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"model name\s*: (.*)", said)
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in said), "")
    return " ".join(filter(None, (model and model[1], platform.machine(), widest)))


def write(path, found):
    """Writes what was found as JSON."""
    Path(path).write_text(json.dumps(found, indent=1, default=float), encoding="utf-8")
