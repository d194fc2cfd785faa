"""Toys made of tensors, for labs that need torch: a second device, small models, steps of paged attention."""
