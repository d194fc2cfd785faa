"""EngineConfig: what it leaves open comes from the model. What it refuses is in test_input_errors.py."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from mini_engine.config import EngineConfig


def test_an_unknown_setting_is_a_type_error():
    with pytest.raises(TypeError, match="max_batch"):
        EngineConfig(max_batch=3)


def test_it_is_frozen_and_its_numbers_are_plain():
    """numpy's whole numbers become Python's own, so that a trace's header can be written."""
    config = EngineConfig(block_size=np.int64(4), num_blocks=np.int32(9))
    assert (type(config.block_size), type(config.num_blocks)) == (int, int)
    with pytest.raises(FrozenInstanceError):
        config.block_size = 8


def test_slots_are_64_or_the_budget():
    assert EngineConfig().scheduler_args()["max_num_seqs"] == 64
    assert EngineConfig(max_num_batched_tokens=8).scheduler_args()["max_num_seqs"] == 8
    # What was left open stays open: another budget gives another number of slots.
    assert replace(EngineConfig(), max_num_batched_tokens=8).scheduler_args()["max_num_seqs"] == 8


def test_fitted_to_a_model():
    """The length is the model's, the pool what its bytes pay for, and no more than could be used."""
    config = EngineConfig(block_size=4, kv_cache_bytes=1000, max_num_seqs=3)
    assert (config.fitted(128, 10).max_model_len, config.fitted(128, 10).num_blocks) == (128, 25)
    assert config.fitted(30, 1).num_blocks == 3 * 8
    assert config.fitted(30, 10**6).num_blocks == 1
    assert replace(config, num_blocks=7, max_model_len=20).fitted(30, 1) == replace(
        config, num_blocks=7, max_model_len=20
    )
    with pytest.raises(ValueError, match="max_model_len 31 exceeds the model's max_position_embeddings 30"):
        replace(config, max_model_len=31).fitted(30, 1)
