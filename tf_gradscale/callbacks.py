"""Keras callbacks that show what the scales do: as logs of a training, and as arrays and a plot."""

import numpy as np

from tf_gradscale import plotting
from tf_gradscale.counters import RATES, means
from tf_gradscale.watcher import Watcher

__all__ = ["ScaleHistory", "ScaleMonitor"]


class ScaleMonitor(Watcher):
    """Puts scales and rates into the logs of a training, for the callbacks behind it.

    `History` has them always. `CSVLogger`, `TensorBoard` and others must be listed behind it. The
    progress bar prints all that is in the logs: to keep it short, list a
    `keras.callbacks.ProgbarLogger` before it, or choose `sites`.

    For each site, a float:

    - `log2_scale/<site>`: log2 of β, the local scale (dimensionless, a power of two, multiplies the
      gradient); `log2_cumulative_scale/<site>`: that of α, the product of all β from the loss on.
    - `underflow/<site>`: rate of entries at or below λ_min (Eq. 1; λ_min is
      `GradScaleConfig.smallest`). `lost/<site>`: of those that become zero when they are rounded to
      the gradient's format, about half as many. `overflow/<site>`: of those that are not finite
      there. Rates are fractions of the entries that are neither zero nor infinite in float32, and
      means over the passes that were counted; NaN if there was nothing to count. Of a `measured`
      site only the rounded gradient is known: what is lost there is not, and left out.

    And `skipped_steps`: how many steps the optimizer has skipped in all.

    With several replicas, scales are the first one's; rates are means over all.

    Args:
        frequency: `"epoch"`, or a number of batches: every so many there are values in the logs of
            the batch as well, with rates since the last time. At the end of an epoch there always
            are, with rates of the whole epoch.
        sites: Which sites: a regular expression that is searched for in their names, or a function
            of a `Site`; `None` for all.
        rates: Whether to count rates: `True`, in each batch; a number n, in every n-th batch (a
            backward pass that is counted does each product once more, in float32); `False`.

    Raises:
        ValueError: If an argument is outside its domain, or `sites` chooses none.
        TypeError: In training, if the model is not gradient-scaled, nor anything in it.

    Example:

    >>> model = convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")]))
    >>> model.compile("sgd", "mse")
    >>> monitor = ScaleMonitor(sites="input")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0, callbacks=[monitor])
    >>> history.history["log2_scale/dense/input"], history.history["skipped_steps"]
    ([0.0], [0.0])
    """

    def __init__(self, frequency="epoch", sites=None, rates=True):
        super().__init__(frequency, sites, rates)
        # Nothing is done after batches: Keras need not wait for them.
        self.async_safe = frequency == "epoch"
        self._epoch_sums = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        """Begins the rates of an epoch."""
        super().on_epoch_begin(epoch, logs)
        self._epoch_sums = 0.0

    def look(self, logs):
        """Puts the values of a batch into `logs`."""
        snapshot = self.snapshot()
        self._epoch_sums += snapshot.sums
        logs.update(self._logs(snapshot, snapshot.sums))

    def on_epoch_end(self, epoch, logs=None):
        """Puts the values of the epoch into `logs`."""
        snapshot = self.snapshot()
        logs.update(self._logs(snapshot, self._epoch_sums + snapshot.sums))

    def _logs(self, snapshot, sums):
        columns = {
            "log2_scale": snapshot.log2_scale,
            "log2_cumulative_scale": snapshot.log2_cumulative_scale,
        }
        if self.rates:
            columns.update(means(sums))
        logs = {
            f"{field}/{name}": float(value)
            for field, column in columns.items()
            for name, kind, value in zip(snapshot.names, snapshot.kinds, column, strict=True)
            if (field, kind) != ("lost", "measured")
        }
        if not np.isnan(snapshot.skipped_steps):
            logs["skipped_steps"] = snapshot.skipped_steps
        return logs


def _column(field):
    return property(lambda self: np.array([row[field] for row in self._rows]))


class ScaleHistory(Watcher):
    """Keeps scales and rates as arrays, with a row for each time T and a column for each site S.

    Args:
        frequency: A number of batches between two rows, or `"epoch"`.
        sites: As in `ScaleMonitor`.
        rates: As in `ScaleMonitor`. The rates of a row are means since the one before.

    Attributes:
        names: Names of the sites, a list, in the order in which backpropagation meets them.
        kinds: Their kinds, a list.
        steps: After how many training steps each row was taken, (T,).
        skipped_steps: How many steps the optimizer had skipped in all, (T,).
        scales: β, the local scales (dimensionless, powers of two, multiply the gradient), (T, S).
        cumulative_scales: α, the product of all β from the loss to the site, (T, S).
        underflow, lost, overflow: Rates, as in `ScaleMonitor`, (T, S); NaN if nothing was counted.

    Raises:
        ValueError, TypeError: As `ScaleMonitor`; and if it is used for another model.

    Example:

    >>> model = convert(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")]))
    >>> model.compile("sgd", "mse")
    >>> scales = ScaleHistory(frequency=2)
    >>> _ = model.fit(np.ones((8, 4)), np.ones((8, 2)), 1, verbose=0, callbacks=[scales])
    >>> scales.steps.tolist(), scales.scales.shape, scales.names
    ([2, 4, 6, 8], (4, 2), ['dense/kernel', 'dense/input'])

    Reference:
        Zhao et al., *Reducing Underflow in Mixed Precision Training by Gradient Scaling*,
        IJCAI 2020, Figures 2 and 3b.
    """

    def __init__(self, frequency=10, sites=None, rates=True):
        super().__init__(frequency, sites, rates)
        self.names, self.kinds, self._rows = [], [], []

    def on_epoch_end(self, epoch, logs=None):
        """Takes a row after each epoch, if that was asked for."""
        if self.frequency == "epoch":
            self.look(logs)

    def look(self, logs):
        """Takes a row."""
        snapshot = self.snapshot()
        if not self._rows:
            self.names, self.kinds = snapshot.names.tolist(), snapshot.kinds.tolist()
        elif self.names != snapshot.names.tolist():
            raise ValueError(
                "A ScaleHistory keeps the scales of one model; make a new one for another. "
                f"Received: a model with sites {snapshot.names.tolist()}, after one with "
                f"{self.names}"
            )
        rates = means(snapshot.sums)
        rates["lost"][snapshot.kinds == "measured"] = np.nan
        row = {
            "steps": self.done,
            "skipped_steps": snapshot.skipped_steps,
            "scales": np.exp2(snapshot.log2_scale.astype("float64")),
            "cumulative_scales": np.exp2(snapshot.log2_cumulative_scale.astype("float64")),
            **rates,
        }
        self._rows.append(row)

    steps = _column("steps")
    skipped_steps = _column("skipped_steps")
    scales = _column("scales")
    cumulative_scales = _column("cumulative_scales")
    underflow = _column("underflow")
    lost = _column("lost")
    overflow = _column("overflow")

    def save(self, path):
        """Writes all attributes to an `.npz` file, for `numpy.load`."""
        fields = ("steps", "skipped_steps", "scales", "cumulative_scales", *RATES)
        arrays = {field: getattr(self, field) for field in fields}
        np.savez(path, names=self.names, kinds=self.kinds, **arrays)

    def plot(self, path=None):
        """Draws what the paper's Figures 3b and 2 show, and the rates.

        Three panels with a line for each site, the first one of backpropagation on top: the local
        scales over the steps; their means and ranges (bars, and the cumulative scales as dots); and
        the mean rates, if these were counted.

        Args:
            path: Where to save the figure, or `None`.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If there is no row yet.
        """
        if not self._rows:
            raise ValueError(
                "There is nothing to draw before a row was taken: train with this callback for at "
                f"least `frequency` batches. Received: frequency={self.frequency!r}, and no row"
            )
        rates = {name: getattr(self, name) for name in RATES} if self.rates else {}
        figure = plotting.draw(
            self.names, self.steps, np.log2(self.scales), np.log2(self.cumulative_scales), rates
        )
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure
