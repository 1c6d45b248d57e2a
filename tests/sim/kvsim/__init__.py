"""A simulator of the protocol: the real state machines, with simulated processes, clocks, memory and network.

Everything follows from a seed. `world` has time, processes and the network; `producer` and `consumer` are the two
sides around the machines, with their memory; both check the rules of the protocol against what they know to be
true. `scenario` draws what happens, `simulate` runs it, `planted` has bugs that the checks must find.
"""
