"""kvferry as a KV connector of vLLM. Importing this package imports neither vLLM nor torch."""
