"""The contestants, each a module with a class Peer that worker.py loads in a process of its own.

A module imports only its own library and the standard library, except mini_engine.py: its environment
need not have any package of this project.
"""
