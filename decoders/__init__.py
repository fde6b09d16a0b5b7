"""Convolutional decoders on boxes, and the modes that bring tokens to them."""
