"""A sandbox and its life: what it may see, how it is built, who keeps it, what runs in it.

project, identity, environment   what was asked for, in our words
view                             which mounts make up the sandbox: the plan
mechanisms                       the ladder: how a plan is made true on this host
builder, keeper                  the two processes of a sandbox: one puts the tree together, one lives in it as pid 1
launcher, engine                 the process that starts both, and how everybody else talks to it
commands                         starting a command and waiting for its end
record                           sandbox.json
"""
