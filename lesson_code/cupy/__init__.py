from lesson_code.cupy.causal_scan import causal_scan, choose_kernel
from lesson_code.cupy.wkv import wkv

__all__ = ["causal_scan", "choose_kernel", "wkv"]
