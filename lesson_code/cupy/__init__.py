"""Linear attention and WKV as CUDA kernels, started by CuPy, and run without a GPU as well.

The functions take CuPy arrays or CUDA torch tensors in float32, float16 or bfloat16, and keep their
sums in float32; on tensors they are differentiable. With ``device="cpu"`` they take NumPy arrays or
torch CPU tensors and run the same kernels, compiled as C++: slowly, but every access to memory can
be counted and every race found (``lesson_code.cupy.emulator``).

NumPy is all that the import needs. On a GPU the calls need CuPy, without one a C++ compiler.
"""

from lesson_code.cupy.linear import causal_scan, choose_kernel
from lesson_code.cupy.wkv import wkv

__all__ = ["causal_scan", "choose_kernel", "wkv"]
