"""When a model runs as Keras would: it predicts, or is exported. What is exported is float32."""

import contextlib
import threading

import keras
import tensorflow as tf

# keras.src, tensorflow.python: not exported; tests/test_platform.py notices if one goes.
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.eager import record
from tensorflow.python.saved_model.save_context import in_save_context


class _Mode(threading.local):
    plain = False
    exporting = False


_mode = _Mode()


@contextlib.contextmanager
def plain_forward():
    """Within this scope, in this thread, models run as Keras would: nothing is differentiated."""
    before, _mode.plain = _mode.plain, True
    try:
        yield
    finally:
        _mode.plain = before


@contextlib.contextmanager
def exporting():
    """Within this scope, in this thread, models run as they are exported."""
    before, _mode.exporting = _mode.exporting, True
    try:
        yield
    finally:
        _mode.exporting = before


def is_exported():
    """Whether what runs is to be served: `export`, or any other way to write a SavedModel.

    TensorFlow traces functions anew for a SavedModel, in a context of its own. One that takes
    gradients itself, with a tape, is still differentiated.
    """
    return _mode.exporting or (in_save_context() and not record.could_possibly_record())


def is_plain_forward():
    """Whether nothing is differentiated: a model predicts, is exported, or tried out by Keras."""
    return _mode.plain or in_symbolic_scope() or is_exported()


def plainly(call, *args, **kwargs):
    """Runs a model's `call` as Keras would.

    An exported model returns float32 where Keras' returns 16-bit floats, which few clients know.
    """
    outermost = is_exported() and not _mode.plain
    with plain_forward():
        outputs = call(*args, **kwargs)
    return keras.tree.map_structure(_in_float32, outputs) if outermost else outputs


def _in_float32(x):
    if not tf.is_tensor(x) or x.dtype not in (tf.float16, tf.bfloat16):
        return x
    y = tf.cast(x, tf.float32)
    mask = getattr(x, "_keras_mask", None)
    if mask is not None:
        y._keras_mask = mask
    return y
