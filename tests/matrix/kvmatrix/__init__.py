"""The matrix: every combination of splits and layouts, moved between two real processes and checked byte by byte.

`models` has models and how engines keep them; `tensors` and `caches` say where each byte then lies, found with numpy
and not with the product's axes; `coordinates` says what it must be. `combinations` is the table of what is run, with
`special` cases and `refusals`. `engines` are real engines without vLLM, ../process.py is the program of one of the two
processes, `driver` starts both and runs combinations through them, `document` writes docs/matrix.md.
"""
