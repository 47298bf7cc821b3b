"""Plain-PyTorch references: what each kernel must compute, on any device. Slow, short, and the last word."""
