"""Fixtures of the engine's tests; the plain functions are in helpers.py."""

import pytest


@pytest.fixture(scope="session")
def model():
    """A tiny Llama in float64, where near ties cannot hide an error."""
    from mini_engine.tests.helpers import tiny_model

    return tiny_model()
