from lesson_code.cupy.causal_scan import causal_scan, choose_kernel

__all__ = ["causal_scan", "choose_kernel"]
