"""Private and undocumented symbols of other libraries: one function each, with versions they were seen in.

Code outside this package imports only documented symbols of other libraries. Imports are lazy: importing a
module of this package loads nothing. ``tests/compat`` checks that every symbol exists with the
expected signature.
"""
