"""Stands in for torch, of which MoRI's Python code wants one class's name; the real one takes seconds to import."""


class Tensor: ...
