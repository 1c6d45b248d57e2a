"""kvferry moves KV caches between prefill and decode engines in disaggregated LLM serving."""

__version__ = "0.1.0"
