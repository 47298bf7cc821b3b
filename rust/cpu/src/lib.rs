//! CPU kernels over raw pointers, with runtime dispatch.
