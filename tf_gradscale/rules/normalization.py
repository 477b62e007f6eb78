"""Normalisations: float32 inside, so that their input is a cast (f_T)."""

import keras
import tensorflow as tf

# keras.src: AutocastScope is not exported; tests/test_platform.py notices if it goes.
from keras.src.backend import AutocastScope

from tf_gradscale.rules.base import known_class
from tf_gradscale.rules.carry import Carry


class Normalization(Carry):
    """A normalisation layer of Keras, which casts its float16 input to float32 and back.

    It is run on the float32 input itself and with its variables rounded but not cast, which
    gives the same outputs, bit for bit. Gradients then arrive in float32: those of variables stay
    so (γ's is a sum over a whole feature map, which float16 could not hold), and that of the
    input is scaled and cast like any other (lines 8 to 12 of Algorithm 1).
    """

    direct = True
    sums = True
    cast_model = "normal"

    @classmethod
    def takes(cls, operation):
        """Whether the operation is such a layer, unchanged by a subclass."""
        return (
            known_class(operation, LAYERS) is not None
            and operation.compute_dtype == "float16"
            and operation.variable_dtype == "float32"
            and not getattr(operation, "synchronized", False)
            and not getattr(operation, "renorm", False)
        )

    def input_dtype(self):
        return "float32"

    def forward(self, inputs, call):
        dtype = self.operation.compute_dtype

        def run(inputs):
            with _Rounding(dtype):
                return tf.cast(call(inputs, method=self.operation.call), dtype)

        return super().forward(inputs, run)


class _Rounding(AutocastScope):
    """Gives variables rounded to a dtype as float32, with the gradient of the identity."""

    def maybe_cast(self, value):
        value = tf.convert_to_tensor(value)
        if not value.dtype.is_floating:
            return value
        rounded = tf.cast(tf.cast(value, self.dtype), value.dtype)
        return value + tf.stop_gradient(rounded - value)


_NAMES = ["BatchNormalization", "LayerNormalization", "GroupNormalization"]
if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 11):
    # Before, it computed in float16.
    _NAMES.append("RMSNormalization")
LAYERS = tuple(getattr(keras.layers, name) for name in _NAMES)
