"""CUDA C++ kernels, compiled when they are first needed (compiled.py)."""
