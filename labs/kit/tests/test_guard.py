"""The guards end what does not end by itself, and touch nothing else."""

import time

import pytest

from labs.kit.guard import FLOOD, PrintFlood, TimeUp, deadline, limited_prints


def test_endless_loop_is_ended():
    with pytest.raises(TimeUp), deadline(0.05):
        while True:
            pass


def test_a_loop_that_swallows_everything_is_told_again():
    told = 0
    with deadline(0.05):
        while told < 2:
            try:
                while True:
                    pass
            except BaseException as error:
                assert isinstance(error, TimeUp)
                told += 1
    assert told == 2


def test_a_quick_block_is_left_alone_and_nothing_strikes_later():
    for _ in range(50):
        with deadline(0.02):
            pass
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass


def test_deadlines_nest():
    with deadline(5):
        with pytest.raises(TimeUp), deadline(0.05):
            while True:
                pass


def test_flood_is_ended_and_a_line_is_not(capsys):
    with pytest.raises(PrintFlood), limited_prints():
        while True:
            print("still here")
    assert len(capsys.readouterr().out) <= FLOOD
    with limited_prints():
        print("hello")
    assert capsys.readouterr().out == "hello\n"
