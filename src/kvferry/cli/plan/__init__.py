"""`kvferry plan`: what would move between two engines, worked out before any of them runs.

models.py reads what a model caches from its config.json, by the rules of keys.py for single keys; sides.py what a
person says about an engine; caches.py makes the layouts of its ranks as vLLM would; cases.py reads layouts that are
written out. survey.py plans every pair of ranks with the real planner, advice.py plans the alternatives. text.py,
data.py and svg.py show the result.
"""
