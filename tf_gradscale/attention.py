"""`keras.ops.dot_product_attention` as its two products and the softmax between them.

The same operations as in Keras' TensorFlow backend, so that outputs are the same, bit for bit.
"""

import keras
import tensorflow as tf


class Product(keras.Operation):
    """An einsum of two activations.

    Args:
        equation: As for `tf.einsum`.
    """

    def __init__(self, equation, name):
        super().__init__(name=name)
        self.subscripts = equation

    def call(self, a, b):
        """The product."""
        return tf.einsum(self.subscripts, a, b, optimize="optimal")


class AttentionWeights(keras.Operation):
    """From logits to attention weights: scale, bias, mask and softmax, all in float32.

    Args:
        is_causal: Whether a position attends to no later one.
        dtype: The dtype of the weights.
    """

    compute_dtype = "float32"
    # The cast that its gradient goes through is measured.
    is_neutral = True

    def __init__(self, is_causal, dtype):
        super().__init__(name="softmax")
        self.is_causal, self.dtype = is_causal, dtype

    def call(self, logits, depth, bias=None, mask=None, scale=None):
        """The weights; all tensors broadcast to logits of shape (batch, heads, queries, keys)."""
        logits = tf.cast(logits, tf.float32)
        if scale is None:
            scale = 1.0 / tf.sqrt(tf.cast(depth, tf.float32))
        logits = tf.multiply(logits, tf.cast(scale, tf.float32))
        if bias is not None:
            logits = tf.add(logits, tf.cast(bias, tf.float32))
        if mask is not None or self.is_causal:
            attended = tf.ones_like(logits, dtype=tf.bool)
            if mask is not None:
                attended = tf.logical_and(attended, mask)
            if self.is_causal:
                square = tf.ones(tf.shape(logits)[2:], tf.bool)
                attended = tf.logical_and(attended, tf.linalg.band_part(square, -1, 0))
            # What Keras puts in place of masked logits, in float32.
            logits = tf.where(attended, logits, tf.constant(3.38953e38 * -0.7, tf.float32))
        return tf.cast(tf.nn.softmax(logits, axis=-1), self.dtype)


def decompose(is_causal, query, key, value, bias=None, mask=None, scale=None):
    """Attention on Keras tensors of shape (batch, positions, heads, depth).

    Returns:
        The Keras tensor of the result; `None` if it is a case that is not taken apart.
    """
    tensors = [x for x in (query, key, value, bias) if x is not None]
    same = len({x.dtype for x in tensors}) == 1 and "float" in query.dtype
    if not same or query.shape[2] != key.shape[2] or key.shape[3] is None:
        return None
    logits = Product("BTNH,BSNH->BNTS", "logits")(query, key)
    softmax = AttentionWeights(is_causal, key.dtype)
    weights = softmax(logits, key.shape[3], bias=bias, mask=mask, scale=scale)
    return Product("BNTS,BSNH->BTNH", "output")(weights, value)
