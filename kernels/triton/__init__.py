"""Triton kernels, one operation a file; each has a plain-PyTorch twin in `kernels.reference`."""
