"""What both callbacks build on: which sites are watched, how they are read, and when."""

import re
from typing import NamedTuple

import keras
import numpy as np

from tf_gradscale.counters import RATES, Counters
from tf_gradscale.layers import GradientScaled
from tf_gradscale.model import GradientScaling
from tf_gradscale.optimizer import GradScaleOptimizer


class Snapshot(NamedTuple):
    """The sites that are watched, at one moment: an entry or row for each."""

    names: np.ndarray
    kinds: np.ndarray
    log2_scale: np.ndarray
    log2_cumulative_scale: np.ndarray
    # Of the rates since the last snapshot (`Counters.take`).
    sums: np.ndarray
    # NaN if the model's optimizer does not count them.
    skipped_steps: float


class _Part:
    """The sites of one registry that are watched.

    Args:
        prefix: What stands in front of their names.
        registry: The `ScaleRegistry`.
        sites: As in `ScaleMonitor`.
    """

    def __init__(self, prefix, registry, sites):
        self._prefix, self.registry, self._sites = prefix, registry, sites
        self.counters = None

    def count(self):
        """Begins to count rates. Returns the `Counters`."""
        self.counters = Counters(self._wants)
        self.registry.count(self.counters)
        return self.counters

    def stop(self):
        """Ends it."""
        if self.counters is not None:
            self.registry.counters.remove(self.counters)
            self.counters = None

    def _wants(self, site):
        if self._sites is None:
            return True
        if callable(self._sites):
            return bool(self._sites(site))
        return re.search(self._sites, self._name(site)) is not None

    def _name(self, site):
        return self._prefix + site.name

    def names(self, watched=True):
        """The names of the sites that are watched, or of all."""
        return [self._name(site) for site in self.registry if not watched or self._wants(site)]

    def columns(self):
        """The fields of a `Snapshot`, but the last."""
        chosen = [site for site in self.registry if self._wants(site)]
        sums = np.zeros((len(self.registry), 1 + len(RATES)))
        if self.counters is not None:
            sums = self.counters.take()
        names = np.array([self._name(site) for site in chosen], str)
        kinds = np.array([site.kind for site in chosen], str)
        arrays = self.registry.local(), self.registry.cumulative(), sums
        return names, kinds, *(array[[site.index for site in chosen]] for array in arrays)


class TrainFunction:
    """A model's train function, traced anew for each set of counters that are to count.

    So that a step in which nothing is counted is what it would be without counters: a condition in
    the graph would keep XLA from fusing operations.

    Args:
        model: The Keras model.
    """

    def __init__(self, model):
        self._model, self._functions = model, {}
        self.counters = []

    def __call__(self, iterator):
        """Trains for one call; what counts in it was made active before."""
        key = tuple(counters.active for counters in self.counters)
        try:
            if key not in self._functions:
                self._model.make_train_function(force=True)
                self._functions[key] = self._model.train_function
                self._model.train_function = self
            return self._functions[key](iterator)
        finally:
            for counters in self.counters:
                counters.active = False


class Watcher(keras.callbacks.Callback):
    """Has sites counted while a model trains, and knows when to look at them.

    Args:
        frequency, sites, rates: As in `ScaleMonitor`.

    Attributes:
        done: How many training steps there were.
    """

    def __init__(self, frequency, sites, rates):
        super().__init__()
        batches = isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0
        if frequency != "epoch" and not batches:
            raise ValueError(
                '`frequency` must be "epoch" or a positive number of batches. '
                f"Received: frequency={frequency!r}"
            )
        if not isinstance(rates, int) or rates < 0:
            raise ValueError(
                "`rates` must be True, False, or a number n, to count in every n-th batch. "
                f"Received: rates={rates!r}"
            )
        if sites is not None and not callable(sites):
            re.compile(sites)
        self.frequency, self.sites, self.rates = frequency, sites, rates
        self._parts, self.done, self._epoch_start = [], 0, 0

    def on_train_begin(self, logs=None):
        """Switches counting on."""
        # If the training before was interrupted.
        self.on_train_end()
        self._parts = [_Part(*found, self.sites) for found in _registries(self.model)]
        if all(part.registry.is_built for part in self._parts):
            self._check_sites()
        if not self.rates:
            return
        # Keras has its function by now, but has not called it in this training.
        if not isinstance(self.model.train_function, TrainFunction):
            self.model.train_function = TrainFunction(self.model)
        with self.model.distribute_strategy.scope():
            self.model.train_function.counters += [part.count() for part in self._parts]

    def on_train_end(self, logs=None):
        """Switches counting off: the next training is traced anew."""
        for part in self._parts:
            part.stop()
        if self._parts and self.rates:
            self.model.train_function = None
        self._parts = []

    def on_epoch_begin(self, epoch, logs=None):
        """Notes how many steps there were before."""
        self._epoch_start = self.done

    def on_train_batch_begin(self, batch, logs=None):
        """Has the steps that come counted, if one of them is to be: 0, n, 2n, ..."""
        before, n = self._epoch_start + batch, int(self.rates)
        if n and -(-before // n) * n < self._steps_with(batch):
            for part in self._parts:
                part.counters.active = True

    def on_train_batch_end(self, batch, logs=None):
        """Looks, if it is time to."""
        before, self.done = self.done, self._steps_with(batch)
        if self.frequency != "epoch" and self.done // self.frequency > before // self.frequency:
            self.look(logs)

    def look(self, logs):
        """What to do after every `frequency` batches."""
        raise NotImplementedError

    def _steps_with(self, batch):
        """How many steps there are with those of the execution that a batch belongs to."""
        size, most = self.model.steps_per_execution, self.params.get("steps") or np.inf
        # Keras names the first or the last batch of an execution, depending on its version.
        return self._epoch_start + int(min((batch // size + 1) * size, most))

    def snapshot(self):
        """A `Snapshot` of this moment; the next one's rates begin here."""
        self._check_sites()
        columns = zip(*(part.columns() for part in self._parts), strict=True)
        optimizer = self.model.optimizer
        counts = isinstance(optimizer, GradScaleOptimizer) and optimizer.built
        skipped = float("nan")
        if counts:
            skipped = float(keras.ops.convert_to_numpy(optimizer.skipped_steps))
        return Snapshot(*map(np.concatenate, columns), skipped)

    def _check_sites(self):
        if not any(part.names() for part in self._parts):
            names = [name for part in self._parts for name in part.names(watched=False)]
            raise ValueError(
                "`sites` must be a regular expression that is found in the names of some sites, "
                f"or a function that is true for some. The model's sites are {names}. "
                f"Received: sites={self.sites!r}"
            )


def _registries(model):
    """The registries of a model: of each what stands in front of its sites' names, and itself."""
    if isinstance(model, GradientScaling):
        return [("", _registry(model))]
    found, inside = [], set()
    for layer in model._flatten_layers(include_self=False):
        if id(layer) in inside or not isinstance(layer, (GradientScaling, GradientScaled)):
            continue
        found.append((f"{layer.name}/", _registry(layer)))
        inside.update(map(id, layer._flatten_layers(include_self=False)))
    if not found:
        raise TypeError(
            f"Model '{model.name}' has no scales to watch, nor any layer in it: make it with "
            "`tf_gradscale.convert`, and compile and train what that returns. "
            f"Received: a {type(model).__name__}"
        )
    return found


def _registry(layer):
    if isinstance(layer, GradientScaled):
        if not layer.built:
            raise ValueError(
                f"Layer '{layer.name}' must be built before its scales can be watched: call the "
                "model once before `fit`. Received: a layer that is not built"
            )
        return layer.scales
    # A model with a `call` of its own has a registry before there are sites in it.
    return layer.scales if layer._has_scales() else layer._gradscale.region.scales
