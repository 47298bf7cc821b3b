"""Decode steps as a few fused kernels a layer, for the decoders and devices that support.py accepts.

The plain path (the modules in octavo.models.decoder) runs everything else, and is what this one must agree with.
"""
