"""All of Redis: keys, scripts, the worker registry and the admission queue.

Redis holds state that can be lost: everything in it is rebuilt from heartbeats and live requests.
"""
