"""Convolutional networks on boxes: decoders, U-Nets, and the modes that bring tokens to decoders."""
