"""The layers that models are composed of. They know kernels and attention specs, never models or the engine."""
