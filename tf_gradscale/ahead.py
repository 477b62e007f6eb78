"""What is measured of activations while they are at hand, in the forward pass."""

from tf_gradscale.differentiable import is_watched
from tf_gradscale.passes import Passes
from tf_gradscale.xla import product_operand, under_xla


class Ahead:
    """The measurements of one forward pass, which the backward pass that follows finds made.

    XLA keeps what a condition reads until the condition is past. In the backward pass that would
    be every activation X, in float16, of which plain training keeps nothing on a processor: there
    XLA computes products of float16 in float32. Before the product X is there as XLA needs it. So
    that XLA does measure it then, the product depends on the measurement.

    Elsewhere, and where no tape records, all is measured in the backward pass.

    Args:
        registry: The `ScaleRegistry`.
        chooser: The `choose.Chooser`.

    Attributes:
        updating: Whether scales are chosen in this pass, a bool tensor; `None` if nothing was
            measured, and the backward pass is to find out.
    """

    def __init__(self, registry, chooser):
        self._registry, self._chooser = registry, chooser
        self.updating = None

    def measured(self, x, weight, axis):
        """Measures X of a product with a kernel W.

        Args:
            x: X, in the dtype in which it is multiplied.
            weight: W, a float32 tensor.
            axis: The channels of X, or `None` to take the norm of the whole.

        Returns:
            The largest Σx² of a channel (float32 scalar; of no meaning if the pass does not choose
            scales), or X itself if that is left to the backward pass; and W, to multiply X by.
        """
        config = self._registry.config
        if (
            not under_xla()
            or not self._chooser.placement.balanced
            or x.dtype.name != config.gradient_dtype
            or not is_watched([x, weight])
        ):
            return x, weight
        if self.updating is None:
            self.updating, self._one = Passes.of(config).due(self._registry.read())
        square, one = self._chooser.operand(product_operand(x), self.updating, self._one, axis)
        return square, weight * one
