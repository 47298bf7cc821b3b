"""What config.json calls an activation (`hidden_act`) -> what kernels and the embedded decoder call it. Pure: no torch.

Not here: the functions (activation.py, octavo.kernels.reference.activations).
"""

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
