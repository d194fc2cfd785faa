"""Structured output: token masks that let a model write texts of a given shape and no others."""
