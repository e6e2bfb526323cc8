"""A sandbox and its life: what it may see, how it is built, who keeps it, what runs in it. Lowest room first.

project, identity, ids, environment   what was asked for, in our words
rungs, view, hidden, seeds            which mounts make up the sandbox: the ladder as data, the plan, what is covered or put in
records/                              what is written down and kept true: record, journal and requests, registry, truth
keeping/                              the keeper and everything that is said to it: wire, spec, line, commands
contents                              what a sandbox did, read from its layers
access/                               its files, from outside: files, transfer
launching/                            how sandboxes come about: engine (the way in), launcher, stock, builder, mechanisms
live, ending                          a sandbox as whoever works in it has it; how one that lives on its own ends
"""
