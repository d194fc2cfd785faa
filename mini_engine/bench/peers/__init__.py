"""Those who race, each as a module with a class Peer, loaded by worker.py in a process of its own.

A module imports only its own library and the standard library, except mini_engine.py: the
environment that it runs in need not have anything of this project's.
"""
