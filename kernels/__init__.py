"""Octavo's kernels and their plain-PyTorch references. Imports torch and triton only; packed as `octavo.kernels`."""
