"""lookfar as the decoding loop of `model.generate`."""
