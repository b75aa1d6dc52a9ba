"""The front door: admits requests, places them on workers, relays their tokens. Read `dispatch` first.

Neither torch nor Ray is behind any import here.
"""
