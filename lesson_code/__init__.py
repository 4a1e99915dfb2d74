"""Linear attention, from the softmax to the recurrence: the code of the book.

Each way of writing it is a subpackage with the same names inside, so that a chapter's function can
be compared line by line:

``lesson_code.numpy``
    The equations, a few lines each; NumPy is all that it needs.
``lesson_code.torch``
    The same on PyTorch: any device, differentiable, fast, with modules to train and decode.
``lesson_code.cupy``
    Linear attention, decay and WKV as CUDA kernels, which also run without a GPU, and are counted.

``import lesson_code`` itself imports nothing else.
"""

__version__ = "0.14.0"
