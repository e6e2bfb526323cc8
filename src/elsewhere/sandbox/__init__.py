"""A sandbox and its life: what it may see, how it is built, who keeps it, what runs in it.

project, identity, ids, environment   what was asked for, in our words
view, hidden, seeds                   which mounts make up the sandbox: the plan, what is covered, what is put in from the start
mechanisms, fuse, trial               the ladder: how a plan is made true on this host
builder, keeper                       the two processes of a sandbox: one puts the tree together, one lives in it as pid 1
launcher, nursery, stock, creation    who starts both, ahead of time, and makes a sandbox of them
engine, wire                          how everybody else talks to the launcher
live, commands, contents              a running sandbox as its owner has it: commands, changes, the end
record                                sandbox.json
"""
