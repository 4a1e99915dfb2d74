"""Linear attention, decay, delta rules and WKV as CUDA kernels, which run without a GPU as well.

**Arrays.** The functions take CuPy arrays or CUDA torch tensors, all of one kind and one dtype:
float32, float16 or bfloat16; float64 is refused. Sums are kept in float32, and states are float32;
one that is passed may also have the dtype of the arrays. Leading dimensions broadcast as in
``matmul``. Results are of the kind of the arguments, on their device; a state is that of
``lesson_code.torch`` for tensors, otherwise that of ``lesson_code.numpy``.

**Memory.** Kernels run on the caller's current stream and read arrays where they lie, through their
strides; what is broadcast is not repeated. Copied is only what a kernel cannot step through: rows
whose numbers lie apart, or leading dimensions with more than two strides (those of (B, N, H, C)
turned to (B, H, N, C) have two).

**Gradients.** On tensors the functions are differentiable, once, in reverse mode, in all arguments,
through outputs and states; ``torch.compile`` and ``torch.func`` take each as one operator.

**Without a GPU.** With ``device="cpu"`` the functions take NumPy arrays (bfloat16 is that of the
package ``ml_dtypes``) or torch CPU tensors, and run the same kernels, compiled as C++ and emulated
(:mod:`lesson_code.cupy.emulator`): exact, thread by thread, and so thousands of times slower. It is
for reading, for testing and for counting.

**Errors.** TypeError for an array of another kind or dtype, ValueError for shapes, devices and
values that do not fit; ImportError where CuPy is missing, RuntimeError where ``device="cpu"`` finds
no C++ compiler, both of which say what to install. The import needs NumPy alone.
"""

from lesson_code.cupy.decay import decaying_scan
from lesson_code.cupy.delta import delta_scan
from lesson_code.cupy.linear import causal_scan, choose_kernel
from lesson_code.cupy.wkv import wkv

__all__ = ["causal_scan", "choose_kernel", "decaying_scan", "delta_scan", "wkv"]
