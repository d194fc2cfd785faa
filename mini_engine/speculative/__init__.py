"""Speculative decoding: several tokens from one forward pass, and the same text.

ngram.py and draft_model.py propose, adaptive.py says how much, verify.py schedules drafts and keeps what the
model would have said itself, and rejection_sampler.py is the rule for drafts that are sampled. No torch.
"""
