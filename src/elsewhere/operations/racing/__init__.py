"""Several approaches at once. `race.py` has the whole; each of the other rooms knows only those below it:

race        what was asked, the template, all attempts, who won
taking      moving the result of an attempt to reality
attempts    one attempt: its sandbox, its command, what it changed
verifying   its checks and its score, each in a fork of its own
course      what all attempts of a race share
guard       what could fake a verification, and bringing changes into a sandbox
commands    one command, its output up to a cap, what it uses
written     races in files
"""
